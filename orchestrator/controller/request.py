"""The request for a run, as the user gave it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.paths import RunSettings
from orchestrator.tables.keys import Key as TableKey


@dataclass(frozen=True, slots=True)
class RunRequest(RunSettings):
    """The user's request: the options of `tune`. Those that run.yaml keeps as they are given are in `RunSettings`
    (paths.py). An option that is None takes its value from the inventory or the tuner."""

    shapes: Path
    """The list of shapes."""
    runs: Path
    """The folder of runs."""
    inventory: Path | None = None
    family: str | None = None
    tuner: str | None = None
    db: Path | None = None
    """The tuned table: shapes that it has are skipped, and the winners are merged into it."""
    options: dict[str, Any] = field(default_factory=dict)
    err_ratio: float | None = None
    argv: list[str] = field(default_factory=list)
    """The command line, for run.yaml."""
    texts: dict[str, str] = field(default_factory=dict)
    """Long texts that the options refer to, by hash."""
    ask: bool = True
    """Ask nodes and schedulers what they have. Else `PreparedRun.nodes` is what is known without, leases included."""
    plan: bool = False
    """Only plan. Without a usable node the plan has no slot, and its notes say why."""
    bench: bool = False
    """The request is from `bench`, which has its own tuner."""
    by_value: bool = False
    """Tune shapes in the order of calls x (time now - expected time), up to `until_gain` and `gpu_hours`."""
    image: str | None = None
    """Image for every node that has one, in place of the inventory's."""
    rows: Mapping[TableKey, object] | None = None
    """Measure only these rows of a table (gfx, cu_num, key). Other shapes are skipped."""
    share: float = 1.0
    """The share of a shape's candidates to measure."""
    more: Sequence[Path] = ()
    """Further lists, of the same family as `shapes`."""
