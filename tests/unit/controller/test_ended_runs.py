"""Runs of a folder: removed whole, even if the command is killed in between."""

from __future__ import annotations

import fcntl
import shutil
import threading
from pathlib import Path

import pytest

from orchestrator.controller.ended_runs import remove_run
from orchestrator.errors import RunBusyError
from orchestrator.paths import RunPaths, list_runs, run_lock
from tests.kits.fleet import command
from tests.kits.results import simulated_run


def test_a_run_whose_removal_was_killed_is_no_run_and_the_next_prune_removes_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rmtree(folder: Path) -> None:
        (folder / "ledger.db").unlink()
        raise SystemExit

    paths = simulated_run(tmp_path, 4)
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", rmtree)
        with pytest.raises(SystemExit):
            remove_run(paths)
    assert list_runs(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 1
    assert command("runs", "prune", "--runs", str(tmp_path), "--yes").code == 0
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_not_driven_while_it_is_removed_and_a_look_at_its_lock_hinders_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = simulated_run(tmp_path, 4)
    with paths.lock.open("wb") as look:
        fcntl.flock(look, fcntl.LOCK_SH)  # as `holder` does
        threading.Timer(0.2, lambda: fcntl.flock(look, fcntl.LOCK_UN)).start()
        with run_lock(paths), pytest.raises(RunBusyError, match="is being driven; cancel it first"):
            remove_run(paths)

    def rmtree(folder: Path) -> None:
        with pytest.raises(RunBusyError), run_lock(RunPaths(folder)):
            pass

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    remove_run(paths)
