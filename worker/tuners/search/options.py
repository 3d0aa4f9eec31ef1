"""The options that all tuners of the search have. A command's help reads them, so nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from worker.registry import OptionRule, option, seconds, text, whole
from worker.tuners.catalog import AGAIN, Flag

FAST = "fast"
EXHAUSTIVE = "exhaustive"
SEARCH_FLAGS = (
    Flag("search", "--search", str, "Search: fast (the default) or exhaustive.", metavar="HOW"),
    Flag("budget_s_per_shape", "--budget", float, "Seconds that a shape may take.", metavar="SECONDS"),
    AGAIN,
)
"""The flags of `gemmfleet tune` for a tuner with these options."""


def _search_rule(value: Any) -> str:
    if value not in (FAST, EXHAUSTIVE):
        raise ValueError(f"neither {FAST} nor {EXHAUSTIVE}")
    return str(value)


def mapping_rule(is_legal: Callable[[str, Any], bool], what: str) -> OptionRule:
    """Rule: a mapping from texts whose entries are legal. `what`: names it in the message."""

    def rule(value: Any) -> tuple[tuple[str, Any], ...]:
        if not isinstance(value, Mapping):
            raise ValueError(f"not {what}")
        for key, entry in value.items():
            if not isinstance(key, str) or not is_legal(key, entry):
                raise ValueError(f"not {what}")
        return tuple(value.items())

    return rule


def _is_count(_: str, value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


def cost_factor(options: Mapping[str, Any]) -> float:
    """Factor on a shape's time with these options."""
    return 4.0 if options.get("search") == EXHAUSTIVE else 1.0


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Each option with its default; docs/reference/tuners.md explains them."""

    search: str = option(FAST, _search_rule)
    # Seconds from a shape's start until no further candidate is begun; 0 means as long as the search takes.
    budget_s_per_shape: float = option(0.0, seconds(0, 86400))
    # Most candidates of a shape, the best by the model; 0 means all legal ones.
    max_candidates: int = option(0, whole(0, 1_000_000))
    # Compile processes; 0 means the slot's share of the usable cores less one, at least one.
    compilers: int = option(0, whole(0, 1024))
    min_samples: int = option(5, whole(1, 100_000))
    max_samples: int = option(31, whole(1, 100_000))
    seed: int = option(0, whole(0, 2**63))
    # Memory that the copies of the operands span: more than the last-level cache of MI300 and MI355X (256 MB).
    rotate_mb: int = option(512, whole(0, 65536))
    # We end the measuring process if it has work and sends nothing for this time.
    hang_s: float = option(30.0, seconds(0.5, 3600))
    again: int = option(0, whole(0, 100))  # times that a ranking is repeated whose winner has a small margin
    family: str = option("", text)  # the run's family, set by gemmfleet
    root: str = option("", text)  # the folder with the kernels, where it is not found by itself
    # Calls of the workload by shape (`16x1280x8192`), set by gemmfleet from the column `count`.
    counts: tuple[tuple[str, float], ...] = option((), mapping_rule(_is_count, "numbers of calls above 0 by shape"))
