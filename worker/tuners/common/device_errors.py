"""Classification of what a candidate raised: fatal for its process, or a status of its row. Needs no torch.

Sticky errors of CUDA and HIP leave the context useless: every later call fails alike, so the process must go. An error
that names a resource (shared memory, registers, device memory) is the candidate's own and leaves the device as it was.
Texts: CUDA Runtime API (cudaError_t), HIP (hipError_t), ROCr's fault handler, torch, oneDNN, Triton's OutOfResources.
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
    "hiperrorillegal",
)
_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "alloc_failed")
_UNSUPPORTED = (
    "out of resource",
    "too many resources requested",
    "shared memory",
    "registers",
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
