"""What the scripts import of aiter.jit.core, as the real file of the checkout would answer on a gfx950."""

import os
import re
from typing import Any

ROOT = os.environ["REAL_AITER_ROOT"]
with open(os.path.join(ROOT, "aiter/jit/core.py")) as f:
    _REAL = f.read()
_PLAIN = re.search(r'AITER_ASM_DIR = f"\{AITER_META_DIR\}/hsa/"', _REAL) and "join(AITER_ASM_DIR" not in _REAL
AITER_CONFIG_GEMM_A4W4 = os.path.join(ROOT, "aiter/configs/a4w4_blockscale_tuned_gemm.csv")


def compile_ops(*_: Any, **__: Any) -> Any:
    return lambda f: f


def get_asm_dir() -> str:
    return f"{ROOT}/hsa/" if _PLAIN else f"{ROOT}/hsa/gfx950"
