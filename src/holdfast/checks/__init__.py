"""Checks of a node before it takes part in a round (`--check`). docs/decisions/0035-checks.md has the design."""
