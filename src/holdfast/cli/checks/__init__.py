"""What `holdfast doctor` checks: a host, and the way to a coordinator."""
