"""The search engine: compiles candidates of a GEMM ahead, measures them on the GPU, ranks the fastest.

It knows no kernels. A tuner gives it candidates and the processes' work (`aiter-triton` does).
"""
