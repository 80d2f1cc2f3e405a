"""The process that owns the workers, and the agent's end of its socket."""
