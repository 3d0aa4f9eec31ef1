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
    sizes = [int(key[c]) for c in ("M", "N", "K")]
    if family == "a4w4_blockscale":
        found = importlib.import_module("aiter.ops.gemm_op_a4w4").get_GEMM_config(*sizes)
    else:
        words = [key["bias"] == "True", key["dtype"], key["outdtype"], key["scaleAB"] == "True"]
        found = importlib.import_module("aiter.tuned_gemm").get_GEMM_A16W16_config(*sizes, *words)
    return found if found is None else {k: str(v) for k, v in dict(found).items()}


if __name__ == "__main__":
    print(MARK + json.dumps([find(**asked) for asked in json.loads(sys.argv[1])]))
