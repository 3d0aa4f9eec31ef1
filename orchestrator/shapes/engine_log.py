"""Lines of vLLM and SGLang that name a missing Triton config file, and lines of PyTorch's list of untuned GEMMs.

Both engines log the path of a config file that their look-up did not find (vLLM 0.33: `get_w8a8_block_fp8_configs` in
fp8_utils.py, `get_moe_configs` in fused_moe.py; SGLang 0.5.23: fp8_kernel.py, fused_moe_triton_config.py). The name
has N and K of a linear layer, or E and N of fused experts. It has no M: a file serves every M.

PyTorch writes `tunableop_untuned*.csv` with PYTORCH_TUNABLEOP_RECORD_UNTUNED=1. A line has BLAS's m, n and k of
column-major matrices (ATen/cuda/tunable/GemmCommon.h). `x @ W.T` with x [M,K] and W [N,K], both row-major, is the
layout TN there, with m = N, n = M and k = K.
"""

from __future__ import annotations

import re

from worker.triton_configs.engine_config_file import EngineConfigFile
from worker.triton_configs.engine_package import SCHEMES

_PATH = re.compile(r"not found at (.*?\.json|.*)")
"""The path in such a line. SGLang writes an address of the web behind it; a line that was cut has no end of a name."""
_UNTUNED = re.compile(
    r"\b(?P<op>\w*)TunableOp_(?P<dtype>[\w:<>]+)_(?P<layout>[NT]{2}),[nt]{2}_(?P<N>\d+)_(?P<M>\d+)_(?P<K>\d+)"
    r"(?:_\w+)?(?:,- \{.*)?\s*\Z"
)
_DTYPES = {"BFloat16": "torch.bfloat16", "Half": "torch.float16", "float": "torch.float32", "tf32": "torch.float32"}
_Q_TYPES = {scheme: q_type for q_type, scheme in SCHEMES.items()}
"""The column q_type by (dtype, block) of a file's name."""


def read_engine_line(line: str) -> tuple[str, dict[str, str]]:
    """The family and key columns of a config file that an engine did not find. Raises ValueError for one that gemmfleet
    does not tune, and for a name that breaks off."""
    file = EngineConfigFile.named_in(line)
    shape = _key_columns(file) if file else None
    if shape is not None:
        return shape
    path = _PATH.search(line)
    name = path[1].split("/")[-1].strip() if path else "this"
    if not name.endswith(".json"):
        raise ValueError(f"a name that breaks off: {name}")
    raise ValueError(f"gemmfleet does not tune {name}")


def _key_columns(file: EngineConfigFile) -> tuple[str, dict[str, str]] | None:
    """The family and key columns of a file; None for one that gemmfleet does not tune."""
    layer = file.layer
    q_type = _Q_TYPES.get((layer.dtype, layer.block))
    if layer.op == "linear":
        if q_type != "QuantType.per_1x128" or file.rest:
            return None
        return "a8w8_blockscale", {"N": str(layer.n), "K": str(layer.k)}
    # SGLang has a file for the second product of experts; both are tuned together
    if q_type is None or file.rest not in ("", "_down"):
        return None
    operand_dtype = "torch.float8_e4m3fn" if layer.dtype else "torch.bfloat16"
    return "fmoe", {
        "inter_dim": str(layer.n),
        "expert": str(layer.e),
        "q_dtype_a": operand_dtype,
        "q_dtype_w": operand_dtype,
        "q_type": q_type,
    }


def read_tunableop(line: str) -> tuple[str, dict[str, str]] | None:
    """The shape of a line of `tunableop_untuned*.csv`, None for a tuned one. Raises ValueError for a GEMM that is not
    of the family a16w16."""
    gemm = _UNTUNED.search(line)
    if gemm is None:
        return None
    dtype = _DTYPES.get(gemm["dtype"])
    bias = {"Gemm": "False", "GemmAndBias": "True"}.get(gemm["op"])
    if dtype is None or bias is None or gemm["layout"] != "TN":
        raise ValueError(f"gemmfleet does not tune {gemm[0].partition(',')[0]}")
    return "a16w16", {**{name: gemm[name] for name in "MNK"}, "bias": bias, "dtype": dtype, "outdtype": dtype}
