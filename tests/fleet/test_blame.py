"""Shapes, tuners and slots that misbehave for real: who is blamed, who is not, and that the books add up (laws 1 to 3,
5 and 6)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator import events as ev
from orchestrator.paths import RunPaths
from orchestrator.policy.settings import PolicySettings
from tests.fleet.kit import Fleet
from tests.waiting import wait_until

POISON = {"N": "32", "M": "2"}
NAME = "2x32x64"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"kind": "abort"}, "fault"),
        ({"kind": "exit"}, "fault"),
        ({"kind": "error"}, "error"),
        ({"kind": "lie"}, "error"),
        ({"kind": "oom"}, "oom"),
        ({"kind": "hang"}, "hang"),
        ({"kind": "kill_worker"}, "kills_nodes"),
        ({"kind": "truncate"}, "kills_nodes"),
        ({"kind": "wrong"}, "wrong_result"),
        ({"kind": "no_candidate"}, "no_candidate"),
    ],
    ids=lambda v: v["kind"] if isinstance(v, dict) else None,
)
def test_a_poison_shape_fails_alone_and_confirmed(fleet: Fleet, fault: dict[str, str], reason: str) -> None:
    n = fleet.shapes(groups=4, per_group=3)
    watchdog_s = 0.5 if reason == "hang" else 60.0
    done = fleet.tune({**fault, "match": POISON, "times": 99}, watchdog_s=watchdog_s, code=1)
    fleet.check_books(n - 1, {NAME: reason})
    assert f"{NAME} failed: {reason}" in done.out
    is_the_shapes_own = reason in ("wrong_result", "no_candidate")
    assert ("gemmfleet retry" in done.out) is not is_the_shapes_own, "another try would end the same"
    (verdict,) = fleet.journal(ev.FailShape)
    assert verdict.confirmed
    if reason in ("fault", "error", "oom", "hang"):
        told = [node for node, end in fleet.ends(reason) if end.in_flight == verdict.shape]
        assert len(set(told)) == 2, "two nodes had to see it"
    assert not fleet.journal(ev.Quarantine)


def test_a_partial_success_keeps_its_rows(fleet: Fleet) -> None:
    """The attempt ends by an abort after some shapes; those were delivered, and are not measured again (law 2)."""
    n = fleet.shapes(groups=1, per_group=6)
    fleet.tune({"kind": "abort", "match": {"M": "4"}, "times": 1, "counters": str(fleet.root / "count")})
    fleet.check_books(n)
    ((_, end),) = fleet.ends("fault")
    starts = fleet.starts()
    assert {s for s, times in starts.items() if times > 1} == {end.in_flight}


def test_a_failed_shape_is_tried_again_on_request(fleet: Fleet) -> None:
    n = fleet.shapes(groups=2, per_group=3)
    once = {"kind": "no_candidate", "match": POISON, "times": 1, "counters": str(fleet.root / "count")}
    fleet.tune(once, code=1)
    fleet.check_books(n - 1, {NAME: "no_candidate"})
    for reason, code, said in (
        ("oom", 0, "no failed shape with reason 'oom' (failed shapes have: no_candidate)"),
        ("nonsense", 2, "--reason 'nonsense' is not a reason for which a shape fails (there are: fault"),
        ("no_candidates", 2, "did you mean no_candidate?"),
    ):
        asked = fleet.command("retry", "--reason", reason)
        assert (asked.code, said in asked.out + asked.err) == (code, True), asked.err
    assert "has no group 'g9999'" in fleet.command("retry", "--group", "g9999").err
    (verdict,) = fleet.journal(ev.FailShape)
    again = fleet.drive(retry=[verdict.shape])
    again.ends_with(0)
    fleet.check_books(n)
    assert sum(fleet.starts().values()) == n + 1


def test_a_slot_with_a_sick_canary_gets_no_work(fleet: Fleet) -> None:
    n = fleet.shapes(groups=6)
    run = fleet.begun(1, {"kind": "sick_canary", "match": {"node": "h3"}, "times": 99})
    wait_until(lambda: fleet.of("h3", ev.CanaryFailed), "its canary fails")
    fleet.finish(run, n)
    assert not fleet.of("h3", ev.AttemptStarted)
    assert set(fleet.tuned_by()) <= {"h1", "h2"}
    assert fleet.struck("h3")


def test_a_sick_slot_is_shut_and_condemns_no_shape(fleet: Fleet) -> None:
    """Every shape faults there although its canary passes (law 6)."""
    n = fleet.shapes(groups=16, per_group=2)
    others_wait = {"kind": "hold", "match": {"node": ["h2", "h3"]}}
    run = fleet.start({"kind": "abort", "match": {"node": "h1"}, "times": 99}, others_wait)
    wait_until(lambda: fleet.struck("h1") >= PolicySettings().faults_passed_elsewhere, "enough shapes fault there")
    fleet.finish(run, n)
    assert {q.node for q in fleet.journal(ev.Quarantine)} == {"h1"}
    assert set(fleet.tuned_by()) == {"h2", "h3"}
    assert {node for node, _ in fleet.ends("fault")} == {"h1"}
    assert len(fleet.ends("fault")) == fleet.struck("h1")


def test_where_the_only_slot_is_sick_nothing_is_confirmed(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet(nodes={"h1": 1})
    fleet.shapes(groups=3)
    done = fleet.tune({"kind": "abort", "match": {"node": "h1"}, "times": 99}, code=1)
    fleet.check_books(0, {f"1x{16 * g}x64": "fault" for g in (1, 2, 3)})
    assert not any(v.confirmed for v in fleet.journal(ev.FailShape))
    assert all("only one slot" in v.detail for v in fleet.journal(ev.FailShape))
    assert "unconfirmed" in done.out


def test_where_the_only_canary_fails_no_shape_is_blamed(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet(nodes={"h1": 1})
    n = fleet.shapes(groups=3)
    done = fleet.tune({"kind": "sick_canary", "match": {"node": "h1"}, "times": 3}, code=3)
    assert "canary" in done.out
    assert "gemmfleet resume" in done.out
    with fleet.ledger() as ledger:
        assert (ledger.counts().pending, ledger.counts().failed) == (n, 0)
    assert len(fleet.of("h1", ev.CanaryFailed)) == fleet.struck("h1") == 3
    fleet.resume()
    fleet.check_books(n)


@pytest.mark.parametrize("what", ["worker", "tuner"])
def test_a_process_that_is_killed_comes_back_and_blames_nobody(fleet: Fleet, what: str) -> None:
    n = fleet.shapes(groups=12)
    run = fleet.begun(3)
    wait_until(fleet.at_work, "all nodes work")
    for node in fleet.nodes:
        for pid in fleet.workers(node).values() if what == "worker" else fleet.tuners(node):
            os.kill(pid, signal.SIGKILL)
    ended = "worker_died" if what == "worker" else "fault"
    wait_until(lambda: len(fleet.ends(ended)) >= 3, "it is known")
    fleet.finish(run, n)
    assert not fleet.journal(ev.Quarantine)


def test_a_node_that_cannot_work_ends_the_run_with_3(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet(nodes={"h1": 1})
    n = fleet.shapes(groups=2)
    (fleet.root / "nodes").write_text("a file where the work folder belongs")
    done = fleet.tune(code=3)
    (fleet.root / "nodes").unlink()
    assert f"cannot write {fleet.root}/nodes" in done.out
    assert "gemmfleet resume" in done.out
    asked = fleet.command("retry").out
    assert (f"{n} shapes pending; go on with: " in asked, "gemmfleet resume" in asked) == (True, True)
    fleet.resume()
    fleet.check_books(n)


CK = [("ck_a", 6.82), ("ck_b", 7.4)]
ASM = [("asm_a", 5.91), ("asm_b", 6.1), ("asm_c", 6.3)]


@pytest.fixture
def two(make_fleet: Callable[..., Fleet]) -> Fleet:
    """Two nodes `sick` and `well`."""
    return make_fleet(nodes={"sick": 1, "well": 1})


def play(fleet: Fleet, *faults: dict[str, Any], seconds: float = 0.05) -> RunPaths:
    """Tune rows that are recorded: ASM wins everywhere."""
    recording = fleet.root / "recording.csv"
    rows = [line.split(",") for line in fleet.csv.read_text().splitlines()[1:]]
    lines = ["M,N,K,kernelId,splitK,us,kernelName,libtype,errRatio,gfx,cu_num"] + [
        f"{m},{n},{k},{i},0,{us},{name},{name.split('_')[0]},0.0,gfx950,256"
        for m, n, k in rows
        for i, (name, us) in enumerate([*CK, *ASM])
    ]
    recording.write_text("\n".join([*lines, ""]))
    options = {"recording": str(recording), "blocklist": str(fleet.root / "blocklist.jsonl")}
    fleet.tune(*faults, seconds=seconds, options=options)
    fleet.check_books(len(rows))
    return fleet.paths


def asm_faults_on(node: str, **more: Any) -> dict[str, Any]:
    return {"kind": "abort", "match": {"node": node, "libtype": "asm"}, **more}


def kernels(fleet: Fleet) -> set[str]:
    return {r["kernelName"] for r in fleet.rows()}


def elsewhere(fleet: Fleet) -> set[tuple[str, str]]:
    """(node, what became elsewhere) of the candidates that were left out."""
    return {(w["node"], w["elsewhere"]) for w in fleet.provenance()["withheld"]}


def test_the_winner_is_not_what_a_sick_slot_left_over(two: Fleet) -> None:
    """The sick slot has CK at 6.82 us; the shape is tuned once more on the other one (laws 6 and 16)."""
    two.shapes(6)
    play(two, asm_faults_on("sick"))
    assert kernels(two) == {"asm_a"}
    assert two.provenance()["unconfirmed"] == []
    assert elsewhere(two) == {("sick", "ran")}
    incomplete = next(r for r in two.journal(ev.ShapeTuned) if r.withheld)
    told = two.command("explain", two.paths.run, str(incomplete.shape)).out
    assert f"{incomplete.attempt} on sick slot 0: a result, without 3 candidates that faulted" in told


def test_with_one_slot_the_result_is_unconfirmed(make_fleet: Callable[..., Fleet]) -> None:
    one = make_fleet(nodes={"sick": 1})
    one.shapes(2)
    play(one, asm_faults_on("sick"))
    assert kernels(one) == {"ck_a"}
    assert {(r["winner"], r["unconfirmed"]) for r in one.rows("profile")} == {("0", "0"), ("1", "1")}
    assert "unconfirmed" not in one.paths.tuned.read_text()
    found = one.provenance()["unconfirmed"]
    assert "unconfirmed" in one.command("explain", "1").out
    one.command("report", "-o", str(one.root / "page.html"))
    assert "of them unconfirmed" in (one.root / "page.html").read_text()
    assert {w["name"].split()[-1] for u in found for w in u["withheld"]} == {n for n, _ in ASM}
