"""Is a candidate right? And when it raised, what does that mean?

The measure is AITER's (checkAllclose): the share of output elements with |out - ref| > 1e-2 + 1e-2 * |ref| against a
float32 reference; NaN and infinity count as wrong. Before the checked call every buffer of the candidate is poisoned:
floats with NaN, integers with their least value, so an element that is never written is wrong. The output of an
operator that makes its own cannot be poisoned, but its memory cannot hold the right answer either: the checked X is
used in no other call but the checks, and a check's output is poisoned before its memory is released.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from worker.tuners.common.key_cells import UnsupportedError

ATOL = RTOL = 1e-2
CHUNK = 1 << 24
"""Elements compared at a time."""

_FATAL = (
    "illegal memory access",
    "unspecified launch failure",
    "misaligned address",
    "device-side assert",
    "hardware exception",
    "memory access fault",
    "hsa_status_error",
    "uncorrectable ecc",
)
_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "alloc_failed")
_LACKING = (
    "not implemented",
    "not supported",
    "unsupported",
    "only supported",
    "could not create a primitive",
    "not_supported",
    "could not run",
    "needs the cpu support",
    "is only available",
    "requires compute capability",
    "not compiled with",
    "not available",
    "divisible by",
    "multiple of",
    "multiples of",
    "unexpected keyword",
    "got an unexpected",
    "expected self.size",
    "cannot convert scalartype",
)


def poison(buffers: Iterable[torch.Tensor]) -> None:
    """Fill with what no right answer holds."""
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


def is_fatal(e: Exception) -> bool:
    """Whether the device or the process is no longer to be trusted after it."""
    return any(p in str(e).lower() for p in _FATAL)


def status_of(e: Exception) -> str:
    """The status of a candidate that raised: `oom`, `unsupported` (this build or device lacks it) or `error`."""
    text = str(e).lower()
    if isinstance(e, MemoryError) or type(e).__name__ == "OutOfMemoryError" or any(p in text for p in _MEMORY):
        return "oom"
    if isinstance(e, (UnsupportedError, NotImplementedError)) or any(p in text for p in _LACKING):
        return "unsupported"
    return "error"
