"""The tuner `torch`: real GEMM candidates on any CPU or GPU that torch runs on (docs/reference/tuners.md).

Importing this package imports no torch; `open()` of the tuner does. Inside it, `import torch` is the library.
"""
