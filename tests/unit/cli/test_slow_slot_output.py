"""Slow slots, as people see them: end of a run, status, explain, page; and the option `--again`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator import events as ev
from orchestrator.cli.app import app
from orchestrator.cli.ending import end_page
from orchestrator.cli.screen import show_status
from orchestrator.errors import InputError
from orchestrator.ledger import Ledger
from orchestrator.ledger.writer import row_values
from orchestrator.paths import RunPaths
from orchestrator.report.collector import Collector
from orchestrator.report.page import fit, render_page
from orchestrator.view.explain import explain
from tests.support import report_kit as kit
from tests.unit.view.test_explain import add, told

SLOW = "n1 slot 3 is slow (compute 20.0 %, memory 0.0 % over the median of 4 slots)"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """Two shapes on four slots, one of them slow."""
    paths, _ = kit.empty_run(tmp_path, 2)
    slots = ("0", "1", "2", "3")
    add(paths, ev.WorkAdded("k", ((1, 2),), ((5.0, 5.0),)), ev.Resumed(1), ev.NodeJoined("n1", slots))
    add(paths, *(ev.CanaryPassed("n1", s, 10.0) for s in slots))
    add(paths, *(ev.CanaryTimed("n1", s, 120.0 if s == "3" else 100.0, 50.0, "x") for s in slots))
    add(paths, ev.Send("g0001-1", "n1", "0", 1, (1, 2)), ev.AttemptStarted("g0001-1", "n1", "0"))
    row = {"us": 12.0, "kernelName": "a", "libtype": "asm", "status": "ok", "samples": 9, "margin": 4.5}
    won: dict[str, Any] = {"node": "n1", "slot": "0", "t": kit.BEGAN, "row": row, "winner": True, "device": kit.DEVICE}
    with Ledger.open(paths.ledger) as ledger, ledger.transaction():
        for shape in (1, 2):
            ledger.put_rows([row_values(attempt="g0001-1", shape=shape, **won)])
    add(paths, ev.ShapeTuned("g0001-1", 1), ev.ShapeTuned("g0001-1", 2))
    with Ledger.open(paths.ledger) as ledger, ledger.transaction():
        ledger.set_meta("state", "finished")
    return paths


def test_the_end_of_a_run_names_the_slot(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    end_page(paths, "finished").finish()
    out = capsys.readouterr().out
    assert f"! {SLOW}\n" in out
    end_page(paths, "finished").finish(as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["standing_out"] == [SLOW]
    assert document["shapes"]["tuned"] == 2


def test_status_and_explain_name_the_slot(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    paths.inventory.write_text("nodes: {n1: {transport: local, gpus: 0}}\n")
    show_status(paths, 0.01)
    assert f"! {SLOW}" in capsys.readouterr().out
    text = told(explain(paths, "n1"))
    assert "slot 3 is slow" in text
    assert "timed canary" not in text


def test_the_page_names_the_slot_and_draws_the_canaries(paths: RunPaths) -> None:
    document = Collector(paths).document()
    sentences = document["sentences"]
    assert f"Beside the other GPUs {SLOW}." in sentences
    gpus: list[dict[str, Any]] = document["gpus"]
    assert [(g["name"], bool(g["flag"])) for g in gpus] == [(f"n1 slot {i}", i == 3) for i in range(4)]
    assert [p[1:] for p in gpus[3]["points"]] == [[1.2, 1.0]]
    assert gpus[3]["points"][0][0] > 0
    page = render_page(fit(document))
    assert "GPUs beside each other" in page


def test_without_timed_canaries_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, _ = kit.empty_run(tmp_path, 1)
    end_page(paths, "finished").finish(as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["standing_out"] == []
    assert Collector(paths).document()["gpus"] == []


def test_again_is_for_tuners_that_rank(tmp_path: Path) -> None:
    shapes = tmp_path / "shapes.csv"
    shapes.write_text("M,N,K\n16,64,128\n")
    argv = ["tune", str(shapes), "--plan", "--again", "3"]
    assert CliRunner().invoke(app, [*argv, "--tuner", "torch"]).exit_code == 0
    refused = CliRunner().invoke(app, [*argv, "--tuner", "replay"])
    assert isinstance(refused.exception, InputError)
    assert str(refused.exception).startswith("--again: for the tuners aiter-triton and torch only")
