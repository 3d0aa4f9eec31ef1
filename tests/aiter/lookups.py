"""Asks AITER's own lookups for rows, in the Python that runs a tree: `lookups.py JSON`, printing what they find.

JSON: a list of {"family", "key"}; the tables are named by AITER's variables.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

MARK = "LOOKUPS "
SIZES = ("M", "N", "K")


def find(family: str, key: dict[str, Any]) -> dict[str, Any] | None:
    """The row that AITER would use."""
    if family == "fmoe":
        return _of_experts(key)
    tables = importlib.import_module("aiter.jit.core").AITER_CONFIGS
    sizes = [int(key[c]) for c in SIZES]
    if family == "a4w4_blockscale":
        found = importlib.import_module("aiter.ops.gemm_op_a4w4").get_GEMM_config(*sizes)
    elif family == "batched_gemm_a8w8_blockscale_mxscale":
        found = importlib.import_module("aiter.ops.batched_gemm_op_a8w8").lookup_mxscale_bmm_config(
            int(key["B"]), *sizes
        )
    elif family.startswith("batched_"):
        module = importlib.import_module(f"aiter.ops.batched_gemm_op_{family.removeprefix('batched_')}")
        found = module.get_CKBatchedGEMM_config(int(key["B"]), *sizes)
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


def _of_experts(key: dict[str, Any]) -> dict[str, Any]:
    """The kernels that fused_moe would start, and the block that it would sort by."""
    moe, torch = (importlib.import_module(name) for name in ("aiter.fused_moe", "torch"))
    aiter = importlib.import_module("aiter")
    types = [getattr(torch, key[c].removeprefix("torch.")) for c in ("dtype", "q_dtype_a", "q_dtype_w")]
    quant = getattr(aiter.QuantType, key["q_type"].removeprefix("QuantType."))
    act = getattr(aiter.ActivationType, key["act_type"].removeprefix("ActivationType."))
    sizes = [int(key[c]) for c in ("token", "model_dim", "inter_dim", "expert", "topk")]
    found = moe.get_2stage_cfgs(*sizes, *types, quant, bool(int(key["use_g1u1"])), act, False, 0, 0)
    names = [getattr(f, "keywords", {}).get("kernelName", "") for f in (found.stage1, found.stage2)]
    return {"kernelName1": names[0], "kernelName2": names[1], "block_m": str(found.block_m)}


if __name__ == "__main__":
    answers = [find(**asked) for asked in json.loads(sys.argv[1])]
    print(MARK + json.dumps(answers))
