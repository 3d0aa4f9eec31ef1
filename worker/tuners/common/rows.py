"""Rows of our own tuners' candidates: rates, rounding, and the status by what a candidate raised. Needs no torch.

Sticky errors of CUDA and HIP leave the context useless: every later call fails alike, so the process must go. An error
that names a resource (shared memory, registers, device memory) is the candidate's own and leaves the device as it was.
Texts: CUDA Runtime API (cudaError_t), HIP (hipError_t), ROCr's fault handler, torch, oneDNN, Triton's OutOfResources.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from worker.protocol import Row
from worker.text import plural
from worker.tuners.common.problem import Problem

_FATAL = (
    "illegal memory access",
    "illegal instruction",
    "illegal address",
    "invalid program counter",
    "invalid address space",
    "invalid pc",
    "misaligned address",
    "unspecified launch failure",
    "launch timed out",
    "hardware stack error",
    "device-side assert",
    "hardware exception",
    "memory access fault",
    "memory aperture violation",
    "hsa_status_error",
    "uncorrectable ecc",
    "nvlink error",
    "unknown error",
    "context is destroyed",
    "illegal state",
    "hiperrorillegal",
)
_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "alloc_failed")
_UNSUPPORTED = (
    "out of resource",
    "too many resources",
    "shared memory",
    "registers",
    "exceeds available",
    "no native support",
    "doesn't support",
    "invalid device function",
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


def is_fatal(e: BaseException | str) -> bool:
    """True where neither the device nor the process can be trusted after it: a GPU fault."""
    text = str(e).lower()
    return any(words in text for words in _FATAL)


def status_of(e: BaseException) -> str:
    """Status of a candidate that raised: `oom`, `unsupported` (this build or device lacks it) or `error`."""
    name, text = type(e).__name__, str(e).lower()
    if isinstance(e, MemoryError) or name == "OutOfMemoryError" or any(words in text for words in _MEMORY):
        return "oom"
    if name in ("OutOfResources", "UnsupportedError") or isinstance(e, NotImplementedError):
        return "unsupported"
    return "unsupported" if any(words in text for words in _UNSUPPORTED) else "error"


DETAIL = 300  # characters of a detail at most


def row_of(
    p: Problem, tuner: str, kernel: str, kernel_id: int, split_k: int, status: str, us: float = -1.0,
    err: float = 1.0, spread: float = 0.0, samples: int = 0, detail: str = "",
) -> Row:  # fmt: skip
    """A candidate's row; `us` is -1 where it has no time, and its rates are 0 then."""
    timed = us > 0
    return Row(
        kernelId=kernel_id,
        splitK=split_k,
        us=round(us, 4) if timed else -1.0,
        kernelName=kernel,
        libtype=tuner,
        tflops=figure(p.flops / us / 1e6) if timed else 0.0,
        bw=figure(p.moved_bytes / us / 1e3) if timed else 0.0,
        errRatio=0.0 if err == 0 else max(1e-6, round(err, 6)) if math.isfinite(err) else 1.0,
        status=status,
        spread=round(spread, 4),
        samples=samples,
        detail=short(detail),
    )


def figure(value: float) -> float:
    """Two decimals, as AITER has them, from 10 up; four significant digits below."""
    return round(value, 2) if value >= 10 else float(f"{value:.4g}")


def short(text: str) -> str:
    """The first line, cut."""
    line = text.strip().split("\n", 1)[0]
    return line if len(line) <= DETAIL else line[: DETAIL - 3] + "..."


def why_no_winner(rows: Sequence[Row], limit: float) -> tuple[str, str]:
    """Reason and detail of a shape none of whose candidates may win; `limit` is that of errRatio."""
    by = {s: [r for r in rows if r["status"] == s] for s in ("wrong", "unsupported", "oom", "error", "timeout")}
    counts = ", ".join(f"{len(v)} {s}" for s, v in by.items() if v)
    if by["wrong"]:
        least = min(r["errRatio"] for r in by["wrong"])
        detail = f"of {plural(len(rows), 'candidate')}: {counts}; the least errRatio is {least:g}, the limit {limit:g}"
        return "wrong_result", detail
    reason = "unsupported" if rows and len(by["unsupported"]) == len(rows) else "no_candidate"
    first = f"; {rows[0]['kernelName']}: {rows[0]['detail']}" if rows else ""
    return reason, f"of {plural(len(rows), 'candidate')}: {counts or 'none ran'}{first}"
