"""The list of the runs in a folder: each run's state, counts and origin.

`gemmfleet runs list` shows it, and controller/ended_runs.py chooses from it what `runs prune` removes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import OrchestratorError
from orchestrator.ledger.reader import Counts, LedgerReader
from orchestrator.paths import RunConfig, RunPaths, holder, list_runs
from orchestrator.view.status import state_now

UNENDED = ("planned", "running")
"""A run in one of these states has not written its counts yet."""


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run as one line of the list. `source`: the file of its shapes."""

    paths: RunPaths
    run: str
    state: str
    counts: Counts
    family: str
    source: str
    created: float

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "state": self.state,
            "created": self.created,
            "family": self.family,
            "source": self.source,
            "folder": str(self.paths.root),
            "shapes": {n: getattr(self.counts, n) for n in ("total", "tuned", "skipped", "failed")},
        }


def listed_runs(runs: Path) -> list[ListedRun]:
    """Every run of a folder, oldest first. If its files cannot be read, it is listed as `unreadable`."""
    return [_listed_run(p) for p in list_runs(runs)]


def _listed_run(paths: RunPaths) -> ListedRun:
    try:
        config = RunConfig.read(paths.config)
        with LedgerReader.open_readonly(paths.ledger) as ledger:
            state = ledger.state
            counts = (None if state in UNENDED else _counted(paths)) or ledger.counts()
    except OrchestratorError:
        return ListedRun(paths, paths.run, "unreadable", Counts(), "", "", paths.config.stat().st_mtime)
    state = state_now(state, driven=bool(holder(paths.lock)))
    return ListedRun(paths, config.run, state, counts, config.family, config.shapes, config.created)


def _counted(paths: RunPaths) -> Counts | None:
    """The counts that a run wrote at its end, so that a list need not replay the journal; None if it wrote none."""
    try:
        return Counts(**json.loads(paths.provenance.read_bytes())["counts"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
