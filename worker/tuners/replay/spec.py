"""Registry entry of the tuner `replay`, and its options.

They are the node's (NodeConfig.options, or its `replay`) and on top of them a spec's (`options["replay"]`):

- `recording`: path of a .csv or .jsonl of profile rows, or `synthetic` (the default; `candidates`: how many);
- `seconds_per_shape`: instead of the recorded durations; `scale`: factor on the recorded ones (default 1);
- `start_seconds`: duration of `open`;
- `gfx`, `cu_num`: the device to pose as, instead of the recording's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from worker.tuners.catalog import CostGuess, TunerSpec

if TYPE_CHECKING:
    from worker.tuners.base import Tuner


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a replay; see the module's docstring."""

    recording: str = "synthetic"
    candidates: int = 4
    seconds_per_shape: float | None = None
    scale: float = 1.0
    start_seconds: float = 0.0
    gfx: str = ""
    cu_num: int = 0

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Options:
        """Raises ValueError naming every option that there is not."""
        known = [f.name for f in fields(cls)]
        if unknown := [n for n in raw if n not in known]:
            strange = ", ".join(map(repr, unknown))
            raise ValueError(
                f"bad options for the tuner replay: unknown option {strange} (there are {', '.join(known)})"
            )
        return cls(**raw)


def create() -> Tuner:
    """A tuner that has not been opened."""
    from worker.tuners.replay.tuner import ReplayTuner

    return ReplayTuner()


SPEC = TunerSpec(
    name="replay",
    create=create,
    parse_options=Options.parse,
    cost_guess=CostGuess(0.001, 0.01, 0.0, 0.0, 1.0),
)
