"""Slow slots and winners ranked on a second GPU, as people see them: end of a run, status, explain, page, options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator import events as ev
from orchestrator.analysis.report.collector import Collector
from orchestrator.analysis.report.page import fit, render_page
from orchestrator.cli.app import app
from orchestrator.cli.output.run_end import report_end
from orchestrator.cli.output.status import show_status
from orchestrator.errors import InputError
from orchestrator.ledger import Ledger
from orchestrator.paths import RunConfig, RunPaths
from orchestrator.run.explain import explain
from tests.support import report_kit as kit
from tests.unit.cli.test_explain import add, told

SLOW = "n1 slot 3 is slow (compute 20.0 %, memory 0.0 % over the median of 4 slots)"
TWICE = "0 of 1 winner ranked again on a second GPU came first there, too; regret 10.0 % in the median, 10.0 % at most"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """Two shapes on four slots, one of them slow; shape 1 was ranked again, where another kernel won."""
    paths, _ = kit.empty_run(tmp_path, 2)
    slots = ("0", "1", "2", "3")
    add(paths, ev.GroupAdded("g0001", (1, 2), 10.0), ev.Resumed(1), ev.NodeJoined("n1", slots))
    add(paths, *(ev.CanaryPassed("n1", s, 10.0) for s in slots))
    add(paths, *(ev.CanaryTimed("n1", s, 120.0 if s == "3" else 100.0, 50.0, "x") for s in slots))
    add(paths, ev.Send("g0001-1", "g0001", "n1", "0", 1), ev.AttemptStarted("g0001-1", "n1", "0"))
    rows(paths, "g0001-1", 1, ("a", 12.0, False), ("b", 13.0, False), ("a", 12.0, True))
    rows(paths, "g0001-1", 2, ("a", 12.0, True))
    add(paths, ev.ShapeTuned("g0001-1", 1, best=("a",), runners=(("b",),)), ev.ShapeTuned("g0001-1", 2))
    add(paths, ev.Confirm(1, "g0001", "g0001a", (("a",), ("b",)), (("n1", "0"),), "drawn", True))
    add(paths, ev.Send("g0001a-1", "g0001a", "n1", "1", 2), ev.AttemptStarted("g0001a-1", "n1", "1"))
    rows(paths, "g0001a-1", 1, ("a", 1.1, False), ("b", 1.0, True))
    add(paths, ev.ShapeTuned("g0001a-1", 1, complete=False, best=("b",), ran=(("a",), ("b",))))
    add(paths, ev.SettleShape(1, "g0001-1", True, "ranked again on n1 slot 1 (g0001a-1)"))
    with Ledger.open(paths.ledger) as ledger, ledger.transaction():
        ledger.set_meta("state", "finished")
    return paths


def rows(paths: RunPaths, attempt: str, shape: int, *found: tuple[str, float, bool]) -> None:
    with Ledger.open(paths.ledger) as ledger, ledger.transaction():
        for kernel, us, won in found:
            row = {"us": us, "kernelName": kernel, "libtype": "asm", "status": "ok", "samples": 9, "margin": 4.5}
            slot = "0" if attempt == "g0001-1" else "1"
            ledger.row(
                attempt=attempt, shape=shape, node="n1", slot=slot, t=kit.BEGAN, row=row, winner=won, device=kit.DEVICE
            )


def test_the_end_of_a_run_names_both(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    report_end(paths, "finished", json_=False)
    out = capsys.readouterr().out
    assert f"! {SLOW}\n" in out
    assert f"second GPU: {TWICE}" in out
    assert "! 1 shape unconfirmed" not in out
    report_end(paths, "finished", json_=True)
    document = json.loads(capsys.readouterr().out)
    assert document["standing_out"] == [SLOW]
    assert (document["second_gpu"]["judged"], document["second_gpu"]["agreed"]) == (1, 0)
    assert document["second_gpu"]["largest_regret"] == pytest.approx(0.1)
    assert document["shapes"]["tuned"] == 2


def test_status_and_explain_name_the_slot(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    paths.inventory.write_text("nodes: {n1: {transport: local, gpus: 0}}\n")
    show_status(paths, 0.01)
    assert f"! {SLOW}" in capsys.readouterr().out
    text = told(explain(paths, "n1"))
    assert "slot 3 is slow" in text
    assert "timed canary" not in text
    assert "2 candidates ranked again on a second GPU" in told(explain(paths, "1"))


def test_the_page_names_them_draws_the_canaries_and_keeps_the_other_gpu_s_times_apart(paths: RunPaths) -> None:
    document = Collector(paths).document()
    sentences = document["sentences"]
    assert f"Beside the other GPUs {SLOW}." in sentences
    assert any(s.startswith(TWICE) for s in sentences)
    gpus: list[dict[str, Any]] = document["gpus"]
    assert [(g["name"], bool(g["flag"])) for g in gpus] == [(f"n1 slot {i}", i == 3) for i in range(4)]
    assert [p[1:] for p in gpus[3]["points"]] == [[1.2, 1.0]]
    assert gpus[3]["points"][0][0] > 0
    at = document["columns"]["row"].index("best")
    us = [kit.FAMILY.flops(dict(zip("MNK", s.key, strict=False))) / 1e6 / row[at][0] for s, row in zip(
        kit.shapes(2), document["shapes"], strict=True)]  # fmt: skip
    assert us == pytest.approx([12.0, 12.0], rel=1e-3), "the second GPU's 1.0 us is no candidate's best"
    page = render_page(fit(document))
    assert "GPUs beside each other" in page


def test_without_canaries_and_second_looks_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, _ = kit.empty_run(tmp_path, 1)
    report_end(paths, "finished", json_=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["standing_out"], document["second_gpu"]["asked"]) == ([], 0)
    assert Collector(paths).document()["gpus"] == []


def test_the_share_is_an_option_and_kept_with_the_run(tmp_path: Path) -> None:
    shapes = tmp_path / "shapes.csv"
    shapes.write_text("M,N,K\n16,64,128\n")
    refused = CliRunner().invoke(app, ["tune", str(shapes), "--second-gpu", "101"])
    assert refused.exit_code == 2
    argv = ["tune", str(shapes), "--tuner", "replay", "--runs", str(tmp_path / "runs"), "--second-gpu", "20"]
    assert CliRunner().invoke(app, [*argv, "--plan"]).exit_code == 0
    config = RunConfig("r", 0.0, [], "0", "a16w16", "replay", "s", "", "i")
    assert config.second_gpu == 0.0, "a run of an older version goes on as it began"


def test_again_is_for_tuners_that_rank(tmp_path: Path) -> None:
    shapes = tmp_path / "shapes.csv"
    shapes.write_text("M,N,K\n16,64,128\n")
    argv = ["tune", str(shapes), "--plan", "--again", "3"]
    assert CliRunner().invoke(app, [*argv, "--tuner", "torch"]).exit_code == 0
    refused = CliRunner().invoke(app, [*argv, "--tuner", "replay"])
    assert isinstance(refused.exception, InputError)
    assert str(refused.exception).startswith("--again: for the tuners aiter-triton and torch only")
