"""The transport `exec`: commands started one by one by an external scheduler, such as a step of a Slurm job."""
