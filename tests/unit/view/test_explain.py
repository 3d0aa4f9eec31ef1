"""`explain`: all that went wrong in a run, with what a person can do, and single stories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator import events as ev
from orchestrator.cli.ending import end_page
from orchestrator.cli.screen import show_status
from orchestrator.errors import InputError
from orchestrator.ledger import Ledger
from orchestrator.ledger.writer import row_values
from orchestrator.paths import RunPaths
from orchestrator.reasons import Reason
from orchestrator.report.collector import Collector
from orchestrator.view.explain import Explanation, explain
from orchestrator.view.words import duration
from tests.support import report_kit as kit

AT = kit.BEGAN
DEVICE = kit.DEVICE


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run of three shapes on one node with two slots, without a fault so far."""
    paths, _ = kit.empty_run(tmp_path, 3)
    add(
        paths, ev.WorkAdded("k", ((1,), (2,), (3,)), ((5.0,), (5.0,), (5.0,))), ev.Resumed(1),
        ev.NodeExpected("n1", ("0", "1")), ev.NodeJoined("n1", ("0", "1")), ev.CanaryPassed("n1", "0", 10.0),
        ev.CanaryPassed("n1", "1", 10.0), ev.Send("g0001", "n1", "0", 1, (1, 2)),
        ev.AttemptStarted("g0001", "n1", "0"), ev.ShapeStarted("g0001", 1),
    )  # fmt: skip
    return paths


def add(paths: RunPaths, *records: ev.Record) -> None:
    with Ledger.open(paths.ledger) as ledger, ledger.transaction():
        at = ledger.query("SELECT coalesce(max(t), ?) FROM journal", (AT,))[0][0]
        for i, record in enumerate(records, 1):
            ledger.journal(record, at + i)


def reproduction(paths: RunPaths) -> Path:
    """As it is brought home from a node."""
    script = paths.attempt("g0001") / "repro" / "x" / "reproduce.sh"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\n")
    return script


def told(explanation: Explanation) -> str:
    return "\n".join(explanation.lines())


def test_nothing_went_wrong(paths: RunPaths) -> None:
    assert told(explain(paths, None)).startswith("Nothing has failed.")


def test_a_slot_in_quarantine_went_wrong(paths: RunPaths) -> None:
    add(paths, ev.CanaryFailed("n1", "1", "wrong answer"), ev.Quarantine("n1", "1", "the canary failed", AT + 100))
    (story,) = explain(paths, None).stories
    assert (story.kind, story.subject) == ("node", "n1")
    assert "slot 1 quarantined (the canary failed)" in story.now
    assert [text for _, text, _ in story.steps] == [
        "n1 slot 1: the canary failed: wrong answer",
        "n1 slot 1 quarantined: the canary failed",
    ]
    assert any("before you trust it again" in a for a in story.advice)


def test_a_lost_node_and_its_return(paths: RunPaths) -> None:
    add(paths, ev.NodeTroubled("n1", "no route", AT), ev.NodeLost("n1", "no route"), ev.NodeJoined("n1", ("0", "1")))
    (story,) = explain(paths, None).stories
    assert [text for _, text, _ in story.steps] == [
        "n1 is in trouble, and is tried again: no route",
        "n1 was given up: no route",
    ]
    assert story.now.endswith("; ready")
    assert any("nodes check" in a for a in story.advice)


def test_candidates_that_faulted(paths: RunPaths) -> None:
    values: dict[str, Any] = {"attempt": "g0001", "node": "n1", "slot": "0", "t": AT, "device": DEVICE}
    with Ledger.open(paths.ledger) as ledger, ledger.transaction():
        for shape, status in ((1, "error"), (2, "error"), (1, "wrong")):
            row = {"us": -1.0, "kernelName": f"asm_{status}", "libtype": "asm", "status": status, "detail": "signal 11"}
            ledger.put_rows([row_values(shape=shape, row=row, **values)])
    (story,) = explain(paths, None).stories
    assert (story.kind, story.subject) == ("candidate", "asm_error (asm)")
    names = ["x".join(map(str, kit.shapes(3)[i].key[:3])) for i in (0, 1)]
    assert story.now == f"faulted on n1 slot 0 (error: signal 11); at {', '.join(names)}"
    advice = explain(paths, "1x1280x8192").stories[0].advice
    assert "Candidate asm_error (asm) faulted on n1 slot 0 (error: signal 11)" in advice


