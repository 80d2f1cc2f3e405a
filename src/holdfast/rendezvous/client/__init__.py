"""An agent's connection to the coordinator of its run."""
