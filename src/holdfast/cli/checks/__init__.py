"""What `holdfast doctor` looks at: facts of a host and of the way to a coordinator, and what they mean for a run."""
