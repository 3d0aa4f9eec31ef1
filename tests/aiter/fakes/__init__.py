"""Replacements of what a machine without ROCm lacks, for AITER's own files: compiler and its output, quantiser, timer,
device. Everything else that runs is the tree's: see sitecustomize.py."""
