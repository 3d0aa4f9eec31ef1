"""The tuner `replay`: answers from recorded or made-up rows, in recorded time. For tests."""

from __future__ import annotations

from worker.tuners.base import Tuner


def create() -> Tuner:
    """A tuner that has not been opened."""
    from worker.tuners.replay.tuner import ReplayTuner

    return ReplayTuner()
