"""How the command line of `holdfast run` and of the other commands is read."""
