"""A case: one GEMM as a backend of a bench or a Triton kernel gets it, with its operand format and its cost.

`case_of` makes it from a shape's key columns, for a backend. It is called by the process of a backend
(worker/bench/child.py) and by the tuner aiter-triton. This module needs no torch: inputs.py draws the operands.

The product is out[M, N] = X[M, K] @ W[N, K]^T; for batched families one such product for each of B. W is stored as N
rows of K.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from worker.families import FAMILIES
from worker.tuners.common.problem import MX_GROUP, UnsupportedError, fp8_of

ROW16 = "row16"
"""Operand format: floats of 16 or 32 bits, without scales."""
ROW8 = "row8"
"""int8 or fp8, with one scale for each row of X and of W."""
BLOCK8 = "block8"
"""fp8, with one scale for each 128 elements along K, of W for each block of 128 x 128."""
MX4 = "mx4"
"""MXFP4: two e2m1 codes a byte, and one e8m0 scale for each 32 elements along K."""
PRE8 = "pre8"
"""X is bfloat16 and quantised within the call; W is int8 with one scale for the whole tensor."""
PRE4 = "pre4"
"""X is bfloat16 and quantised within the call; W is MXFP4."""

FAMILY_FORMATS: dict[str, str] = {f.name: f.format for f in FAMILIES.values() if f.format}
BATCHED_FORMATS = {
    "aiter-bmm-bf16": ROW16,
    "aiter-bmm-a8w8": ROW8,
    "aiter-bmm-a8w8-prequant": PRE8,
    "aiter-bmm-afp4wfp4": MX4,
    "aiter-bmm-a16wfp4": PRE4,
}
"""These backends have formats of their own, whatever the family of the shapes is."""

_X_BITS = {ROW8: 8, BLOCK8: 8, MX4: 4}
_W_BITS = {ROW8: 8, BLOCK8: 8, MX4: 4, PRE8: 8, PRE4: 4}
_FLOAT_BITS = {"bfloat16": 16, "float16": 16, "float32": 32}


@dataclass(frozen=True, slots=True)
class Case:
    """One GEMM of `b` products (0: not batched). Types are named as torch does, without `torch.`."""

    family: str
    format: str
    """One of the formats above, such as ROW8."""
    m: int
    n: int
    k: int
    b: int = 0
    dtype: str = "bfloat16"
    """Type of the elements of W, and of X where it is not quantised within the call."""
    outdtype: str = "bfloat16"
    bias: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * max(1, self.b)

    @property
    def moved_bytes(self) -> int:
        """Both operands read once in their stored format (no scales), the output written once, as AITER counts."""
        float_bits = _FLOAT_BITS.get(self.dtype, 16)
        bits = self.m * self.k * _X_BITS.get(self.format, float_bits)
        bits += self.n * self.k * _W_BITS.get(self.format, float_bits)
        bits += self.m * self.n * _FLOAT_BITS[self.outdtype]
        return max(1, self.b) * bits // 8


def case_of(family: str, key: Mapping[str, int | str], backend: str, gfx: str = "") -> Case:
    """Make the case of a shape's key columns for a backend; `gfx` decides which fp8 the chip has.

    Raises UnsupportedError if the backend cannot run such shapes.
    """
    if family not in FAMILY_FORMATS:
        raise UnsupportedError(f"bench has no inputs for family {family}; it has {', '.join(FAMILY_FORMATS)}")
    b, m, n, k = (int(key.get(column, 0)) for column in "BMNK")
    operand_format = BATCHED_FORMATS.get(backend, FAMILY_FORMATS[family])
    if backend in BATCHED_FORMATS and not b:
        batched = " or ".join(f.name for f in FAMILIES.values() if "B" in f.key_names)
        raise UnsupportedError(f"{backend} takes shapes with a column B (family {batched})")
    if operand_format in (MX4, PRE4) and k % MX_GROUP:
        raise UnsupportedError(f"K is {k}; MXFP4 needs a multiple of {MX_GROUP}")
    if family == "a16w16" and backend not in BATCHED_FORMATS:
        return _a16w16_case(key, m, n, k, b)
    dtype = {
        ROW8: _type(key, "q_dtype_w", "int8"),
        BLOCK8: fp8_of(gfx),
        MX4: "float4_e2m1fn_x2",
        PRE8: "int8",
        PRE4: "float4_e2m1fn_x2",
        ROW16: "bfloat16",
    }[operand_format]
    return Case(family, operand_format, m, n, k, b, dtype)


def _a16w16_case(key: Mapping[str, int | str], m: int, n: int, k: int, b: int) -> Case:
    """The only family whose key names the types, a bias, and forms that the bench has no operands for."""
    for column in ("scaleAB", "bpreshuffle"):
        if str(key.get(column, "False")) == "True":
            raise UnsupportedError(f"{column} is True; bench has plain a16w16 operands only")
    dtype = _type(key, "dtype", "bfloat16")
    if dtype not in _FLOAT_BITS:
        raise UnsupportedError(f"dtype is {dtype}; bench takes {', '.join(_FLOAT_BITS)}")
    outdtype = _type(key, "outdtype", "") or dtype
    return Case(
        "a16w16", FAMILY_FORMATS["a16w16"], m, n, k, b, dtype, outdtype, str(key.get("bias", "False")) == "True"
    )


def _type(key: Mapping[str, int | str], column: str, default: str) -> str:
    return str(key.get(column, default)).removeprefix("torch.")
