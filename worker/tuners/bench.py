"""Registry entry of the tuner `bench`: backends side by side instead of candidates (worker/bench)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from worker.tuners.catalog import TunerSpec

if TYPE_CHECKING:
    from worker.tuners.base import Tuner


def create() -> Tuner:
    """A tuner that has not been opened."""
    from worker.bench.tuner import BenchTuner

    return BenchTuner()


def _factor(options: Mapping[str, Any]) -> float:
    backends = len(options.get("backends") or ()) or 2  # where none is named, two of AITER's are likely
    return float(backends * max(1, len(options.get("sides") or ())))


SPEC = TunerSpec(
    name="bench",
    create=create,
    parse_options=lambda options: None,  # the command `bench` makes them itself, and checks what was typed
    cost_factor=_factor,
    start_limits=(900.0, 300.0),  # every side is probed
    own_command="bench SHAPES.csv --backend B,...",
    side_by_side=True,
)
