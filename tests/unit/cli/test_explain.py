"""`explain`: all that went wrong in a run, with what a person can do, and single stories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator import events as ev
from orchestrator.cli.output.run_end import report_end
from orchestrator.cli.output.status import show_status
from orchestrator.errors import InputError
from orchestrator.ledger import Ledger
from orchestrator.paths import RunPaths
from orchestrator.reasons import Reason
from orchestrator.report.collector import Collector
from orchestrator.run.explain import Explanation, explain
from orchestrator.status import duration
from tests.support import report_kit as kit

AT = kit.BEGAN
DEVICE = kit.DEVICE


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run of three shapes on one node with two slots, without a fault so far."""
    paths, _ = kit.empty_run(tmp_path, 3)
    add(
        paths, ev.GroupAdded("g0001", (1, 2), 10.0), ev.GroupAdded("g0002", (3,), 5.0), ev.Resumed(1),
        ev.NodeExpected("n1", ("0", "1")), ev.NodeJoined("n1", ("0", "1")), ev.CanaryPassed("n1", "0", 10.0),
        ev.CanaryPassed("n1", "1", 10.0), ev.Send("g0001-1", "g0001", "n1", None, 1),
        ev.AttemptStarted("g0001-1", "n1", "0"), ev.ShapeStarted("g0001-1", 1),
    )  # fmt: skip
    return paths


def add(paths: RunPaths, *records: ev.Record) -> None:
    with Ledger.open(paths.ledger) as ledger, ledger.transaction():
        at = ledger.query("SELECT coalesce(max(t), ?) FROM journal", (AT,))[0][0]
        for i, record in enumerate(records, 1):
            ledger.journal(record, at + i)


def reproduction(paths: RunPaths) -> Path:
    """As it is brought home from a node."""
    script = paths.attempt("g0001-1") / "repro" / "x" / "reproduce.sh"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\n")
    return script


def told(explanation: Explanation) -> str:
    return "\n".join(explanation.lines())


def test_nothing_went_wrong(paths: RunPaths) -> None:
    assert told(explain(paths, None)).startswith("nothing went wrong so far")


def test_a_slot_in_quarantine_went_wrong(paths: RunPaths) -> None:
    add(paths, ev.CanaryFailed("n1", "1", "wrong answer"), ev.Quarantine("n1", "1", "the canary failed", AT + 100))
    (story,) = explain(paths, None).stories
    assert (story.kind, story.subject) == ("node", "n1")
    assert "slot 1 quarantined (the canary failed)" in story.now
    assert [type(r).__name__ for _, _, r in story.steps] == ["CanaryFailed", "Quarantine"]
    assert any("before you trust it again" in a for a in story.advice)


def test_a_lost_node_and_its_return(paths: RunPaths) -> None:
    add(paths, ev.NodeTroubled("n1", "no route", AT), ev.NodeLost("n1", "no route"), ev.NodeJoined("n1", ("0", "1")))
    (story,) = explain(paths, None).stories
    assert [type(r).__name__ for _, _, r in story.steps] == ["NodeTroubled", "NodeLost", "NodeJoined"]
    assert any("nodes check" in a for a in story.advice)


def test_candidates_that_did_not_come_to_an_end(paths: RunPaths) -> None:
    with Ledger.open(paths.ledger) as ledger, ledger.transaction():
        for shape, status in ((1, "error"), (2, "error"), (1, "wrong")):
            row = {"us": -1.0, "kernelName": f"asm_{status}", "libtype": "asm", "status": status, "detail": "signal 11"}
            ledger.row(attempt="g0001-1", shape=shape, node="n1", slot="0", t=AT, row=row, device=DEVICE)
    (story,) = explain(paths, None).stories
    assert (story.kind, story.subject) == ("candidate", "asm_error (asm)")
    names = [kit.shapes(3)[i].key[:3] for i in (0, 1)]
    assert (
        story.now
        == f"did not come to an end on n1 slot 0 at {', '.join('x'.join(map(str, k)) for k in names)}: error: signal 11"
    )
    advice = explain(paths, "1x1280x8192").stories[0].advice
    assert "Candidate asm_error did not come to an end on n1 slot 0: error: signal 11" in advice


