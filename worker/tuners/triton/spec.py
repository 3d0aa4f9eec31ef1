"""Registry entry and options of the tuner `triton`: our own GEMMs on any GPU that Triton compiles for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from worker.tuners.catalog import AGAIN, CostGuess, Flag, TunerSpec
from worker.tuners.search.options import EXHAUSTIVE, Options

if TYPE_CHECKING:
    from worker.tuners.base import Tuner


def create() -> Tuner:
    """A tuner that has not been opened."""
    from worker.tuners.triton.tuner import TritonTuner

    return TritonTuner()


def _factor(options: Mapping[str, Any]) -> float:
    return 2.0 if options.get("search") == EXHAUSTIVE else 1.0


SPEC = TunerSpec(
    name="triton",
    create=create,
    parse_options=Options.parse,
    cost_guess=CostGuess(0.5, 2.5, 1e-12, 1e-9, 12.0),  # 1 to 5 s a shape on an H200 beside 15 compile processes
    slower_families={"a4w4_blockscale": 2.0},
    cost_factor=_factor,
    flags=(
        Flag("search", "--search", str, "Search: fast (the default) or exhaustive.", metavar="HOW"),
        Flag("budget_s_per_shape", "--budget", float, "Seconds that a shape may take.", metavar="SECONDS"),
        AGAIN,
    ),
    produces="own",
)
