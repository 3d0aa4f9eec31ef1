"""Registry entry and options of the tuner `triton`: our own GEMMs on any GPU that Triton compiles for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from worker.options import boolean, option, parse_options, seconds, whole
from worker.tuners.catalog import AGAIN, CostGuess, Flag, TunerSpec

if TYPE_CHECKING:
    from worker.tuners.base import Tuner


FAST, EXHAUSTIVE = "fast", "exhaustive"


def _search(value: Any) -> str:
    if value not in (FAST, EXHAUSTIVE):
        raise ValueError(f"neither {FAST} nor {EXHAUSTIVE}")
    return str(value)


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise ValueError("not a list of names of candidates")
    return tuple(value)


@dataclass(frozen=True, slots=True)
class Options:
    """Each option with its default; docs/reference/tuners.md explains them."""

    search: str = option(FAST, _search)
    budget_s_per_shape: float = option(0.0, seconds(0, 86400))
    """Seconds from a shape's start until no further candidate is begun; 0 means as long as the search takes."""
    max_candidates: int = option(0, whole(0, 1_000_000))
    """Most candidates of a shape, the best by the model; 0 means all legal ones."""
    compilers: int = option(0, whole(0, 1024))
    """Compile processes; 0 means the slot's share of the usable cores less one, at least one."""
    min_samples: int = option(5, whole(1, 100_000))
    max_samples: int = option(31, whole(1, 100_000))
    seed: int = option(0, whole(0, 2**63))
    rotate_mb: int = option(256, whole(0, 65536))
    """Memory that the copies of the operands span."""
    compile_timeout_s: float = option(90.0, seconds(1, 3600))
    hang_s: float = option(30.0, seconds(0.5, 3600))
    """The measuring process is ended when it sends nothing for so long while it has work."""
    cache_mb: int = option(2048, whole(1, 1_048_576))
    """Megabytes that compiled kernels may take on the disk, for one source, version and device."""
    only: tuple[str, ...] = option((), _names)
    """Names of the only candidates to try; empty means all legal ones."""
    hints: bool = option(default=True, rule=boolean)
    """Winners of earlier runs and of neighbouring shapes come first."""
    again: int = option(0, whole(0, 100))
    """Times that a ranking is repeated whose winner has a small margin."""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Options:
        """Raises ValueError with every fault."""
        return parse_options(cls, "triton", raw)


def create() -> Tuner:
    """A tuner that has not been opened."""
    from worker.tuners.triton.tuner import TritonTuner

    return TritonTuner()


def _families(options: Mapping[str, Any]) -> tuple[str, ...]:
    from worker.families.table import computed_by  # here: a command's help reads the specs, and no family

    return computed_by("triton")


def _factor(options: Mapping[str, Any]) -> float:
    return 2.0 if options.get("search") == EXHAUSTIVE else 1.0


SPEC = TunerSpec(
    name="triton",
    create=create,
    parse_options=Options.parse,
    families=_families,
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
