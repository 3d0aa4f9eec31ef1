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
from pathlib import PurePosixPath

# a line without any of these says nothing of interest
MARKS = (b"onfig file not found at", b"TunableOp_")

_FILE = re.compile(
    r"(?:\bE=(?P<expert>\d+),N=(?P<inter_dim>\d+)|\bN=(?P<N>\d+),K=(?P<K>\d+)),device_name=[^,/]*?"
    r"(?:,dtype=(?P<dtype>\w+?))?(?:,block_shape=(?P<block>\[\d+, ?\d+\]))?(?P<more>(?:,\w+=\w+?)*(?:_down)?)\.json"
)
_OTHER = re.compile(r"onfig file not found at (\S+\.json)")
_UNTUNED = re.compile(
    r"\bGemm(?P<bias>AndBias)?TunableOp_(?P<dtype>BFloat16|Half|float|tf32)_TN,"
    r"tn_(?P<N>\d+)_(?P<M>\d+)_(?P<K>\d+)(?:_ld_\d+_\d+_\d+)?\s*(?:,- \{.*)?\Z"
)
_TUNABLE = re.compile(r"\b(\w*TunableOp_[\w:<>]+),\w+\s*(?:,- \{.*)?\Z")
_DTYPES = {"BFloat16": "torch.bfloat16", "Half": "torch.float16"}
_FP8 = {"q_dtype_a": "torch.float8_e4m3fn", "q_dtype_w": "torch.float8_e4m3fn"}
_BF16 = {"q_dtype_a": "torch.bfloat16", "q_dtype_w": "torch.bfloat16"}
# (dtype, block, what follows) in a file's name -> the quantisation as columns of fmoe
_SCHEMES = {
    ("fp8_w8a8", "[128,128]", ""): {**_FP8, "q_type": "QuantType.per_1x128"},
    ("fp8_w8a8", "", ""): {**_FP8, "q_type": "QuantType.per_Tensor"},
    (None, "", ""): {**_BF16, "q_type": "QuantType.No"},
}


class NotTunedError(ValueError):
    """The line names something that gemmfleet does not tune; the text says what."""


def read_engine_line(line: str) -> tuple[str, dict[str, str]] | None:
    """The family and key columns of a config file that an engine did not find. Raises NotTunedError."""
    found = _FILE.search(line)
    if found is None:
        if other := _OTHER.search(line):
            raise NotTunedError(PurePosixPath(other[1]).name)
        return None
    kind = (found["dtype"], (found["block"] or "").replace(" ", ""), found["more"])
    if kind not in _SCHEMES or (found["N"] and not kind[1]):
        raise NotTunedError(found[0])
    if found["N"]:
        return "a8w8_blockscale", {"N": found["N"], "K": found["K"]}
    return "fmoe", {"inter_dim": found["inter_dim"], "expert": found["expert"], **_SCHEMES[kind]}


def read_tunableop(line: str) -> tuple[str, dict[str, str]] | None:
    """The shape of a line of `tunableop_untuned*.csv`, None for a tuned one. Raises NotTunedError."""
    found = _UNTUNED.search(line)
    if found is None:
        if other := _TUNABLE.search(line):
            raise NotTunedError(other[1])
        return None
    dtype = _DTYPES.get(found["dtype"], "torch.float32")
    sizes = {name: found[name] for name in "MNK"}
    return "a16w16", {**sizes, "bias": str(bool(found["bias"])), "dtype": dtype, "outdtype": dtype}
