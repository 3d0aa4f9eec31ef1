"""Case of a bench: one GEMM as backends are given it, with its format and cost. Needs no torch.

out[M, N] = X[M, K] @ W[N, K]^T, batched: for each b. W is stored as N rows of K.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from worker.families import FAMILIES
from worker.tuners.common.problem import MX_GROUP, UnsupportedError, fp8_of

ROW16, ROW8, BLOCK8, MX4 = "row16", "row8", "block8", "mx4"
PRE8, PRE4 = "pre8", "pre4"
"""X is bfloat16 and quantised within the call; W is int8 with one scale, or MXFP4."""

FORMATS: dict[str, str] = {f.name: f.format for f in FAMILIES.values() if f.format}
OF_BATCHED = {
    "aiter-bmm-bf16": ROW16,
    "aiter-bmm-a8w8": ROW8,
    "aiter-bmm-a8w8-prequant": PRE8,
    "aiter-bmm-afp4wfp4": MX4,
    "aiter-bmm-a16wfp4": PRE4,
}
"""These have formats of their own, whatever the family of the shapes is."""

_X_BITS = {ROW8: 8, BLOCK8: 8, MX4: 4}
_W_BITS = {ROW8: 8, BLOCK8: 8, MX4: 4, PRE8: 8, PRE4: 4}
_WIDTHS = {"bfloat16": 16, "float16": 16, "float32": 32}


@dataclass(frozen=True, slots=True)
class Case:
    """One GEMM of `b` products (0: not batched). Types are named as torch does, without `torch.`."""

    family: str
    format: str
    m: int
    n: int
    k: int
    b: int = 0
    dtype: str = "bfloat16"
    outdtype: str = "bfloat16"
    bias: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * max(1, self.b)

    @property
    def moved_bytes(self) -> int:
        """Both operands read once in their stored format (no scales), the output written once, as AITER counts."""
        wide = _WIDTHS.get(self.dtype, 16)
        x, w = _X_BITS.get(self.format, wide), _W_BITS.get(self.format, wide)
        bits = self.m * self.k * x + self.n * self.k * w + self.m * self.n * _WIDTHS[self.outdtype]
        return max(1, self.b) * bits // 8


def parse(family: str, key: Mapping[str, int | str], backend: str, gfx: str = "") -> Case:
    """The case of a shape's key columns for a backend. Raises UnsupportedError."""
    if family not in FORMATS:
        raise UnsupportedError(f"bench has no inputs for family {family}; it has {', '.join(FORMATS)}")
    b, m, n, k = (int(key.get(c, 0)) for c in "BMNK")
    format_ = OF_BATCHED.get(backend, FORMATS[family])
    if backend in OF_BATCHED and not b:
        batched = " or ".join(f.name for f in FAMILIES.values() if "B" in f.key_names)
        raise UnsupportedError(f"{backend} takes shapes with a column B (family {batched})")
    if format_ in (MX4, PRE4) and k % MX_GROUP:
        raise UnsupportedError(f"K is {k}; MXFP4 needs a multiple of {MX_GROUP}")
    if family == "a16w16" and backend not in OF_BATCHED:
        if odd := [c for c in ("scaleAB", "bpreshuffle") if str(key.get(c, "False")) == "True"]:
            raise UnsupportedError(f"{odd[0]} is True; bench has plain a16w16 operands only")
        dtype, out = _type(key, "dtype", "bfloat16"), _type(key, "outdtype", "")
        if dtype not in _WIDTHS:
            raise UnsupportedError(f"dtype is {dtype}; bench takes {', '.join(_WIDTHS)}")
        return Case(family, format_, m, n, k, b, dtype, out or dtype, str(key.get("bias", "False")) == "True")
    dtype = {
        ROW8: _type(key, "q_dtype_w", "int8"),
        BLOCK8: fp8_of(gfx),
        MX4: "float4_e2m1fn_x2",
        PRE8: "int8",
        PRE4: "float4_e2m1fn_x2",
        ROW16: "bfloat16",
    }[format_]
    return Case(family, format_, m, n, k, b, dtype)


def _type(key: Mapping[str, int | str], column: str, default: str) -> str:
    return str(key.get(column, default)).removeprefix("torch.")
