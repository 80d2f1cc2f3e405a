"""The coordinator: a server around the machine of each run."""
