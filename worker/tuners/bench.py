"""Registry entry of the tuner `bench`: backends side by side instead of candidates (worker/bench).

The module is here, not in worker/bench, because the registry looks for built-in tuners in this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.tuners.catalog import TunerSpec


def _factor(options: Mapping[str, Any]) -> float:
    backends = len(options.get("backends") or ()) or 2  # if none is named, two of AITER's are likely
    sides = max(1, len(options.get("sides") or ()))
    return float(backends * sides)


SPEC = TunerSpec(
    name="bench",
    tuner_class="worker.bench.tuner:BenchTuner",
    parse_options=lambda options: None,  # the command `bench` makes them itself, and checks what was typed
    cost_factor=_factor,
    start_limits=(900.0, 300.0),  # every side is probed
    own_command="bench SHAPES.csv --backend B,...",
    side_by_side=True,
)
