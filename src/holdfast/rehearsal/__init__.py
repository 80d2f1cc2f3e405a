"""`holdfast rehearse`: the user's own job under faults, on this host, compared with an undisturbed run of it."""
