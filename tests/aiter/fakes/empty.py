"""Nothing."""

get_GEMM_config = None