def test_candidates_that_were_left_out_and_the_winner_without_them(paths: RunPaths) -> None:
    entry = {
        "key": ["gfx950", "3"], "candidate": ["asm", "7"], "name": "asm_7", "outcome": "fault", "detail": "SIGSEGV",
        "t": 5.0, "slot": "gpu-1", "image": "sha", "driver": "6", "source": "attempt", "confirmed": False,
    }  # fmt: skip
    values: dict[str, Any] = {"attempt": "g0001", "shape": 1, "node": "n1", "slot": "0", "t": AT, "device": DEVICE}
    with Ledger.open(paths.ledger) as ledger, ledger.transaction():
        for row in (
            {"us": 5.0, "kernelName": "ck_1", "libtype": "ck", "status": "ok"},
            {"us": 6.0, "kernelName": "asm_7", "libtype": "asm", "status": "ok"},
        ):
            ledger.put_rows([row_values(row=row, winner=row["libtype"] == "ck", **values)])
        ledger.withheld(attempt="g0001", shape=1, node="n1", slot="0", entries=[entry])
    add(
        paths,
        ev.ShapeTuned("g0001", 1, (("asm", "7"),)),
        ev.SettleShape(1, "g0001", False, "there is no second slot"),
    )
    script = reproduction(paths)
    found = {s.kind: s for s in explain(paths, None).stories}
    assert found["candidate"].advice == [f"To see the fault again, on that node in the image: {script}"]
    name = explain(paths, "1").stories[0].subject
    words = "faulted on n1 slot 0 (fault: SIGSEGV); unconfirmed: no other slot has tried it"
    assert found["candidate"].subject == "asm_7 (asm)", "a row of another attempt tells its backend"
    assert found["candidate"].now == f"{words}; at {name}"
    assert found["shape"].now == "tuned, unconfirmed: there is no second slot"
    assert f"Candidate asm_7 (asm) {words}" in found["shape"].advice
    node = explain(paths, "n1").stories[0]
    assert f"Later runs leave out candidate asm_7 (asm): {words}" in node.advice
    assert any("delete .cache/aiter/*/blocklist.jsonl" in a for a in node.advice)


def test_hardware_errors_and_heat_of_an_attempt(paths: RunPaths) -> None:
    before = {"source": "sysfs", "pci": "a", "id": "x", "errors": {"uncorrectable": {"total": 1, "umc": 1}}}
    after = before | {"errors": {"uncorrectable": {"total": 3, "umc": 3}}, "temperature_c": {"junction": 104.0}}
    with Ledger.open(paths.ledger) as ledger, ledger.transaction():
        ledger.attempt_report("g0001", conditions={"before": before, "after": after})
    (story,) = explain(paths, None).stories
    assert sorted(text for _, text, _ in story.steps) == [
        "slot 0 (g0001): 104 C at its end",
        "slot 0 (g0001): uncorrectable hardware errors rose during the attempt: umc +2",
    ]
    document = json.loads(json.dumps(explain(paths, None).to_json()))
    assert set(document["stories"][0]["steps"][0]) == {"t", "text", "kind"}


def test_a_failed_shape_says_what_can_be_done_and_how_to_see_it_again(paths: RunPaths) -> None:
    add(
        paths,
        ev.AttemptEnded("g0001", Reason.FAULT, 1, "signal 11", 3.0),
        ev.FailShape(1, Reason.FAULT, "signal 11", "g0001", True),
    )
    script = reproduction(paths)
    for what in (None, "g0001", "1"):
        (story,) = explain(paths, what).stories
        assert any(f"retry {paths.named} --reason fault" in a for a in story.advice)
        assert f"To see the fault again, on that node in the image: {script}" in story.advice
    assert "attempt g0001 on n1 slot 0 ended after 3.0 s" in told(explain(paths, "g0001"))


