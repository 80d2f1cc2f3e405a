"""The commands of holdfast, one module each. Nothing is imported before a command is chosen."""