def test_candidates_that_were_left_out_and_the_winner_without_them(paths: RunPaths) -> None:
    entry = {
        "key": ["gfx950", "3"], "candidate": ["asm", "7"], "name": "asm_7", "outcome": "fault", "detail": "SIGSEGV",
        "t": 5.0, "slot": "gpu-1", "image": "sha", "driver": "6", "source": "attempt", "confirmed": False,
    }  # fmt: skip
    with Ledger.open(paths.ledger) as ledger, ledger.transaction():
        row = {"us": 5.0, "kernelName": "ck_1", "libtype": "ck", "status": "ok"}
        ledger.row(
            attempt="g0001-1", shape=1, node="n1", slot="0", t=AT, row=row, winner=True, device=DEVICE
        )  # fmt: skip
        ledger.withheld(attempt="g0001-1", shape=1, node="n1", slot="0", entries=[entry])
    add(
        paths,
        ev.ShapeTuned("g0001-1", 1, False, ("ck", "1"), (), (("asm", "7"),)),
        ev.SettleShape(1, "g0001-1", False, "there is no second slot"),
    )
    script = reproduction(paths)
    found = {s.kind: s for s in explain(paths, None).stories}
    assert found["candidate"].advice == [f"To see the fault again, on that node in the image: {script}"]
    assert found["group"].subject == "g0001"
    name = explain(paths, "1").stories[0].subject
    words = "fault: SIGSEGV; unconfirmed: no other slot has tried it"
    assert found["candidate"].subject == "asm_7"
    assert found["candidate"].now == f"did not come to an end on n1 slot 0 at {name}: {words}"
    shape = explain(paths, "1").stories[0]
    assert shape.now == "tuned, unconfirmed: there is no second slot"
    assert f"Candidate asm_7 did not come to an end on n1 slot 0: {words}" in shape.advice
    node = explain(paths, "n1").stories[0]
    assert f"Later runs leave out candidate asm_7 on n1 slot 0: {words}" in node.advice
    assert "delete .cache/aiter/*/blocklist.jsonl" in node.advice[-1]


def test_hardware_errors_and_heat_of_an_attempt(paths: RunPaths) -> None:
    before = {"source": "sysfs", "pci": "a", "id": "x", "errors": {"uncorrectable": {"total": 1, "umc": 1}}}
    after = before | {"errors": {"uncorrectable": {"total": 3, "umc": 3}}, "temperature_c": {"junction": 104.0}}
    with Ledger.open(paths.ledger) as ledger, ledger.transaction():
        ledger.attempt_report("g0001-1", conditions={"before": before, "after": after})
    (story,) = explain(paths, None).stories
    words = [text for _, text, _ in story.steps]
    assert words == [
        "n1 slot 0 (g0001-1): uncorrectable hardware errors rose during the attempt: umc +2",
        "n1 slot 0 (g0001-1): 104 C at its end",
    ]
    assert json.loads(json.dumps(explain(paths, None).to_json()))["stories"][0]["steps"][0]["type"] == "Reading"


def test_a_failed_shape_says_what_can_be_done_and_how_to_see_it_again(paths: RunPaths) -> None:
    add(
        paths,
        ev.AttemptEnded("g0001-1", Reason.FAULT, 1, "signal 11", 3.0),
        ev.FailShape(1, Reason.FAULT, "signal 11", "g0001-1", True),
    )
    script = reproduction(paths)
    for what in (None, "g0001", "1"):
        (story,) = explain(paths, what).stories
        assert any(f"retry {paths.named} --reason fault" in a for a in story.advice)
        assert f"To see the fault again, on that node in the image: {script}" in story.advice
    assert "attempt g0001-1 on n1 slot 0 ended after 3.0 s" in told(explain(paths, "g0001"))


def test_sentences_are_right_in_number(paths: RunPaths) -> None:
    assert "planned with 1 shape, " in told(explain(paths, "g0002"))
    assert "planned with 2 shapes, " in told(explain(paths, "g0001"))


def test_an_unknown_name_lists_what_there_is(paths: RunPaths) -> None:
    with pytest.raises(InputError, match=r"no group, shape or node 'nope' \(groups: g0001, g0002 ...; nodes: n1\)"):
        explain(paths, "nope")


def test_a_whole_run_with_faults(tmp_path: Path) -> None:
    kinds = [s.kind for s in explain(kit.simulated_run(tmp_path, 120), None).stories]
    assert {"node", "group"} <= set(kinds)
    assert kinds == sorted(kinds, key=["node", "group", "candidate"].index)


def test_a_slot_that_loses_candidates_which_run_elsewhere_went_wrong(paths: RunPaths) -> None:
    add(paths, ev.ChargeSlot("n1", "0", 2, (("asm", "1"), ("asm", "2")), (), ("n2", "1")))
    text = told(explain(paths, None))
    assert "n1 slot 0: 2 candidates of" in text
    assert "ran on n2 slot 1" in text
    assert "look at the GPU's health" in text


def test_a_run_s_time_in_summary_status_and_page_leaves_the_night_out(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    """It began at BEGAN + 3; eight hours later a person asks for a retry, which takes a minute."""
    failed = ev.FailShape(1, Reason.NO_CANDIDATE, "none", "g0001-1", True)
    add(paths, failed)
    night = AT + 8 * 3600.0
    with Ledger.open(paths.ledger) as ledger, ledger.transaction():
        began, ended = (
            ledger.query(f"SELECT {x}(t) FROM journal WHERE type<>'GroupAdded'")[0][0] for x in ("min", "max")
        )
        for t, record in ((night, ev.Resumed(2)), (night, ev.RetryAsked((1,))), (night + 60.0, failed)):
            ledger.journal(record, t)
        ledger.set_meta("state", "interrupted")
        ledger.set_meta("ended", night + 60.0)
    took = duration(ended - began + 60.0)
    words = f"{took} (over 2 sessions from "
    report_end(paths, "interrupted", json_=False)
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
    add(paths, ev.GroupAdded("g0001", (1, 2, 3), 10.0), ev.Resumed(1))
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
