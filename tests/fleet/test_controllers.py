"""Controllers that are killed, interrupted, cancelled, or meet another one: nothing measured is lost, and at most what
was in flight is repeated (law 4)."""

from __future__ import annotations

import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator import events as ev
from orchestrator.ledger.reader import reconcile
from orchestrator.paths import RunConfig, leave_request
from tests.fleet.kit import Fleet
from tests.support.marks import full_but
from tests.waiting import wait_until


@pytest.mark.parametrize("kills", [8, pytest.param(50, marks=pytest.mark.soak)])
@pytest.mark.parametrize("seed", full_but(range(4), 0))
def test_killed_at_drawn_points_of_its_work(fleet: Fleet, seed: int, kills: int) -> None:
    """Every few milliseconds, with poison and a killer of workers among the shapes; the books hold after each kill."""
    n = fleet.shapes(groups=8 * kills, per_group=2)
    faults = [
        {"kind": "abort", "match": {"N": "64", "M": "2"}},
        {"kind": "kill_worker", "match": {"N": "128", "M": "1"}},
    ]
    draw = random.Random(seed)
    run = fleet.start(*faults, seconds=0.02)
    before = 0
    for _ in range(kills):
        time.sleep(draw.uniform(0.0, 0.5))  # a point of its work, wherever that is on this machine
        if run.poll() is not None:
            break  # a fast machine: all is done
        run.kill()
        if fleet.paths.ledger.exists():
            with fleet.ledger() as ledger:
                assert reconcile(ledger) == []
                now = ledger.counts().settled
            assert now >= before, "settled shapes stay settled"
            before = now
        run = fleet.drive()
    run.ends_with(1)
    fleet.check_books(n - 2, {"2x64x64": "fault", "1x128x64": "kills_nodes"})


@pytest.mark.parametrize("at", ["put", "rename", "open"])
def test_killed_between_a_call_and_its_answer(make_fleet: Callable[..., Fleet], at: str) -> None:
    """A group that arrived unknown to the dead controller is found on the node, and not sent again."""
    fleet = make_fleet(nodes={"h1": 1})
    n = fleet.shapes(groups=6)
    fleet.lose("h1", at, 3 if at == "put" else 1, "dies")
    run = fleet.start(fleet.held(0))
    if at == "rename":
        wait_until(lambda: list(fleet.folder("h1").glob("inbox/*.json")), "there is something to take back")
        fleet.link("h1", "cut 0")
    wait_until(lambda: run.poll() is not None, "it dies")
    assert run.code == -signal.SIGKILL
    fleet.release()
    fleet.resume()
    fleet.check_books(n)
    assert set(fleet.starts().values()) == {1}


@pytest.mark.parametrize("grace_s", [30.0, 0.1])
def test_ctrl_c_once_lets_running_groups_end(fleet: Fleet, grace_s: float) -> None:
    """A group that takes longer than the grace time is left to its worker, and found by `resume`."""
    n = fleet.shapes(groups=12)
    run = fleet.begun(3, grace_s=grace_s)
    run.signal(signal.SIGINT)
    patient = grace_s > 1
    wait_until(lambda: ("no new work" if patient else "the workers finish these") in run.out, "it is told")
    fleet.release()
    run.ends_with(130)
    assert re.search(rf"next: \S*gemmfleet resume {fleet.paths.run} ", run.out)
    with fleet.ledger() as ledger:
        assert 0 < ledger.counts().tuned < n
        assert (ledger.state, patient and ledger.replayed.open_attempts) == ("interrupted", {} if patient else False)
    wait_until(lambda: not fleet.processes(), "no worker is left")
    fleet.resume()
    fleet.check_books(n)
    assert set(fleet.starts().values()) == {1}, "the results that the workers measured alone were found"


