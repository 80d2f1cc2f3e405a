"""Where the nodes of a run come from: the engines that start agents (ssh, Slurm, Ray, Kubernetes)."""
