"""A run that is checked and planned, and how its folder is made.

prepare.py makes a `PreparedRun`; the command shows its plan, and `create` writes the folder that drive.py drives.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path

from orchestrator.controller.request import RunRequest
from orchestrator.errors import InputError, LedgerError
from orchestrator.ledger.writer import Ledger
from orchestrator.machines.facts import save_facts
from orchestrator.machines.node_check import NodeReport
from orchestrator.machines.node_plan import NodePlan
from orchestrator.paths import RunConfig, RunPaths, create_run_folder
from orchestrator.planning.cost import CostModel
from orchestrator.planning.plan import Plan
from orchestrator.planning.worth import Worth
from orchestrator.results.run_results import WORTHS
from orchestrator.shapes.model import ShapeList, annotations_csv
from worker.families import Family
from worker.tuners.catalog import recorded_tuner


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A checked and planned run. Nothing is on disk before `create`."""

    request: RunRequest
    config: RunConfig
    family: Family
    listed: ShapeList
    plan: Plan
    cost: CostModel
    nodes: list[NodePlan]
    inventory_path: Path
    inventory_text: bytes
    reports: list[NodeReport]
    worths: dict[int, Worth] = field(default_factory=dict)

    def create(self) -> RunPaths:
        """Make the run folder with run.yaml and a ledger that knows all shapes and units. If it cannot be written,
        raise InputError and leave no folder; Ctrl-C leaves none either."""
        paths = create_run_folder(self.request.runs, self.config.run)
        try:
            return replace(self, config=replace(self.config, created=time.time()))._fill(paths)
        except KeyboardInterrupt:
            shutil.rmtree(paths.root, ignore_errors=True)
            raise
        except (OSError, sqlite3.Error, LedgerError) as e:
            shutil.rmtree(paths.root, ignore_errors=True)
            cause = e.__cause__ if isinstance(e, LedgerError) else e
            if cause is None:
                raise  # the disk is not the cause
            why = cause.strerror if isinstance(cause, OSError) else str(cause)
            raise InputError(
                f"cannot write the run folder {paths.root}: {why}; free some space, or choose another with --runs DIR"
            ) from e

    def _fill(self, paths: RunPaths) -> RunPaths:
        paths.inventory.write_bytes(self.inventory_text)
        save_facts(paths.root, {report.node: report.facts for report in self.reports})
        if self.listed.annotations:
            paths.annotations.write_text(annotations_csv(self.listed, self.family))
        for digest, text in self.request.texts.items():
            paths.texts.mkdir(exist_ok=True)
            (paths.texts / digest).write_bytes(text.encode())
        with Ledger.create(paths.ledger) as ledger, ledger.transaction():
            self._fill_ledger(ledger)
        # written last, because a folder counts as a run once it has run.yaml
        self.config.write(paths.config)
        return paths

    def _fill_ledger(self, ledger: Ledger) -> None:
        ledger.set_meta("run", self.config.run)
        ledger.set_meta("family", self.config.family)
        ledger.set_meta("tuner", self.config.tuner)
        ledger.set_meta("cost", asdict(self.cost))
        factor = recorded_tuner(self.config.tuner).cost_factor(self.config.options)
        ledger.set_meta("units", self.request.share * factor)
        if self.worths:
            ledger.set_meta(WORTHS, {shape: astuple(worth) for shape, worth in self.worths.items()})
        ledger.set_meta("created", self.config.created)
        ledger.set_meta("state", "planned")
        ledger.add_shapes(self.listed.shapes, self.family)
        why = f"in {self.request.db} already" if self.request.rows is None else "no row of this chip"
        ledger.skip_shapes(self.plan.skipped, why)
        now = time.time()
        for work in self.plan.work:
            ledger.journal(work, now)
