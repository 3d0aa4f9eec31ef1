"""What a machine without ROCm lacks, for AITER's own files: the compiler and what it makes, the quantiser, the timer,
the device. Everything else that runs is the tree's: see sitecustomize.py."""
