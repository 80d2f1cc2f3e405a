"""Whether a worker group still moves, and where it stands if it does not."""
