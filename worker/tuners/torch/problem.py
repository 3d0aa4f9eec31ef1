"""A shape as a problem: what is multiplied, in which formats, and what it costs. Needs no torch.

out[M, N] = X[M, K] @ W[N, K]^T, with W stored as N rows of K (the layout of a linear layer's weight).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from worker.families import computed_by
from worker.tuners.common.key_cells import UnsupportedError, flag_of, format_of, size_of

A16W16, A8W8, A4W4 = "a16w16", "a8w8", "a4w4_blockscale"
FAMILIES = computed_by("torch")
MX_GROUP = 32
"""Elements along K that share one e8m0 scale (OCP Microscaling Formats 1.0)."""

_FLOATS = {"bfloat16": 2, "float16": 2, "float32": 4}
_EIGHT_BITS = ("int8", "float8_e4m3fn", "float8_e4m3fnuz")


@dataclass(frozen=True, slots=True)
class Problem:
    """One GEMM. `dtype` names the operands' format, `outdtype` the output's, both as torch does (no `torch.`)."""

    family: str
    m: int
    n: int
    k: int
    dtype: str
    outdtype: str = "bfloat16"
    bias: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def x_bytes(self) -> int:
        """X in its stored format, without scales."""
        return self.m * self.k * self._bits // 8

    @property
    def w_bytes(self) -> int:
        """W in its stored format, without scales."""
        return self.n * self.k * self._bits // 8

    @property
    def scale_bytes(self) -> int:
        """The scales of both operands: float32 per row (a8w8), e8m0 per 32 along K (MXFP4)."""
        if self.family == A8W8:
            return 4 * (self.m + self.n)
        return (self.m + self.n) * self.k // MX_GROUP if self.family == A4W4 else 0

    @property
    def out_bytes(self) -> int:
        return self.m * self.n * _FLOATS[self.outdtype]

    @property
    def moved_bytes(self) -> int:
        """What `bw` counts, as AITER does: both operands read once in their stored format, the output written once."""
        return self.x_bytes + self.w_bytes + self.out_bytes

    @property
    def weight_key(self) -> tuple[object, ...]:
        """Problems of one weight_key can share W."""
        return (self.family, self.n, self.k, self.dtype)

    @property
    def _bits(self) -> int:
        if self.family == A4W4:
            return 4
        return 8 if self.family == A8W8 else 8 * _FLOATS[self.dtype]


def parse(family: str, key: Mapping[str, int | str]) -> Problem:
    """The problem of a shape's key columns. Raises UnsupportedError for what this tuner has no candidates for."""
    if family not in FAMILIES:
        raise UnsupportedError(f"the tuner torch has no candidates for family {family}; it has {', '.join(FAMILIES)}")
    m, n, k = (size_of(key, c) for c in "MNK")
    if family == A4W4:
        if k % MX_GROUP:
            raise UnsupportedError(f"K is {k}; MXFP4 needs a multiple of {MX_GROUP}")
        return Problem(family, m, n, k, "float4_e2m1fn_x2")
    if family == A8W8:
        dtype = format_of(key, "q_dtype_w", _EIGHT_BITS, "torch.int8")
        return Problem(family, m, n, k, dtype)
    for column in ("scaleAB", "bpreshuffle"):
        if flag_of(key, column):
            raise UnsupportedError(f"{column} is True; the tuner torch measures plain a16w16 operands only")
    dtype = format_of(key, "dtype", tuple(_FLOATS), "torch.bfloat16")
    return Problem(
        family, m, n, k, dtype, format_of(key, "outdtype", tuple(_FLOATS), f"torch.{dtype}"), flag_of(key, "bias")
    )
