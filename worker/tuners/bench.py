"""The tuner `bench`: backends side by side instead of candidates (worker/bench, docs/how-to/backends.md)."""

from __future__ import annotations

from worker.tuners.base import Tuner


def create() -> Tuner:
    """A tuner that has not been opened."""
    from worker.bench.tuner import BenchTuner

    return BenchTuner()
