"""The search engine: compiles candidates of a GEMM ahead, measures them on one GPU, and ranks the fastest.

It knows no kernels. They come from a kernel source (`source.py`); `aiter-triton` is one. Importing this package imports
neither torch nor triton.
"""
