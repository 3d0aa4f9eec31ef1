"""Asks AITER's own lookups for rows, in the Python that runs a tree: `lookups.py JSON`, printing what they find.

JSON: a list of {"family", "key"}; the tables are named by AITER's variables.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

MARK = "LOOKUPS "


def find(family: str, key: dict[str, Any]) -> dict[str, Any] | None:
    """The row that AITER would use."""
    tables = importlib.import_module("aiter.jit.core").AITER_CONFIGS
    sizes = [int(key[c]) for c in ("M", "N", "K")]
    if family == "a4w4_blockscale":
        found = importlib.import_module("aiter.ops.gemm_op_a4w4").get_GEMM_config(*sizes)
    elif family == "a16w16":
        words = [key["bias"] == "True", key["dtype"], key["outdtype"], key["scaleAB"] == "True"]
        found = importlib.import_module("aiter.tuned_gemm").get_GEMM_A16W16_config(*sizes, *words)
    else:
        module = importlib.import_module("aiter.ops.gemm_op_a8w8")
        file = getattr(tables, f"AITER_CONFIG_GEMM_{family.upper()}_FILE")
        typed = getattr(module, "get_GEMM_config_with_quant_type", None)
        if family == "a8w8_bpreshuffle":
            typed = typed or module.get_bpreshuffle_GEMM_config
        if typed is None or "blockscale" in family:
            found = module.get_CKGEMM_config(*sizes, file)
        else:
            torch = importlib.import_module("torch")
            found = typed(*sizes, getattr(torch, key["q_dtype_w"].removeprefix("torch.")), file)
    return found if found is None else {k: str(v) for k, v in dict(found).items()}


if __name__ == "__main__":
    print(MARK + json.dumps([find(**asked) for asked in json.loads(sys.argv[1])]))
