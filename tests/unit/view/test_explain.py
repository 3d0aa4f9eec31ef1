"""`explain`: all that went wrong in a run, with what a person can do, and single stories; the same in other views."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator import events as ev
from orchestrator.cli.driving import finish_run
from orchestrator.cli.printer import finish_page
from orchestrator.cli.status import show_status
from orchestrator.errors import InputError
from orchestrator.ledger.writer import Ledger, row_values
from orchestrator.paths import RunPaths
from orchestrator.reasons import Reason
from orchestrator.report.collector import Collector
from orchestrator.view.explain import explain
from tests.kits.results import BEGAN, MI355X, blocked, empty_run

AT = BEGAN


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run of three shapes on one node with four slots, without a fault so far."""
    paths, _ = empty_run(tmp_path, 3)
    slots = ("0", "1", "2", "3")
    add(
        paths, ev.WorkAdded("k", ((1,), (2,), (3,)), ((5.0,), (5.0,), (5.0,))), ev.Resumed(1),
        ev.NodeExpected("n1", slots), ev.NodeJoined("n1", slots), *(ev.CanaryPassed("n1", s, 10.0) for s in slots),
        ev.Send("g0001", "n1", "0", 1, (1, 2)), ev.AttemptStarted("g0001", "n1", "0"), ev.ShapeStarted("g0001", 1),
    )  # fmt: skip
    paths.inventory.write_text("nodes: {n1: {transport: local, gpus: 0}}\n")
    return paths


def add(paths: RunPaths, *records: ev.Record) -> None:
    with Ledger.open(paths.ledger) as ledger, ledger.transaction():
        at = ledger.query("SELECT coalesce(max(t), ?) FROM journal", (AT,))[0][0]
        for i, record in enumerate(records, 1):
            ledger.journal(record, at + i)


def add_row(paths: RunPaths, shape: int, name: str, libtype: str, status: str = "ok", **row: Any) -> None:
    """A row of g0001; the winner's name is ck_1."""
    made = {"us": 5.0 if status == "ok" else -1.0, "kernelName": name, "libtype": libtype, "status": status, **row}
    values = row_values(
        attempt="g0001", shape=shape, node="n1", slot="0", t=AT, row=made, winner=name == "ck_1", device=MI355X
    )
    with Ledger.open(paths.ledger) as ledger, ledger.transaction():
        ledger.put_rows([values])


def reproduction(paths: RunPaths) -> str:
    """The advice to run a script as it is brought home from a node."""
    script = paths.attempt("g0001") / "repro" / "x" / "reproduce.sh"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\n")
    return f"To see the fault again, on that node in the image: {script}"


def test_nothing_went_wrong_and_an_unknown_name(paths: RunPaths) -> None:
    (line,) = explain(paths, None).lines()
    assert line.startswith("Nothing has failed.")
    assert line.endswith(f" explain {paths.run} NAME --runs {paths.root.parent}"), "it names this run"
    with pytest.raises(InputError, match=r"no group, shape or node 'nope' \(groups: g0001; nodes: n1\)"):
        explain(paths, "nope")


def test_candidates_that_faulted_or_were_left_out_and_the_winner_without_them(paths: RunPaths) -> None:
    for shape, status in ((1, "error"), (2, "error"), (1, "wrong")):
        add_row(paths, shape, f"asm_{status}", "asm", status, detail="signal 11")
    (story,) = explain(paths, None).stories
    assert (story.kind, story.subject) == ("candidate", "asm_error (asm)")
    assert story.now == "faulted on n1 slot 0 (error: signal 11); at 1x1280x8192, 1x8192x1024"
    add_row(paths, 1, "ck_1", "ck")
    add_row(paths, 1, "asm_7", "asm")
    entry = blocked(["asm", "7"], name="asm_7", source="attempt", confirmed=False)
    with Ledger.open(paths.ledger) as ledger, ledger.transaction():
        ledger.keep_blocked(attempt="g0001", shape=1, node="n1", slot="0", entries=[entry])
    add(paths, ev.ShapeTuned("g0001", 1, (("asm", "7"),)), ev.SettleShape(1, "g0001", False, "no second slot"))
    again = reproduction(paths)
    found = {s.kind: s for s in explain(paths, None).stories if "asm_error" not in s.subject}
    words = "faulted on n1 slot 0 (fault: SIGSEGV); unconfirmed: no other slot has tried it"
    assert found["candidate"].subject == "asm_7 (asm)", "a row of another attempt tells its backend"
    assert (found["candidate"].now, found["candidate"].advice) == (f"{words}; at 1x1280x8192", [again])
    assert found["shape"].now == "tuned, unconfirmed: no second slot"
    assert f"Candidate asm_7 (asm) {words}" in found["shape"].advice
    node = explain(paths, "n1").stories[0]
    assert f"Later runs leave out candidate asm_7 (asm): {words}" in node.advice
    assert any("delete .cache/aiter/*/blocklist.jsonl" in a for a in node.advice)


