"""Registry entry of the tests' tuner `faulty`: replay with real faults, shipped to nodes as a third party's is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.tuners.catalog import CostGuess, TunerSpec


def _parse(options: Mapping[str, Any]) -> object:
    from gemmfleet_faulty.tuner import FaultyOptions

    return FaultyOptions.parse(options)


SPEC = TunerSpec(
    name="faulty",
    tuner_class="gemmfleet_faulty.tuner:FaultyTuner",
    parse_options=_parse,
    cost_guess=CostGuess(0.001, 0.01, 0.0, 0.0, 1.0),
    worker_package="gemmfleet_faulty",
)
