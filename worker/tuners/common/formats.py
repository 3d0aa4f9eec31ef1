"""Number formats as tables and tensors: e2m1 (FP4), e8m0 (scales), and dequantisation by look-up.

MXFP4 as in OCP Microscaling Formats 1.0: an element is sign, two exponent bits, one mantissa bit; a byte holds
two, the element of the even index of K in the low half; an e8m0 byte s scales 32 elements along K by 2^(s-127),
255 is NaN. Every value of e2m1 times such a scale is exact in bfloat16, so dequantising to it loses nothing.
"""

from __future__ import annotations

from functools import cache

import torch

from worker.tuners.common.problem import MX_GROUP

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dtype_of(name: str) -> torch.dtype | None:
    """`bfloat16` -> torch.bfloat16; None where this build of torch has no such type."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


@cache
def e2m1_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[16] values of the sixteen codes."""
    return torch.tensor(E2M1, dtype=dtype, device=device)


@cache
def e2m1_pairs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256] both values of a byte as one integer (int32 for 16-bit types, int64 for float32): one look-up for two."""
    codes = torch.arange(256)
    values = torch.tensor(E2M1)
    pairs = torch.stack([values[codes & 15], values[codes >> 4]], dim=1).to(dtype)
    return pairs.view(torch.int64 if dtype is torch.float32 else torch.int32).view(256).to(device)


@cache
def e8m0_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256] powers of two; code 0 is 2^-127 (subnormal in bfloat16 and float32), code 255 NaN."""
    values = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127)
    values[255] = float("nan")
    return values.to(dtype).to(device)


def scales(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """e8m0 bytes [R, K/32] as numbers of `dtype`."""
    table = e8m0_table(dtype, codes.device)
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


class Unpacker:
    """Dequantises MXFP4 blocks of up to `rows` x `k` elements into its own buffer by one look-up per byte."""

    def __init__(self, rows: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._pairs = e2m1_pairs(dtype, device)
        half = rows * k // 2
        self.index = torch.empty(half, dtype=torch.int32, device=device)
        self.values = torch.empty(half, dtype=self._pairs.dtype, device=device)

    def __call__(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """codes [R, K/2] bytes, scale [R, K/32] e8m0 bytes -> [R, K] of the buffer (valid until the next call)."""
        rows, half = codes.shape
        index, values = self.index[: rows * half], self.values[: rows * half]
        index.view(rows, half).copy_(codes)
        torch.index_select(self._pairs, 0, index, out=values)
        groups = values.view(self._dtype).view(rows, 2 * half // MX_GROUP, MX_GROUP)
        groups.mul_(scales(scale, self._dtype)[:, :, None])
        return groups.view(rows, 2 * half)

    @staticmethod
    def bytes(rows: int, k: int, dtype: torch.dtype) -> int:
        """Memory of the buffers."""
        return rows * k // 2 * (4 + 2 * dtype.itemsize)


def unpack_codes(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same by nibble: each half of a byte looked up alone in the table of sixteen."""
    rows, half = codes.shape
    table = e2m1_table(dtype, codes.device)
    nibbles = torch.stack([codes & 15, codes >> 4], dim=2).view(-1).int()
    groups = table.index_select(0, nibbles).view(rows, 2 * half // MX_GROUP, MX_GROUP)
    return groups.mul_(scales(scale, dtype)[:, :, None]).view(rows, 2 * half)


def unpack_bits(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The same to bfloat16 without a table: a code's bits are a bfloat16's of 2^-126 times its value.

    Sign to bit 15, exponent and mantissa to bits 8..6; 0.5 becomes a bfloat16 subnormal, which is exact.
    """
    rows, half = codes.shape
    byte = codes.int()
    low = ((byte & 0x08) << 12) | ((byte & 0x07) << 6)
    high = ((byte & 0x80) << 24) | ((byte & 0x70) << 18)
    groups = (low | high).view(torch.bfloat16).view(rows, 2 * half // MX_GROUP, MX_GROUP)
    groups.mul_(2.0**126)
    return groups.mul_(scales(scale, torch.bfloat16)[:, :, None]).view(rows, 2 * half)