@pytest.mark.parametrize(
    ("lease", "why", "says", "not_said"),
    [
        ("", "the stream ended: ended with code 137", "was ended there (by docker kill, a restart", "sshd"),
        ("", "the stream ended: the connection broke (reset)", "look at the link and at sshd", "docker kill"),
        ("", "no word for 7 s", "look at the link and at sshd", "docker kill"),
        ("17", "the stream ended: the connection broke (reset)", "look at what the scheduler says", "sshd"),
    ],
)
def test_the_advice_on_trouble_fits_what_broke(paths: RunPaths, lease: str, why: str, says: str, not_said: str) -> None:
    add(paths, ev.NodeExpected("n2", ("0",), lease=lease, pool="p" if lease else ""), ev.NodeJoined("n2", ("0",)))
    add(paths, ev.NodeTroubled("n2", why))
    (advice,) = [line for line in explain(paths, "n2").lines() if line.startswith("  - ")]
    assert says in advice
    assert not_said not in advice


def test_a_lease_that_was_cancelled_and_a_shape_that_waits_for_it(paths: RunPaths) -> None:
    add(paths, ev.NodeExpected("n2", ("0",), lease="17", pool="p"), ev.NodeJoined("n2", ("0",)))
    add(paths, ev.LeaseEnded("n2", "preempted", "CANCELLED"), ev.NodeLost("n1", "it is gone"))
    assert any("the lease n2 ended (cancelled or preempted: CANCELLED)" in x for x in explain(paths, "n2").lines())
    assert (
        explain(paths, "3").lines()[0]
        == "shape 1x7168x8192: pending: it waits: 1 lease ended, the last one n2; n1 is lost"
    )


def test_a_canary_that_failed_is_told_once(paths: RunPaths) -> None:
    """The second one, while the slot is shut, begins no quarantine."""
    why, at = "the canary failed: wrong answer", AT + 100.0
    with Ledger.open(paths.ledger) as ledger, ledger.transaction():
        for t in (at, at + 70.0):
            ledger.journal(ev.CanaryFailed("n1", "3", "wrong answer"), t)
            ledger.journal(ev.Quarantine("n1", "3", why, t + 60.0), t)
    for what in (None, "n1"):
        (story,) = explain(paths, what).stories
        told = [(t, kind) for t, text, kind in story.steps if text.endswith(why)]
        assert told == [(at, "quarantine"), (at + 70.0, "canary")]
        assert any("look at the GPU's health" in text and "the image" in text for text in story.advice)


def test_a_shape_that_failed_in_many_ways_says_what_can_be_done_and_fits_a_screen(paths: RunPaths) -> None:
    """Thirty tries, each of which ended badly, and as many candidates that faulted."""
    for i in range(2, 32):
        add(
            paths, ev.AttemptEnded(f"g{i - 1:04d}", Reason.FAULT, 1, "signal 11 " * 90, 3.0),
            ev.Send(f"g{i:04d}", "n1", "0", i, (1,)), ev.AttemptStarted(f"g{i:04d}", "n1", "0"),
        )  # fmt: skip
        add_row(paths, 1, f"asm_{i}", "asm", "fault")
    add(paths, ev.FailShape(1, Reason.FAULT, "signal 11", "g0030", True))
    again = reproduction(paths)
    for what in ("g0001", "1"):
        (story,) = explain(paths, what).stories
        assert any(f"retry {paths.named} --reason fault" in a for a in story.advice)
        assert again in story.advice
    lines = story.lines()
    assert 24 <= len(lines) <= 40
    assert all(len(line) < 300 for line in lines)
    assert lines[1].split("  ")[-1].startswith("g0001 on n1 slot 0 ended at it after 3.0 s: the tuner's process died")
    assert "more candidates faulted at this shape." in "\n".join(lines)


def test_every_view_names_a_slow_slot(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    slow = "n1 slot 3 is slow (compute 20.0 %, memory 0.0 % over the median of 4 slots)"
    add(paths, *(ev.CanaryTimed("n1", s, 120.0 if s == "3" else 100.0, 50.0, "x") for s in "0123"))
    finish_page(finish_run(paths, "finished"))
    assert f"! {slow}\n" in capsys.readouterr().out
    finish_page(finish_run(paths, "finished"), as_json=True)
    assert json.loads(capsys.readouterr().out)["standing_out"] == [slow]
    show_status(paths, 0.01)
    assert f"! {slow}" in capsys.readouterr().out
    assert "slot 3 is slow" in explain(paths, "n1").lines()[0]
    document = Collector(paths).document()
    assert f"Compared with the other GPUs, {slow}." in document["sentences"]
    assert [(g["name"], bool(g["flag"])) for g in document["gpus"]] == [(f"n1 slot {i}", i == 3) for i in range(4)]
    assert [p[1:] for p in document["gpus"][3]["points"]] == [[1.2, 1.0]]
