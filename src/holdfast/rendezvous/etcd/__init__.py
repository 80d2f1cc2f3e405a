"""Runs on etcd: etcd says who coordinates, and keeps what a coordinator must not forget."""
