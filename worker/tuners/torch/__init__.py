"""The tuner `torch`: real GEMM candidates on any CPU or GPU that torch runs on (docs/reference/tuners.md).

Importing this package imports no torch; `open()` of the tuner does. Inside it, `import torch` is the library.
"""

from __future__ import annotations

from worker.tuners.base import Tuner


def create() -> Tuner:
    """A tuner that has not been opened."""
    from worker.tuners.torch.tuner import TorchTuner

    return TorchTuner()
