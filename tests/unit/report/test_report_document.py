"""The page's document: made from the ledger, whole at any time, and the same whether read at once or as it grew."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import events as ev
from orchestrator.ledger.reader import LedgerReader
from orchestrator.ledger.writer import Ledger
from orchestrator.policy import PolicySettings
from orchestrator.policy.apply import apply
from orchestrator.policy.model import State
from orchestrator.reasons import Reason
from orchestrator.report.collector import Collector
from orchestrator.report.live import changes
from orchestrator.view.timeline import timeline
from tests.simulator.simulator import Simulator
from tests.support import report_kit as kit
from tests.support.report_kit import empty_run, simulated_run


def column(document: dict[str, Any], name: str) -> list[Any]:
    at = document["columns"]["row"].index(name)
    return [row[at] for row in document["shapes"]]


def test_it_agrees_with_the_ledger(tmp_path: Path) -> None:
    run = simulated_run(tmp_path, 120)
    document = Collector(run).document()
    with LedgerReader.open_readonly(run.ledger) as ledger:
        counts, winners = ledger.counts(), {w.shape: w.kernel_name for w in ledger.winners()}
        failed, failures = {f.id: f.reason for f in ledger.failed()}, ledger.failures()
        attempts = sum(a.started_at is not None for a in ledger.replayed.attempts.values())
    assert document["counts"] == counts.to_json()
    assert (counts.tuned > 100, counts.failed > 3) == (True, True)
    ids = column(document, "id")
    assert ids == list(range(1, 121))
    assert {i: k for i, k in zip(ids, column(document, "kernel"), strict=True) if k} == winners
    assert {i: r for i, r in zip(ids, column(document, "reason"), strict=True) if r} == failed
    assert {f["reason"]: f["count"] for f in document["failures"]} == failures
    assert all(f["advice"] for f in document["failures"])
    assert all(s["story"] for f in document["failures"] for s in f["shapes"] if not s["verdict"])
    assert sum(len(segments) for _, _, segments in document["fleet"]["lanes"]) == attempts
    asked, came, then = document["sentences"]
    assert asked.startswith("120 shapes of a8w8_bpreshuffle were requested on ")
    assert "12 slots on 3 nodes (AMD Instinct MI355X)" in asked
    assert f"{counts.tuned} tuned, {counts.failed} failed" in came
    assert "each is below" in then
    json.dumps(document, allow_nan=False)
    for (m, n, k), t, rate in zip(*(column(document, name) for name in ("key", "us", "tflops")), strict=True):
        assert not t or rate == pytest.approx(2 * m * n * k / t / 1e6, rel=1e-3)
    assert all(0 < s < 1 for s in column(document, "share") if s), "no rate is above its roof"


def changed(old: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """The document after a change, as the page's script applies it."""
    new: dict[str, Any] = change.get("full") or copy.deepcopy(old) | change["parts"]
    for i, row in change.get("rows", ()):
        new["shapes"][i] = row
    return new


def test_read_as_it_grew_it_is_what_it_is_at_once_and_its_changes_are_small(tmp_path: Path) -> None:
    paths, asked = empty_run(tmp_path / "grown", 48)
    growing = Collector(paths)
    old = growing.document()
    assert (old["state"], old["counts"]["pending"], old["noise"]["spread"]) == ("planned", 48, {"n": 0})
    assert old["fleet"]["lanes"] == old["failures"] == old["backends"] == old["gpus"] == []
    assert changes(None, old) == {"full": old}
    simulator = Simulator(kit.plan(48))
    simulator.run()
    partial = 0
    with Ledger.open(paths.ledger) as ledger:
        for i in range(0, len(simulator.journal), 40):
            kit.fill(ledger, simulator.journal[i : i + 40], asked)
            new = growing.document()
            change = changes(old, new)
            assert changed(old, change) == new
            partial += "rows" in change and len(change["rows"]) < 48
            old = new
        with ledger.transaction():
            ledger.set_meta("state", "finished")
            ledger.set_meta("ended", kit.BEGAN + simulator.now)
    assert partial > 3
    one, other = growing.document(), Collector(paths).document()
    assert one | {"made": ""} == other | {"made": ""}


def test_the_previous_table_by_the_merge_and_by_itself(tmp_path: Path) -> None:
    table = tmp_path / "tuned.csv"
    key = "gfx950,256,1,1280,8192,torch.float8_e4m3fn"
    table.write_text(",".join(kit.FAMILY.tuned_header) + f"\n{key},ck,7,0,100.0,a8w8_old,1,1,0.0\n")
    paths = simulated_run(tmp_path / "runs", 24, db=str(table))
    at = Collector(paths).document()
    assert (at["earlier"]["n"], column(at, "old_us")[0]) == (1, 100.0)
    names = ("gfx", "cu_num", *kit.FAMILY.key_names)
    row = {"action": "replaced", "key": dict(zip(names, ("gfx950", 256, 1, 1280, 8192, kit.FP8), strict=True))}
    paths.merge.write_text(json.dumps({"path": "t.csv", "rows": [row | {"old_us": 50.0, "new_us": 6.0}]}))
    merged = Collector(paths).document()
    assert (merged["earlier"]["counts"], column(merged, "old_us")[0]) == ({"replaced": 1}, 50.0)
    for text in ("", "[]", '{"rows": [{}]}', '{"rows": 5}', '{"rows": [{"key": 1, "action": 2}]}'):
        paths.merge.write_text(text)
        assert "merge.json cannot be read" in Collector(paths).document()["earlier"]["note"]


# --- the time line ----------------------------------------------------------------------------------------------------


def of(*records: tuple[float, ev.Record]) -> State:
    state = State(PolicySettings())
    for t, record in ((0.0, ev.NodeJoined("n", ("0",))), *records):
        apply(state, record, t)
    return state


def ran(i: int, start: float, seconds: float, outcome: Reason = Reason.DONE) -> Iterator[tuple[float, ev.Record]]:
    yield start, ev.Send(f"g{i}", "n", "0", i, ())
    yield start, ev.AttemptStarted(f"g{i}", "n", "0")
    yield start + seconds, ev.AttemptEnded(f"g{i}", outcome, None, "", seconds)


def test_a_night_without_a_controller_is_a_pause_and_very_many_attempts_are_drawn_as_fewer() -> None:
    drawn = timeline(of(*ran(1, 0.0, 100.0), *ran(2, 50_000.0, 100.0)), str, 0.0, 50_100.0)
    assert drawn["pauses"] == [[100.0, 50_000.0]]
    records = (r for i in range(30_000) for r in ran(i, i, 0.9, Reason.FAULT if i % 1000 == 0 else Reason.DONE))
    drawn = timeline(of(*records), str, 0.0, 30_000.0)
    segments = drawn["lanes"][0][2]
    assert (drawn["coarse"], len(segments) < 2000, sum(s[2] == "fault" for s in segments)) == (True, True, 30)
