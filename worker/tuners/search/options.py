"""Options that all tuners of this engine have. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from worker.options import boolean, option, seconds, whole

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
class SearchOptions:
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
    rotate_mb: int = option(512, whole(0, 65536))
    """Memory that the copies of the operands span: more than the last-level cache of MI300 and MI355X (256 MB)."""
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
