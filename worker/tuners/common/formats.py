"""Number formats as tables and tensors: e2m1 (FP4), e8m0 (scales), and dequantisation.

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
def e8m0_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256] powers of two; code 0 is 2^-127 (subnormal in bfloat16 and float32), code 255 NaN."""
    values = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127)
    values[255] = float("nan")
    return values.to(dtype).to(device)


def scales(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """e8m0 bytes [R, K/32] as numbers of `dtype`."""
    table = e8m0_table(dtype, codes.device)
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def unpack_codes(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """codes [R, K/2] bytes, scale [R, K/32] e8m0 bytes -> [R, K]; each half of a byte is looked up alone."""
    rows, half = codes.shape
    table = e2m1_table(dtype, codes.device)
    nibbles = torch.stack([codes & 15, codes >> 4], dim=2).view(-1).int()
    groups = table.index_select(0, nibbles).view(rows, 2 * half // MX_GROUP, MX_GROUP)
    return groups.mul_(scales(scale, dtype)[:, :, None]).view(rows, 2 * half)
