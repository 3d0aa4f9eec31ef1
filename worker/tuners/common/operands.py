"""Seeded operands of a GEMM in every format, their meaning in float32, and the check of an output.

MXFP4 as in OCP Microscaling Formats 1.0: an element (e2m1) is sign, two exponent bits, one mantissa bit; a byte holds
two, the element of the even index of K in the low half; an e8m0 byte s scales 32 elements along K by 2^(s-127),
255 is NaN. Every value of e2m1 times such a scale is exact in bfloat16, so dequantising to it loses nothing.

Distribution (docs/explanation/measurement.md): X and W are uniform over 256 levels (a byte from the generator, or a
code), scaled by powers of two so that an output element has a standard deviation near 1 whatever K is. Every input is
exact in its format, in bfloat16 and in float32, so an honest bfloat16 result is off by its own rounding only (at most
2^-8 relative), well within atol 1e-2 + rtol 1e-2.

The measure of an output is AITER's (checkAllclose): the share of output elements with |out - ref| > 1e-2 + 1e-2 * |ref|
against a float32 reference; NaN and infinity count as wrong. Before the checked call every buffer of the candidate is
poisoned: floats with NaN, integers with their least value, so an element that is never written is wrong. The output of
an operator that makes its own cannot be poisoned, but its memory cannot hold the right answer either: the checked X is
used in no other call but the checks, and a check's output is poisoned before its memory is released.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from functools import cache

import torch

from worker.tuners.common.problem import MX_GROUP, SCALE_BLOCK, UnsupportedError

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
ATOL = RTOL = 1e-2
CHUNK = 1 << 24  # elements compared at a time
MAX_COPIES = 64
CHUNK_BYTES = 256 << 20  # for the reference, float32 W is made in blocks of about this size
UNIFORM = 0.577  # standard deviation of a uniform variable on -1..1
E2M1_RMS = math.sqrt((0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)
# Exponents of the e8m0 scales, drawn evenly; `MX_RMS` is their root mean square as factors.
MX_EXPONENTS = (-2, -1, 0, 1)
MX_RMS = math.sqrt(sum(4.0**e for e in MX_EXPONENTS) / 4)


@cache
def e2m1_pairs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256] both values of a byte as one integer, of twice the size of `dtype` (bfloat16 or float32)."""
    codes = torch.arange(256)
    values = torch.tensor(E2M1, dtype=dtype)
    pairs = torch.stack([values[codes & 15], values[codes >> 4]], dim=1)
    of_both = torch.int32 if dtype.itemsize == 2 else torch.int64
    return pairs.view(of_both).view(256).to(device)


@cache
def e8m0_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256] powers of two; code 0 is 2^-127 (subnormal in bfloat16 and float32), code 255 NaN."""
    values = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127)
    values[255] = float("nan")
    return values.to(dtype).to(device)


def unpack_codes(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """codes [R, K/2] bytes, scale [R, K/32] e8m0 bytes -> [R, K], by one look-up a byte."""
    rows, half = codes.shape
    pairs = e2m1_pairs(dtype, codes.device).index_select(0, codes.reshape(-1).int())
    groups = pairs.view(dtype).view(rows, 2 * half // MX_GROUP, MX_GROUP)
    scales = e8m0_table(dtype, codes.device).index_select(0, scale.reshape(-1).int())
    return groups.mul_(scales.view(*scale.shape, 1)).view(rows, 2 * half)


def generator(device: torch.device, *words: object) -> torch.Generator:
    """A generator seeded by the words' repr."""
    seed = int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:8], "little") >> 1
    return torch.Generator(device=device).manual_seed(seed)


