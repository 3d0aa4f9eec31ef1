"""Share of wrong elements of an output, and the poison that shows unwritten ones.

The measure is AITER's (checkAllclose): the share of output elements with |out - ref| > 1e-2 + 1e-2 * |ref| against a
float32 reference; NaN and infinity count as wrong. Before the checked call every buffer of the candidate is poisoned:
floats with NaN, integers with their least value, so an element that is never written is wrong. The output of an
operator that makes its own cannot be poisoned, but its memory cannot hold the right answer either: the checked X is
used in no other call but the checks, and a check's output is poisoned before its memory is released.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

ATOL = RTOL = 1e-2
CHUNK = 1 << 24
"""Elements compared at a time."""


def poison(buffers: Iterable[torch.Tensor]) -> None:
    """Fill with what no right answer holds: NaN, or an integer type's least value."""
    for b in buffers:
        if b.is_floating_point():
            b.fill_(float("nan"))
        else:
            b.fill_(torch.iinfo(b.dtype).min if b.dtype.is_signed else 0)


def error_ratio(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Share of elements beyond the tolerance, 0..1; 1.0 for a wrong form."""
    if out.shape != reference.shape:
        return 1.0
    bad = 0
    rows = max(1, CHUNK // max(1, reference.shape[1]))
    for i in range(0, reference.shape[0], rows):
        ref = reference[i : i + rows]
        close = (out[i : i + rows].float() - ref).abs_() <= ref.abs().mul_(RTOL).add_(ATOL)
        bad += close.numel() - int(close.sum())
    return bad / reference.numel()
