"""Real servers for tests and demos."""
