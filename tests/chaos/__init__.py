"""A real run under real faults, in namespaces as hosts: `campaign` says what happens to it, `job` what it computes."""
