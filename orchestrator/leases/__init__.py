"""Leases: nodes that a scheduler grants and takes back. A Slurm job or a pod that holds a machine is a node."""