@pytest.mark.parametrize("how", ["interrupted", "cancelled"])
def test_ctrl_c_twice_and_cancel_stop_now(fleet: Fleet, how: str) -> None:
    n = fleet.shapes(groups=6)
    run = fleet.start(fleet.held(0))
    wait_until(fleet.at_work, "all nodes work")
    if how == "interrupted":
        run.signal(signal.SIGINT)
        wait_until(lambda: "no new work" in run.out, "it is told")
        run.signal(signal.SIGINT)
    else:
        assert "stopped 3 workers on h1, h2, h3" in fleet.cancel()
    run.ends_with(130)
    assert not fleet.processes()
    with fleet.ledger() as ledger:
        assert (ledger.state, ledger.counts().pending) == (how, n)


def test_cancel_without_a_controller_keeps_what_was_measured_and_reports_what_it_saw(fleet: Fleet) -> None:
    n = fleet.shapes(groups=24)
    run = fleet.begun(4, fleet.held(12, "resumed"))
    run.kill()
    known = sum(map(fleet.measured, fleet.nodes))
    fleet.release()
    wait_until(lambda: sum(map(fleet.measured, fleet.nodes)) >= known + 2, "the workers go on")
    measured = sum(map(fleet.measured, ("h1", "h2")))
    fleet.link("h3", "down")
    said = fleet.cancel()
    assert "no controller was driving it" in said
    assert "stopped 2 workers on h1, h2" in said
    assert "! h3: workers may be left; they end after 15 minutes without work: " in said
    with fleet.ledger() as ledger:
        assert ledger.state == "cancelled"
        assert ledger.counts().tuned >= measured, "the results that the workers measured alone were read"
    fleet.mend("h3")
    fleet.release(until="resumed")
    fleet.resume()
    fleet.check_books(n)
    assert "no worker ran on h1, h2, h3" in fleet.cancel()


def test_an_older_controller_is_shut_out_by_the_epoch(fleet: Fleet) -> None:
    """A copy of the run folder stands for another host's: it has its own lock, but the nodes are the same."""
    n = fleet.shapes(groups=18)
    first = fleet.begun(6)
    here, run = fleet.paths, fleet.paths.run
    fleet.runs = fleet.root / "other"
    shutil.copytree(here.root, fleet.runs / run, ignore=shutil.ignore_patterns("ledger.db*", "controller.lock"))
    ledger = fleet.paths.ledger
    fleet.runs = here.root.parent
    fleet.copy_ledger(ledger)
    fleet.runs = fleet.root / "other"
    second = fleet.drive()
    first.ends_with(2)
    assert f"a younger controller took run {run} over" in first.out
    before = [p.read_bytes() for p in (here.ledger, here.config)]
    fleet.release()
    second.ends_with(0)
    fleet.check_books(n)
    assert set(fleet.starts().values()) == {1}, "attempts of the first controller were found, not repeated"
    assert [p.read_bytes() for p in (here.ledger, here.config)] == before, "the first changes nothing more"


def test_a_node_is_drained_while_the_run_goes_on(fleet: Fleet) -> None:
    n = fleet.shapes(groups=18)
    run = fleet.begun(3)
    wait_until(lambda: fleet.at_work("h1"), "it works")
    leave_request(fleet.paths.requests, "drain", node="h1")
    wait_until(lambda: fleet.of("h1", ev.NodeDraining), "it drains")
    wait_until(lambda: not list(fleet.folder("h1").glob("inbox/*.json")), "its inbox is empty")
    began = len(fleet.of("h1", ev.AttemptStarted))
    fleet.finish(run, n)
    assert len(fleet.of("h1", ev.AttemptStarted)) == began, "it took nothing more"
    assert fleet.tuned_by()["h1"] >= 1


