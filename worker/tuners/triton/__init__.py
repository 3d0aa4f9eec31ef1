"""The tuner `triton`: our own GEMM kernels for any GPU that Triton compiles for (CUDA and ROCm from one source)."""
