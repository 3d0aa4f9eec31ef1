"""Withheld candidates in the ledger: kept, judged, given back to the nodes; and reports on unconfirmed shapes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from orchestrator import events as ev
from orchestrator.cli.ending import add_unconfirmed
from orchestrator.cli.printer import Page
from orchestrator.ledger.reader import reconcile
from orchestrator.results.export import Request, provenance, write_profile
from tests.support.ledger_kit import A8W8, Run, ended, row, started

ASM, CK = ["asm", "7"], ["ck", "3"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Run(tmp_path) as made:
        made.send("g0002-1")
        made.says(started("g0002-1"))
        yield made


def entry(candidate: list[str], **more: Any) -> dict[str, Any]:
    made = {"key": ["gfx950", "3"], "candidate": candidate, "name": "asm kernel\x1b[31m", "outcome": "fault"}
    return {**made, "detail": "SIGSEGV", "t": 5.0, "slot": "gpu-1", "image": "sha", "driver": "6", **more}


def tuned(*withheld: dict[str, Any], attempt: str = "g0002-1", **more: Any) -> dict[str, Any]:
    return {**row("shape_tuned", attempt, 3), "candidate": CK, "withheld": list(withheld), **more}


def test_a_result_with_candidates_left_out_settles_nothing(run: Run) -> None:
    (event,) = run.says(row("row", "g0002-1", 3), tuned(entry(ASM)))[:1]
    assert event == ev.ShapeTuned("g0002-1", 3, (("asm", "7"),))
    assert run.ledger.counts().tuned == 0
    (kept,) = run.ledger.left_out(3)
    assert (kept.candidate, kept.node, kept.slot, kept.gpu, kept.verdict) == (("asm", "7"), "n1", "0", "gpu-1", None)
    assert kept.name == "asm kernel"
    assert reconcile(run.ledger) == []


def test_what_two_slots_saw_before_leaves_the_attempt_complete(run: Run) -> None:
    (event,) = run.says(tuned(entry(ASM, confirmed=True, source="blocklist")))
    assert event == ev.ShapeTuned("g0002-1", 3)
    assert run.ledger.counts().tuned == 1
    assert run.ledger.unconfirmed() == []


def test_a_blocklist_s_entries_are_told_apart(run: Run) -> None:
    (event,) = run.says(tuned(entry(ASM, source="blocklist"), withheld_more=2))
    assert isinstance(event, ev.ShapeTuned)
    assert (event.complete, event.earlier, event.cut) == (False, (("asm", "7"),), True)


@pytest.mark.parametrize(
    "odd",
    [
        {"withheld": "all"}, {"withheld": [{"candidate": ASM}]}, {"withheld": [entry([])]}, {"withheld_more": -1},
        {"withheld": [entry(ASM, outcome="tired")]},
    ],
)  # fmt: skip
def test_what_cannot_be_is_counted_and_settles_nothing(run: Run, odd: dict[str, Any]) -> None:
    assert run.says({**tuned(), **odd}) == []
    assert run.bad() == 1
    assert run.ledger.counts().tuned == 0


def test_a_decision_settles_it_and_says_whether_it_is_confirmed(run: Run) -> None:
    run.says(tuned(entry(ASM)))
    run.journal(ev.SettleShape(3, "g0002-1", False, "no second slot"))
    (shape,) = run.ledger.shapes("tuned")
    assert (shape.confirmed, shape.detail, shape.attempt) == (False, "no second slot", "g0002-1")
    ((found, left_out),) = run.ledger.unconfirmed()
    assert (found.id, found.node, found.slot) == (3, "n1", "0")
    assert [w.candidate for w in left_out] == [("asm", "7")]
    assert reconcile(run.ledger) == []


def test_other_gpus_judge_a_candidate_and_its_node_is_told_until_it_has_begun_something_else(run: Run) -> None:
    run.says(tuned(entry(ASM), entry(CK)))
    assert run.ledger.blocklist_verdicts("n1") == ([], [])
    run.send("g0002-2", "n2")
    run.says(started("g0002-2"), tuned(entry(CK, slot="gpu-9"), attempt="g0002-2"), node="n2")
    run.journal(ev.SettleShape(3, "g0002-2", True, "1 candidate"))
    ran, faulted = run.ledger.blocklist_verdicts("n1")
    assert [w.candidate for w in ran] == [("asm", "7")]
    assert [w.candidate for w in faulted] == [("ck", "3")]
    assert [w.candidate for w in run.ledger.blocklist_verdicts("n2")[1]] == [("ck", "3")]
    run.says(ended("g0002-1"))
    run.send("g0001-1")
    assert run.ledger.blocklist_verdicts("n1")[0] != []  # sent, and not begun: it may yet be taken back
    run.says(started("g0001-1"))
    assert run.ledger.blocklist_verdicts("n1") == ([], [])


def test_two_slots_of_one_gpu_are_no_two_gpus(run: Run) -> None:
    run.says(tuned(entry(ASM)))
    run.send("g0002-2", "n2")
    run.says(started("g0002-2"), tuned(entry(ASM), attempt="g0002-2"), node="n2")
    assert [w.verdict for w in run.ledger.left_out()] == [None, None]


def test_profile_and_provenance_and_summary_say_unconfirmed_and_the_tuned_table_does_not(
    run: Run, tmp_path: Path
) -> None:
    run.send("g0001-1")
    run.tune("g0001-1", 1)
    run.says(row("row", "g0002-1", 3), tuned(entry(ASM)))
    run.journal(ev.SettleShape(3, "g0002-1", False, "1 candidate faulted on n1 slot 0"))
    write_profile(run.ledger, tmp_path / "profile.csv")
    with open(tmp_path / "profile.csv") as f:
        said = {(r["M"], r["winner"]): r["unconfirmed"] for r in csv.DictReader(f)}
    assert said == {("1", "0"): "0", ("1", "1"): "0", ("3", "0"): "0", ("3", "1"): "1"}
    assert "unconfirmed" not in A8W8.tuned_header
    document = json.loads(json.dumps(provenance(run.ledger, Request("r", 0.0))))
    (found,) = document["unconfirmed"]
    assert found["shape"] == {"M": 3, "N": 64, "K": 128}
    assert found["withheld"][0]["elsewhere"] == "not tried"
    assert [w["name"] for w in document["withheld"]] == ["asm kernel"]
    out = io.StringIO()
    with redirect_stdout(out):
        page = Page()
        add_unconfirmed(page, run.ledger.unconfirmed())
        add_unconfirmed(page, [])
        page.print()
    assert out.getvalue().startswith(
        "! 1 shape unconfirmed: 3x64x128: 1 candidate faulted on n1 slot 0, and no second slot could try them\n"
    )
