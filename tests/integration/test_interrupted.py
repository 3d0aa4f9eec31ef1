"""Controllers that die, are interrupted, cancelled, or meet another one."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter

import pytest

from orchestrator.dispatch.control import holder
from orchestrator.dispatch.node import SILENCE_S
from orchestrator.events import AttemptStarted, NodeJoined, NodeTroubled, ShapeStarted
from tests.integration.kit import Bench
from tests.waiting import PATIENCE_S, wait_until


def measured_twice(bench: Bench) -> dict[int, int]:
    """Shapes that were begun more than once, with how often."""
    with bench.ledger() as ledger:
        starts = Counter(r.shape for _, r in ledger.journal_records() if isinstance(r, ShapeStarted))
    return {s: n for s, n in starts.items() if n > 1}


def kill_controller_at(bench: Bench, seconds: float, *, working: bool = False) -> None:
    """Kill a `resume` so many seconds after its start, or after it has connected to the node."""
    joined = joins(bench)
    run = bench.start("resume")
    if working:
        wait_until(lambda: joins(bench) > joined or run.poll() is not None, "the controller works")
    time.sleep(seconds)
    run.kill()
    run.wait()


def joins(bench: Bench) -> int:
    with bench.ledger() as ledger:
        return sum(isinstance(r, NodeJoined) for _, r in ledger.journal_records())


def test_killed_at_random_points_and_resumed(bench: Bench) -> None:
    """The controller dies every few tenths of a second, at points drawn from a seed, until the run is done."""
    n = bench.shapes(groups=12, per_group=3)
    draw = random.Random(1)
    args = bench.tune_args(seconds=0.02)
    run = bench.start("tune", *args)
    wait_until(lambda: list(bench.runs.glob("*/run.yaml")), "there is a run")
    time.sleep(0.4)
    run.kill()
    run.wait()

    for _ in range(4):
        kill_controller_at(bench, draw.uniform(0.05, 1.2))
    done = bench.run("resume")
    assert done.code == 0, done.out + done.err
    bench.check_books(tuned=n, failed={})
    assert measured_twice(bench) == {}, "workers outlive their controller: nothing is measured again"


@pytest.mark.full
def test_killed_at_fifty_random_points(bench: Bench) -> None:
    """The books are checked after each of fifty kills; poison and a killer of workers are among the shapes."""
    n = bench.shapes(groups=60, per_group=3)
    faults = [
        {"kind": "abort", "match": {"N": "64", "M": "2"}},
        {"kind": "kill_worker", "match": {"N": "128", "M": "1"}},
        bench.held(40, 60, str(bench.root / "go")),
    ]
    draw = random.Random(20261121)
    run = bench.start("tune", *bench.tune_args(faults=faults, seconds=0.6))
    wait_until(lambda: list(bench.runs.glob("*/run.yaml")), "there is a run")
    run.kill()
    run.wait()
    from orchestrator.ledger.reader import reconcile

    settled = 0
    for kill in range(50):
        working = kill % 2 == 1
        kill_controller_at(bench, draw.uniform(0.02, 0.6 if working else 1.5), working=working)
        with bench.ledger() as ledger:
            assert reconcile(ledger) == [], f"after kill {kill}"
            now = ledger.counts().settled
        assert now >= settled, "what was settled stays settled"
        settled = now
        assert settled < n, "the kills fall into a run that goes on"
    assert settled, "some kills fall into work"
    (bench.root / "go").touch()
    done = bench.run("resume")
    assert done.code == 1, done.out + done.err
    bench.check_books(tuned=n - 2, failed={"2x64x64": "fault", "1x128x64": "kills_nodes"})


def test_ctrl_c_once_lets_running_groups_end(bench: Bench) -> None:
    n = bench.shapes(groups=8)
    run = bench.start("tune", *bench.tune_args([bench.held(2, 8)], seconds=0.1))
    wait_until(lambda: bench.tuned() == 2 and len(bench.children()) == 2, "the others are held")
    run.send_signal(signal.SIGINT)
    assert run.stdout is not None
    out = ""
    while "no new work" not in out:
        out += run.stdout.readline()
    bench.release()
    rest, _ = run.communicate(timeout=PATIENCE_S)
    out += rest
    assert run.returncode == 130, out
    assert re.search(rf"next: \S*gemmfleet resume {bench.paths.run} ", out)
    with bench.ledger() as ledger:
        counts = ledger.counts()
        assert 0 < counts.tuned < n
        assert ledger.state == "interrupted"
        assert not ledger.attempts(open_only=True)
    wait_until(lambda: not bench.processes(), "no worker is left")
    done = bench.run("resume")
    assert done.code == 0, done.out + done.err
    bench.check_books(tuned=n)
    assert measured_twice(bench) == {}


@pytest.mark.full
def test_ctrl_c_leaves_a_long_group_to_its_worker(bench: Bench) -> None:
    n = bench.shapes(groups=2)
    run = bench.start("tune", *bench.tune_args([bench.held(0, 2)], more=["--grace", "0.5"]))
    wait_until(lambda: len(bench.agents()) == 2 and _started(bench) == 2, "both groups run")
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 130, out
    assert "left to the workers" in out
    bench.release()
    wait_until(lambda: not bench.processes(), "the workers end by themselves")
    done = bench.run("resume")
    assert done.code == 0, done.out + done.err
    bench.check_books(tuned=n)
    assert measured_twice(bench) == {}, "what the workers measured alone was found"


def _started(bench: Bench) -> int:
    with bench.ledger() as ledger:
        return sum(isinstance(r, AttemptStarted) for _, r in ledger.journal_records())


def test_ctrl_c_twice_stops_now(bench: Bench) -> None:
    bench.shapes(groups=4)
    run = bench.start("tune", *bench.tune_args(seconds=30.0))
    wait_until(lambda: len(bench.agents()) == 2 and _started(bench) == 2, "both groups run")
    run.send_signal(signal.SIGINT)
    assert run.stdout is not None
    said = ""
    while "no new work" not in said:
        said += run.stdout.readline()
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 130, said + out
    assert not bench.processes()
    with bench.ledger() as ledger:
        assert ledger.counts().pending == 4


def test_cancel_of_a_living_run(bench: Bench) -> None:
    bench.shapes(groups=4)
    run = bench.start("tune", *bench.tune_args(seconds=30.0))
    wait_until(lambda: len(bench.agents()) == 2 and _started(bench) == 2, "both groups run")
    assert bench.run("status", "--json").json()["state"] == "running"
    done = bench.run("cancel")
    assert done.code == 0, done.out + done.err
    assert "cancelled" in done.out
    out, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 130, out
    assert not bench.processes()
    assert bench.run("status", "--json").json()["state"] == "cancelled"


@pytest.mark.full
def test_cancel_of_a_run_whose_controller_died_keeps_what_was_measured(bench: Bench) -> None:
    n = bench.shapes(groups=24)
    run = bench.start("tune", *bench.tune_args([bench.held(6, 12), bench.held(12, 24, until="resumed")]))
    wait_until(lambda: bench.tuned() >= 1, "a shape is tuned")
    run.kill()
    run.wait()
    assert bench.run("status", "--json").json()["state"] == "interrupted"
    known, files = bench.tuned(), list((bench.node() / "events").glob("*.jsonl"))
    bench.release()
    wait_until(lambda: sum(f.read_bytes().count(b'"shape_tuned"') for f in files) >= known + 2, "the workers go on")
    done = bench.run("cancel")
    assert done.code == 0, done.out + done.err
    assert not bench.processes()
    with bench.ledger() as ledger:
        assert ledger.state == "cancelled"
        assert ledger.counts().tuned >= known + 2, "what the workers measured alone was read"
    bench.release("resumed")
    done = bench.run("resume")
    assert done.code == 0
    bench.check_books(tuned=n)


def test_a_second_controller_on_this_machine_is_refused(bench: Bench) -> None:
    bench.shapes(groups=4)
    run = bench.start("tune", *bench.tune_args([bench.held(1, 4)]))
    wait_until(lambda: list(bench.runs.glob("*/run.yaml")) and holder(bench.paths.lock), "the run is driven")
    second = bench.run("resume")
    assert second.code == 2
    assert f"run {bench.paths.run} is driven by process {run.pid}" in second.err
    run.kill()


@pytest.mark.full
def test_an_older_controller_is_shut_out_by_the_epoch(bench: Bench) -> None:
    """A copy of the run folder stands for another host's: it has its own lock, but the nodes are the same."""
    n = bench.shapes(groups=24)
    first = bench.start("tune", *bench.tune_args([bench.held(2, 24)]))
    wait_until(lambda: bench.tuned() >= 1, "a shape is tuned")
    os.kill(first.pid, signal.SIGSTOP)
    other = bench.root / "other"
    shutil.copytree(bench.runs, other)
    os.kill(first.pid, signal.SIGCONT)
    here = bench.runs
    bench.runs = other
    second = bench.start("resume")
    out, _ = first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 2, out
    assert "a younger controller took run" in out
    bench.release()
    rest, _ = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 0, rest
    bench.check_books(tuned=n, failed={})
    bench.runs = here


