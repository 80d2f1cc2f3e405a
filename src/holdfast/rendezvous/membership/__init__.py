"""Who is in a run, and what it decides: the machines of the coordinator and of a node. All pure."""
