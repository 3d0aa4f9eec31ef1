"""Environment variables between the launch scripts and the worker, and those that change AITER's candidates."""

from __future__ import annotations

import re

AITER_ROOT_ENV = "GEMMFLEET_AITER_ROOT"
"""The inventory's path of AITER."""
CACHE_ENV = "GEMMFLEET_CACHE"
"""The node's folder for what outlives a run."""
IMAGE_ENV = "GEMMFLEET_IMAGE_DIGEST"
INVENTORY_ENV = "GEMMFLEET_INVENTORY_ENV"
"""Names that the inventory sets; what else is there comes from the image."""
CLEARED_ENV = "GEMMFLEET_CLEARED_ENV"
"""Names that tune.sh cleared before the worker began, GPU_ARCHS and CU_NUM with their values."""

AITER_CLEARED = re.compile(
    r"AITER_CONFIG_\w+|AITER_REBUILD|AITER_(?:TUNE_GEMM|ONLINE_TUNE|BYPASS_TUNE_CONFIG|LOG_MORE|LOG_TUNED_CONFIG)"
    r"|AITER_JIT_DIR|AITER_META_DIR|AITER_ASM_DIR|HIP_ONLINE_TUNING|PYTORCH_TUNABLEOP_\w+|GTUNE_\w+|TUNE_ONLY|OPUS_ONLY"
    r"|OPUS_SKIP_CKTILE"
)
"""Switches that choose other tables, other kernels or another build than the image's own."""
AITER_SWITCHES = re.compile(
    r"GPU_ARCHS|CU_NUM|TUNE_MOE_\w+|AITER_(?:TRITON_ONLY|KSPLIT|OPUS_TUNED_CSV_GLOB|TUNE_CANDIDATE_DUMP_DIR"
    r"|RUN_CONFIG_COS_TOL)"
)
"""Switches that change which candidates there are or how they are judged; cleared, unless the inventory names them."""
