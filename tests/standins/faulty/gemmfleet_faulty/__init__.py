"""Registry entry of the tests' tuner `faulty`: replay with real faults, shipped to nodes as a third party's is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from worker.tuners.catalog import CostGuess, TunerSpec

if TYPE_CHECKING:
    from worker.tuners.base import Tuner


def create() -> Tuner:
    """A tuner that has not been opened."""
    from gemmfleet_faulty.tuner import FaultyTuner

    return FaultyTuner()


def _parse(options: Mapping[str, Any]) -> object:
    from gemmfleet_faulty.tuner import FaultyOptions

    return FaultyOptions.parse(options)


SPEC = TunerSpec(
    name="faulty",
    create=create,
    parse_options=_parse,
    cost_guess=CostGuess(0.001, 0.01, 0.0, 0.0, 1.0),
    worker_package="gemmfleet_faulty",
)
