"""The transport `exec`: commands started one by one by somebody else's means, such as a step of a Slurm job."""
