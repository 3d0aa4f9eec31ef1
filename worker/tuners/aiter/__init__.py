"""The tuner `aiter`: AITER's own tuner scripts, driven in the image that the worker runs in."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.tuners.aiter.tuner import AiterTuner


def create() -> AiterTuner:
    """The tuner `aiter`."""
    from worker.tuners.aiter.tuner import AiterTuner

    return AiterTuner()
