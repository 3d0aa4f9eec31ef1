"""How the kernels of our own tuners are called in rows; AITER has nothing of these names."""

from __future__ import annotations

TORCH = "torch_"
TRITON = "triton_"
SYNTHETIC = "synthetic_"
_TUNERS = {TORCH: "torch", TRITON: "triton", SYNTHETIC: "replay"}


def tuner_of(kernel: str) -> str:
    """The tuner of ours that calls a kernel so; "" where none does."""
    return next((tuner for beginning, tuner in _TUNERS.items() if kernel.startswith(beginning)), "")