def test_a_node_is_added_while_the_run_goes_on(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet(nodes={"h1": 1, "h2": 1})
    n = fleet.shapes(groups=18)
    run = fleet.begun(3)
    fleet.nodes["h3"] = 1
    shutil.copy(fleet.inventory(), fleet.paths.inventory)
    leave_request(fleet.paths.requests, "join")
    wait_until(lambda: fleet.at_work("h3"), "it has work")
    fleet.finish(run, n)
    assert fleet.tuned_by()["h3"]
    assert "h3 joins" in run.out


def occupy(fleet: Fleet, node: str) -> Path:
    """A container of others holds the node's GPU, as its check script tells it, until the file is removed."""
    facts = fleet.root / "facts" / node
    facts.write_text("container=i|/theirs|job:1|running||||/dev/kfd,\n")
    return facts


def doings(fleet: Fleet) -> list[tuple[str, str]]:
    return [(r.node, r.doing) for r in fleet.journal(ev.NodeBusy)]


@pytest.mark.parametrize("busy", ["wait", "skip"])
def test_an_occupied_node_is_waited_for_or_left_out(fleet: Fleet, busy: str) -> None:
    facts = occupy(fleet, "h1")
    n = fleet.shapes(groups=18)
    run = fleet.begun(3, busy=busy)
    wait_until(lambda: doings(fleet) == [("h1", busy)], "it is seen")
    assert not fleet.workers("h1")
    facts.unlink()
    if busy == "wait":
        wait_until(lambda: fleet.at_work("h1"), "it has work")
    fleet.finish(run, n)
    assert bool(fleet.tuned_by()["h1"]) is (busy == "wait")
    assert doings(fleet)[1:] == ([("h1", "free")] if busy == "wait" else [])


@pytest.mark.parametrize("busy", ["wait", "share"])
def test_a_lock_that_its_worker_cannot_open_occupies_a_node(make_fleet: Callable[..., Fleet], busy: str) -> None:
    """The check saw none: it came later, or the worker is another user than the login."""
    fleet = make_fleet(nodes={"h1": 1, "h2": 1})
    for device in ("gpu-0", "cores"):
        (fleet.root / "start" / "h1" / device).mkdir(parents=True)
    n = fleet.shapes(groups=6)
    run = fleet.start(busy=busy)
    run.ends_with(0)
    fleet.check_books(n)
    assert doings(fleet) == [("h1", "share" if busy == "share" else "skip")]
    assert "start/h1/" in run.out
    assert not fleet.workers("h1")
    if busy == "share":
        assert [s["node"] for s in fleet.provenance()["shared"]] == ["h1"]
    else:
        assert not fleet.tuned_by()["h1"]


def test_a_run_that_only_waits_ends_at_once(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet(nodes={"h1": 1})
    occupy(fleet, "h1")
    n = fleet.shapes(groups=4)
    run = fleet.start()
    wait_until(lambda: doings(fleet), "it waits")
    fleet.cancel()
    run.ends_with(130)
    RunConfig.change(fleet.paths.config, busy="share")
    done = fleet.resume()
    assert "h1 was shared (--busy share)" in done.out
    fleet.check_books(n)
    assert [(s["node"], s["with"]) for s in fleet.provenance()["shared"]] == [("h1", "container theirs (job:1)")]


def test_of_two_runs_that_start_in_the_same_moment_one_waits(make_fleet: Callable[..., Fleet]) -> None:
    """Both have the same node: they never measure at the same time."""
    fleets = [make_fleet(nodes={"h1": 1}, runs=runs) for runs in ("first", "second")]
    for fleet in fleets:
        fleet.shapes(groups=4)
    runs = [fleet.start(fleet.held(0)) for fleet in fleets]
    # both may look before either starts: then the second worker waits for the device, and the node's beats say so
    wait_until(lambda: any(map(doings, fleets)) and any(f.at_work() for f in fleets), "one works, one waits")
    (late,) = [f for f in fleets if doings(f)]
    (early,) = [f for f in fleets if f is not late]
    busy = late.journal(ev.NodeBusy)[0]
    assert (busy.doing, busy.detail) == ("wait", f"workers of run {early.paths.run}")
    early.release()
    wait_until(late.at_work, "the other's turn")
    late.release()
    assert [r.wait() for r in runs] == [0, 0]
    for fleet in fleets:
        fleet.check_books(4)
    early_times, late_times = ([t for t, _ in f.journaled(ev.ShapeTuned)] for f in (early, late))
    assert early_times[-1] < late_times[0]
