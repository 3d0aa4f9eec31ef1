"""A shape as a problem for our kernels: what is multiplied, in which formats, and what it costs. Needs neither torch
nor triton.

out[B, M, N] = X[B, M, K] @ W[B, N, K]^T, with W stored as N rows of K (the layout of a linear layer's weight). B is 1
but for the batched families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from worker.families import computed_by
from worker.tuners.common.key_cells import UnsupportedError, flag_of, format_of, size_of
from worker.tuners.torch.problem import A4W4, A8W8, MX_GROUP

__all__ = ["FAMILIES", "MX_GROUP", "Problem", "parse"]

BLOCKSCALE, BATCHED_BF16, BATCHED_A8W8 = "a8w8_blockscale", "batched_bf16", "batched_a8w8"
FAMILIES = computed_by("triton")
SCALE_BLOCK = 128
"""a8w8_blockscale: one float32 scale per 1 x 128 elements of X and per 128 x 128 of W."""

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1}
_OUT = ("bfloat16", "float16", "float32")
_HALF = ("bfloat16", "float16")
_EIGHT_BITS = ("int8", "float8_e4m3fn", "float8_e4m3fnuz")
_FP4 = "float4_e2m1fn_x2"


@dataclass(frozen=True, slots=True)
class Problem:
    """One GEMM. `dtype` names the operands' format, `outdtype` the output's, both as torch does (no `torch.`).

    `scale` is `none`, `tensor` (one float32 an operand), `row` (one a row of X and a row of W), `block` (1 x 128 and
    128 x 128) or `mx` (one e8m0 byte per 32 along K).
    """

    family: str
    b: int
    m: int
    n: int
    k: int
    dtype: str
    outdtype: str = "bfloat16"
    bias: bool = False
    scale: str = "none"

    @property
    def flops(self) -> int:
        return 2 * self.b * self.m * self.n * self.k

    @property
    def bits(self) -> int:
        """Bits of an operand's element as stored."""
        return 4 if self.dtype == _FP4 else 8 * _BYTES[self.dtype]

    @property
    def out_size(self) -> int:
        """Bytes of an output element."""
        return _BYTES[self.outdtype]

    @property
    def x_bytes(self) -> int:
        """X in its stored format, without scales."""
        return self.b * self.m * self.k * self.bits // 8

    @property
    def w_bytes(self) -> int:
        """W in its stored format, without scales."""
        return self.b * self.n * self.k * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """The scales of both operands as stored."""
        if self.scale == "tensor":
            return 8
        if self.scale == "row":
            return 4 * self.b * (self.m + self.n)
        if self.scale == "block":
            blocks = -(-self.k // SCALE_BLOCK)
            return 4 * blocks * (self.m - -self.n // SCALE_BLOCK)
        return (self.m + self.n) * self.k // MX_GROUP if self.scale == "mx" else 0

    @property
    def out_bytes(self) -> int:
        return self.b * self.m * self.n * self.out_size

    @property
    def moved_bytes(self) -> int:
        """What `bw` counts, as AITER does: both operands read once in their stored format, the output written once."""
        return self.x_bytes + self.w_bytes + self.out_bytes

    @property
    def group_key(self) -> tuple[object, ...]:
        """All but M: problems of one group_key share W and compiled kernels."""
        return (self.family, self.b, self.n, self.k, self.dtype, self.outdtype, self.bias, self.scale)


def parse(family: str, key: Mapping[str, int | str], fp8: str = "float8_e4m3fn") -> Problem:
    """The problem of a shape's key columns; `fp8` is the device's e4m3 where the key names none (Target.fp8).

    Raises UnsupportedError for what our kernels do not compute.
    """
    if family not in FAMILIES:
        raise UnsupportedError(f"the tuner triton has no kernels for family {family}; it has {', '.join(FAMILIES)}")
    m, n, k = (size_of(key, c) for c in "MNK")
    if family == A4W4:
        if k % MX_GROUP:
            raise UnsupportedError(f"K is {k}; MXFP4 needs a multiple of {MX_GROUP}")
        return Problem(family, 1, m, n, k, _FP4, scale="mx")
    if family == A8W8:
        return Problem(family, 1, m, n, k, format_of(key, "q_dtype_w", _EIGHT_BITS, "torch.int8"), scale="row")
    if family == BLOCKSCALE:
        return Problem(family, 1, m, n, k, fp8, scale="block")
    if family == BATCHED_BF16:
        return Problem(family, size_of(key, "B"), m, n, k, "bfloat16")
    if family == BATCHED_A8W8:  # int8, as AITER's batched tuner generates it
        return Problem(family, size_of(key, "B"), m, n, k, "int8", scale="row")
    for column in ("scaleAB", "bpreshuffle"):
        if flag_of(key, column):
            raise UnsupportedError(f"{column} is True; the tuner triton measures plain a16w16 operands only")
    dtype = format_of(key, "dtype", _HALF, "torch.bfloat16")
    return Problem(family, 1, m, n, k, dtype, format_of(key, "outdtype", _OUT, f"torch.{dtype}"), flag_of(key, "bias"))
