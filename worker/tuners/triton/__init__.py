"""The tuner `triton`: our own Triton GEMMs on any GPU that Triton compiles for (docs/reference/tuners.md).

Importing this package imports neither torch nor triton; `open()` of the tuner has processes of its own do it.
Inside it, `import triton` and `import torch` are the libraries.
"""

from __future__ import annotations

from worker.tuners.base import Tuner


def create() -> Tuner:
    """A tuner that has not been opened."""
    from worker.tuners.triton.tuner import TritonTuner

    return TritonTuner()
