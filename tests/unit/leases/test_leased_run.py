"""Whole runs on leases of this machine, granted by a stand-in of a scheduler: nodes come later and go earlier."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.controller.drive import drive
from orchestrator.controller.prepare import prepare
from orchestrator.controller.request import RunRequest
from orchestrator.leases import poller, pools
from orchestrator.ledger.writer import Ledger
from orchestrator.paths import RunPaths
from tests.support.processes import kill_in
from tests.unit.leases.standin import Scheduler
from tests.waiting import PATIENCE_S, wait_until


class LeasedRun:
    """A run of 24 shapes in 12 groups on a pool of leases with two slots each."""

    def __init__(self, folder: Path, scheduler: Scheduler, options: str) -> None:
        (folder / "i.yaml").write_text(
            f"defaults: {{tuner: replay}}\nnodes:\n  pool: {{lease: slurm, gpus: 2, {options}}}\n"
        )
        rows = [f"{m},{n},512" for m in (16, 32) for n in range(64, 64 * 13, 64)]
        (folder / "s.csv").write_text("\n".join(["M,N,K", *rows, ""]))
        request = RunRequest(
            folder / "s.csv", folder / "runs", folder / "i.yaml", "a16w16", options={"seconds_per_shape": 0.1}
        )
        self.paths: RunPaths = prepare(request).create()
        self.scheduler = scheduler
        self.lines: list[str] = []
        """Everything that a person was shown."""
        self.view: Any = SimpleNamespace(update=lambda status: None, note=lambda text, **_: self.lines.append(text))
        self.state = ""
        self._thread = threading.Thread(target=self._go, daemon=True)
        self.start = self._thread.start

    def _go(self) -> None:
        self.state = drive(self.paths, self.view, handle_signals=False)

    def finish(self) -> None:
        self._thread.join(PATIENCE_S)
        assert (self.state, self.tuned()) == ("finished", 24)

    def tuned(self) -> int:
        with Ledger.open(self.paths.ledger) as ledger:
            return ledger.counts().tuned


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LeasedRun]]:
    monkeypatch.chdir(tmp_path)  # where commands of a lease begin
    monkeypatch.setattr(poller, "SOON_S", 0.01)
    monkeypatch.setattr(poller, "USUAL_S", 0.01)

    def make(scheduler: Scheduler, options: str = "count: 1-3") -> LeasedRun:
        monkeypatch.setattr(pools, "source_of", lambda *_: scheduler)
        return LeasedRun(tmp_path, scheduler, options)

    yield make
    # a scheduler would have ended the processes of its leases
    for node in tmp_path.glob("pool-*"):
        kill_in(node)


def test_cancel_of_a_run_without_a_controller_gives_its_leases_back(make_run: Callable[..., LeasedRun]) -> None:
    run = make_run(Scheduler(grants=True), "count: 2")
    run.scheduler.ask(2)
    assert len(run.scheduler.held()) == 2, "as a controller that was killed left them"
    assert drive(run.paths, run.view, cancel=True, handle_signals=False) == "cancelled"
    assert run.scheduler.held() == []


def test_a_lease_near_its_end_takes_no_more_work(make_run: Callable[..., LeasedRun]) -> None:
    run = make_run(Scheduler(), "count: 1")
    run.start()
    wait_until(lambda: run.scheduler.leases, "a lease is asked for")
    run.scheduler.ready("1", "g1", ends_at=time.time() + 20.0)
    wait_until(lambda: "2" in run.scheduler.leases, "another is asked for in time")
    run.scheduler.ready("2", "g2")
    run.finish()
    assert any("takes no more work: its lease ends in" in line for line in run.lines), run.lines