def test_a_shape_that_went_wrong_in_many_ways_fits_a_screen(paths: RunPaths) -> None:
    """Thirty tries, each of which ended badly, and as many candidates that faulted."""
    for i in range(2, 32):
        add(
            paths,
            ev.AttemptEnded(f"g{i - 1:04d}", Reason.FAULT, 1, "signal 11 " * 90, 3.0),
            ev.Send(f"g{i:04d}", "n1", "0", i, (1,)),
            ev.AttemptStarted(f"g{i:04d}", "n1", "0"),
        )
        values: dict[str, Any] = {"attempt": "g0001", "shape": 1, "node": "n1", "slot": "0", "t": AT, "device": DEVICE}
        row = {"us": -1.0, "kernelName": f"asm_{i}", "libtype": "asm", "status": "fault"}
        with Ledger.open(paths.ledger) as ledger, ledger.transaction():
            ledger.put_rows([row_values(row=row, **values)])
    add(paths, ev.FailShape(1, Reason.FAULT, "signal 11", "g0030", True))
    lines = explain(paths, "1").lines()
    assert 24 <= len(lines) <= 40
    assert all(len(line) < 300 for line in lines)
    assert lines[1].split("  ")[-1].startswith("g0001 on n1 slot 0 ended at it after 3.0 s: the tuner's process died")
    assert "more candidates faulted at this shape." in "\n".join(lines)


def test_an_unknown_name_lists_what_there_is(paths: RunPaths) -> None:
    with pytest.raises(InputError, match=r"no group, shape or node 'nope' \(groups: g0001; nodes: n1\)"):
        explain(paths, "nope")


def test_a_whole_run_with_faults(tmp_path: Path) -> None:
    kinds = [s.kind for s in explain(kit.simulated_run(tmp_path, 120), None).stories]
    assert {"node", "shape"} <= set(kinds)
    assert kinds == sorted(kinds, key=["node", "shape", "candidate"].index)


def test_a_run_s_time_in_summary_status_and_page_leaves_the_night_out(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    """It began at BEGAN + 3; eight hours later a person asks for a retry, which takes a minute."""
    failed = ev.FailShape(1, Reason.NO_CANDIDATE, "none", "g0001", True)
    add(paths, failed)
    night = AT + 8 * 3600.0
    with Ledger.open(paths.ledger) as ledger, ledger.transaction():
        began, ended = (
            ledger.query(f"SELECT {x}(t) FROM journal WHERE type<>'WorkAdded'")[0][0] for x in ("min", "max")
        )
        for t, record in ((night, ev.Resumed(2)), (night, ev.RetryAsked((1,))), (night + 60.0, failed)):
            ledger.journal(record, t)
        ledger.set_meta("state", "interrupted")
        ledger.set_meta("ended", night + 60.0)
    took = duration(ended - began + 60.0)
    words = f"{took} (over 2 sessions from "
    end_page(paths, "interrupted").finish()
    assert f"run {paths.run} interrupted in {words}" in capsys.readouterr().out
    paths.inventory.write_text("nodes: {n1: {transport: local, gpus: 0}}\n")
    show_status(paths, 0.01)
    assert f"worked for {words}" in capsys.readouterr().out
    document = Collector(paths).document()
    assert f"The run is interrupted after {words}" in document["sentences"][1]
    assert (document["worked_s"], document["sessions"]) == (ended - began + 60.0, 2)


def test_the_status_of_many_nodes_names_those_that_need_a_look_and_counts_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """50 leases with 200 slots, one of them out of reach; a node that no worker runs on yet."""
    paths, _ = kit.empty_run(tmp_path, 3)
    slots = ("0", "1", "2", "3")
    add(paths, ev.WorkAdded("k", ((1, 2, 3),), ((3.0, 3.0, 4.0),)), ev.Resumed(1))
    for i in range(50):
        add(
            paths,
            ev.NodeExpected(f"p-{i}", slots, f"h{i}", slots, f"l{i}", "p", AT + 9e5),
            ev.NodeJoined(f"p-{i}", slots),
        )
        add(paths, *(ev.CanaryPassed(f"p-{i}", s, 10.0) for s in slots))
    add(paths, ev.NodeTroubled("p-7", "no route", AT))
    paths.inventory.write_text("nodes: {n1: {transport: local, gpus: 0}}\n")
    show_status(paths, 0.01)
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[:2] for line in lines if line.startswith("p-")]
    assert shown == [["p-7", "4x"], ["p-7", "is"]]
    (rest,) = (line for line in lines if "more nodes" in line)
    assert rest.startswith("50 more nodes with 197 slots: 196 idle, 1 preparing;")
    assert "--json" in rest
