"""The etcd backend: etcd elects the coordinator of a run and keeps its memory."""
