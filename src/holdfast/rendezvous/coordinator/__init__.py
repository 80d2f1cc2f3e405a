"""The coordinator: a server around the machine of one run."""
