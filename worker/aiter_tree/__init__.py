"""Trees of AITER on a machine: found, read and copied, and the kernels that they hold."""
