"""State that outlives a worker."""
