"""Trees of AITER on a machine: found, read, copied."""
