"""Runs on etcd: etcd says who coordinates, and stores the coordinator's memory."""