@pytest.mark.full
def test_a_torn_line_in_the_events_is_left_out(bench: Bench) -> None:
    n = bench.shapes(groups=12)
    run = bench.start("tune", *bench.tune_args([bench.held(2, 12)]))
    wait_until(lambda: bench.tuned() >= 1, "a shape is tuned")
    run.kill()
    run.wait()
    for pid in bench.agents().values():
        os.kill(pid, signal.SIGKILL)
    bench.release()
    for path in (bench.node() / "events").glob("*.jsonl"):
        with path.open("ab") as f:
            f.write(b'{"type":"shape_tuned","t":1,"attempt":"g0001-1","sha')
    done = bench.run("resume")
    assert done.code == 0, done.out + done.err
    bench.check_books(tuned=n, failed={})
    with bench.ledger() as ledger:
        assert sum(o.bad for o in ledger.streams()) >= 1


@pytest.mark.full
def test_a_node_that_left_the_inventory_holds_up_nothing(bench: Bench) -> None:
    n = bench.shapes(groups=8)
    run = bench.start("tune", *bench.tune_args([bench.held(2, 8)]))
    wait_until(lambda: bench.tuned() >= 1, "a shape is tuned")
    run.kill()
    run.wait()
    for pid in bench.processes():
        os.kill(pid, signal.SIGKILL)
    other = bench.root / "other.yaml"
    other.write_text(bench.inventory.read_text().replace("here:", "there:"))
    again = bench.start("resume", "-i", str(other))
    wait_until((bench.workdir / bench.paths.run / "there" / "node.json").exists, "the other node is prepared")
    bench.release()
    out, _ = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0, out
    bench.check_books(tuned=n, failed={})
    assert "no longer in the inventory" in bench.run("explain", "here").out


@pytest.mark.full
def test_a_stream_that_is_slow_to_begin_is_waited_for(bench: Bench) -> None:
    """Longer than a stream may be silent: on a busy node a container for it takes that long to start."""
    slow = bench.root / "python"
    slow.write_text(
        f'#!/bin/sh\ncase " $* " in *" follow "*) sleep {SILENCE_S + 2} ;; esac\nexec {sys.executable} "$@"\n'
    )
    slow.chmod(0o700)
    bench.inventory.write_text(
        "defaults: {family: a16w16, tuner: replay}\n"
        f"nodes: {{here: {{gpus: [0], workdir: {bench.workdir}, python: {slow}}}}}\n"
    )
    n = bench.shapes(groups=2)
    done = bench.tune()
    assert done.code == 0, done.out + done.err
    bench.check_books(tuned=n, failed={})
    with bench.ledger() as ledger:
        assert not [r for _, r in ledger.journal_records() if isinstance(r, NodeTroubled)]