def count_copies(size: int, span: int, room: int, most: int = MAX_COPIES) -> int:
    """The number of copies that timing rotates over: at least one.

    As many of `size` bytes as span `span` bytes, so that none is in a cache; at most `most`, and at most the `room`
    copies that memory is free for.
    """
    return max(1, min(most, room, -(-span // max(1, size))))


def w_exponent(k: int, *, mx: bool) -> int:
    """The power of two by which W is scaled so that an output element has a standard deviation near 1."""
    rms = E2M1_RMS * MX_RMS if mx else UNIFORM
    return -round(math.log2(math.sqrt(k) * rms * rms))


def widen_rows(
    kind: str, k: int, rows: torch.Tensor, scale: torch.Tensor | None = None, *, blocked: bool = False
) -> torch.Tensor:
    """Rows of an operand as float32, with the scales of a kind (Problem.scale) applied. `blocked` is W's side."""
    if kind == "mx":
        assert scale is not None
        return unpack_codes(rows, scale, torch.float32)
    wide = rows.float()
    if scale is None:
        return wide
    if kind != "block":
        return wide.mul_(scale[..., None] if kind == "row" else scale)
    scale = scale.repeat_interleave(SCALE_BLOCK, dim=1)[:, :k]
    if blocked:
        scale = scale.repeat_interleave(SCALE_BLOCK, dim=0)[: wide.shape[0]]
    return wide.mul_(scale)


def levels(form: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    """int8, uniform over all 256 values; eight at a time, which is faster for a generator."""
    size = math.prod(form)
    words = torch.empty(-(-size // 8), dtype=torch.int64, device=draw.device)
    words.random_(-(2**63), None, generator=draw)
    return words.view(torch.int8)[:size].view(form)


def float_of(name: str) -> torch.dtype:
    """torch's type of that name. Raises UnsupportedError where this torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"torch {torch.__version__} has no type {name}")
    return dtype


def draw_rows(
    kind: str, dtype: str, form: tuple[int, ...], k: int, exponent: int, draw: torch.Generator, *, blocked: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[*form, K] elements of size about 2^exponent with scales of a kind (Problem.scale). `blocked` is W's side.

    Raises UnsupportedError if this torch lacks the format.
    """
    if kind == "mx":
        codes = levels((*form, k // 2), draw).view(torch.uint8)
        choices = levels((*form, k // MX_GROUP), draw).view(torch.uint8) & 3
        return codes, choices + (127 + MX_EXPONENTS[0] + exponent)
    elements = levels((*form, k), draw)
    if kind == "none":
        return elements.to(float_of(dtype)).mul_(2.0 ** (exponent - 7)), None
    scale = torch.rand(_scale_form(kind, form, k, blocked=blocked), device=draw.device, generator=draw)
    scale.add_(0.5).mul_(2.0**exponent)
    if dtype == "int8":
        return elements, scale.mul_(2.0**-7)
    return elements.to(torch.bfloat16).mul_(2.0**-7).to(float_of(dtype)), scale


def _scale_form(kind: str, form: tuple[int, ...], k: int, *, blocked: bool) -> tuple[int, ...]:
    """Form of the float32 scales of [*form, K] elements."""
    if kind == "tensor":
        return (1,)
    if kind == "row":
        return form
    rows = form[-1]
    row_blocks = -(-rows // SCALE_BLOCK) if blocked else rows
    return row_blocks, -(-k // SCALE_BLOCK)


def draw_bias(n: int, dtype: str, draw: torch.Generator) -> torch.Tensor:
    """[N] elements of -1..1."""
    return levels((n,), draw).to(float_of(dtype)).mul_(2.0**-7)


def poison(buffers: Iterable[torch.Tensor]) -> None:
    """Fill with what no right answer holds: NaN, or an integer type's least value."""
    for buffer in buffers:
        if buffer.is_floating_point():
            buffer.fill_(math.nan)
        else:
            buffer.fill_(torch.iinfo(buffer.dtype).min)  # 0 of an unsigned one


def error_ratio(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Share of elements beyond the tolerance, 0..1; 1.0 for a wrong form."""
    if out.shape != reference.shape:
        return 1.0
    close = 0
    rows = max(1, CHUNK // max(1, reference.shape[1]))
    for i in range(0, reference.shape[0], rows):
        right_rows = reference[i : i + rows]
        errors = (out[i : i + rows].float() - right_rows).abs_()
        close += int((errors <= right_rows.abs().mul_(RTOL).add_(ATOL)).sum())
    return (reference.numel() - close) / reference.numel()
