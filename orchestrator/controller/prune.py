"""Old runs: summaries, which may be pruned, and their removal here and on the nodes."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.command_hints import command
from orchestrator.engines import Engine, WorkerState
from orchestrator.errors import InputError, OrchestratorError, RunBusyError
from orchestrator.ledger.reader import Counts, LedgerReader
from orchestrator.paths import RunConfig, RunPaths, holder, list_runs
from orchestrator.view.status import state_now

UNENDED = ("planned", "running")
"""States of a run that writes its counts later."""


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run in one line."""

    paths: RunPaths
    run: str
    state: str
    counts: Counts
    family: str
    shapes: str
    created: float

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.run, "state": self.state, "created": self.created, "family": self.family,
            "source": self.shapes, "folder": str(self.paths.root),
            "shapes": {n: getattr(self.counts, n) for n in ("total", "tuned", "skipped", "failed")},
        }  # fmt: skip


def summaries(runs: Path) -> list[ListedRun]:
    """Every run of a folder, oldest first; one whose files cannot be read is listed as `unreadable`."""
    return [_summary(p) for p in list_runs(runs)]


def _summary(paths: RunPaths) -> ListedRun:
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
    """Counts that a run wrote at its end; None where there are none: a journal need not be replayed for a list."""
    try:
        return Counts(**json.loads(paths.provenance.read_bytes())["counts"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def prunable(runs: Path, *, keep: int, older_s: float, unfinished: bool, now: float) -> list[ListedRun]:
    """Runs that may go: finished (with `unfinished`, any that nobody drives), old enough, not the `keep` newest."""
    allowed = ("finished", "interrupted", "cancelled", "planned", "unreadable") if unfinished else ("finished",)
    idle = [s for s in summaries(runs) if s.state in allowed and not holder(s.paths.lock)]
    going = idle[: max(0, len(idle) - keep)]
    return [s for s in going if now - s.created >= older_s]


def remove_run(paths: RunPaths) -> list[str]:
    """Remove a run's folders on its nodes, then here. Return sentences on what could not be reached."""
    from orchestrator.controller.node_plan import engine_of, plan_nodes, transport_of
    from orchestrator.inventory.load import load_inventory
    from orchestrator.transport import connected

    if holder(paths.lock):
        raise RunBusyError(f"run {paths.run} is being driven; cancel it first: {command(f'cancel {paths.named}')}")
    troubles = []
    try:
        plans = plan_nodes(load_inventory(paths.inventory), paths.run, paths.root)
    except InputError as e:
        plans, troubles = [], [f"{paths.run}: its nodes are unknown, their folders stay: {e}"]
    for plan in plans:
        try:
            with connected(transport_of(plan)) as transport:
                with contextlib.closing(engine_of(plan, transport)) as engine:
                    if any(w.state == "running" for w in _workers(engine)):
                        engine.stop(kill=True)
                    engine.tidy()
                transport.run(["rm", "-rf", "--", plan.folder], timeout=120.0)
        except OrchestratorError as e:
            troubles.append(str(e))
    shutil.rmtree(paths.root)
    return troubles


def _workers(engine: Engine) -> list[WorkerState]:
    try:
        return engine.list()
    except OrchestratorError:
        return []  # never deployed, or its scripts are gone: nothing can run there
