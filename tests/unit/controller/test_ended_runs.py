"""Runs of a folder: removed whole, even if the command is killed in between."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from orchestrator.controller.ended_runs import remove_run
from orchestrator.paths import list_runs
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
