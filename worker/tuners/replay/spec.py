"""Registry entry of the tuner `replay`: answers from recorded or made-up rows, in recorded time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from worker.tuners.catalog import CostGuess, TunerSpec

if TYPE_CHECKING:
    from worker.tuners.base import Tuner


def create() -> Tuner:
    """A tuner that has not been opened."""
    from worker.tuners.replay.tuner import ReplayTuner

    return ReplayTuner()


def _parse(options: Mapping[str, Any]) -> object:
    from worker.tuners.replay.tuner import Options

    return Options.parse(options)


SPEC = TunerSpec(name="replay", create=create, parse_options=_parse, cost_guess=CostGuess(0.001, 0.01, 0.0, 0.0, 1.0))
