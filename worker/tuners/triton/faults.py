"""What an exception or a dead process means: a row, or the end of the measuring process. Needs no torch.

Sticky errors of CUDA and HIP leave the context useless: every later call fails alike, so the process must go. An error
that names a resource (shared memory, registers, device memory) is the candidate's own and leaves the device as it was.
Texts: CUDA Runtime API (cudaError_t), HIP (hipError_t), ROCr's fault handler, torch, Triton's OutOfResources.
"""

from __future__ import annotations

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
)
_RESOURCES = ("out of resource", "out of resources", "too many resources requested", "shared memory", "registers")
_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "alloc_failed")
_LACKING = (
    "not implemented",
    "not supported",
    "unsupported",
    "only supported",
    "not available",
    "invalid device function",
)


def is_fatal(e: BaseException) -> bool:
    """Whether the device or the process is no longer to be trusted after it."""
    text = str(e).lower()
    return any(words in text for words in _FATAL)


def status_of(e: BaseException) -> str:
    """The status of a candidate that raised: `oom`, `unsupported` (it does not fit this device) or `error`."""
    name, text = type(e).__name__, str(e).lower()
    if isinstance(e, MemoryError) or name == "OutOfMemoryError" or any(words in text for words in _MEMORY):
        return "oom"
    if name in ("OutOfResources", "UnsupportedError") or isinstance(e, NotImplementedError):
        return "unsupported"
    return "unsupported" if any(words in text for words in (*_RESOURCES, *_LACKING)) else "error"
