"""Parts that run often: an event of the policy, a reading of a GPU, lines of a node's stream."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.figure import Figure
from orchestrator import events as ev
from tests.kits.worker import node
from tests.standins.sysfs import unfold
from tests.support.policy_rig import Rig
from tests.unit.worker.agent.test_follow import following
from tests.waiting import wait_until
from worker import conditions

NODES, SLOTS, KINDS, SHAPES = 200, 8, 1_000, 40
LINES = 300_000


def run(folder: Path) -> list[Figure]:
    """Each in this process."""
    (folder / "health").mkdir()
    (folder / "node").mkdir()
    return [_policy(), _health(folder / "health"), _stream(folder / "node")]


def _policy() -> Figure:
    """Shapes are added, nodes join, and each slot tunes its group, or faults at its last shape."""
    rig, events = Rig(), KINDS

    def work() -> None:
        nonlocal events
        for i in range(KINDS):
            shapes = range(SHAPES * i + 1, SHAPES * (i + 1) + 1)
            rig.work(*shapes, cost_s=60.0 + i % 50, kind=f"k{i}")
        for n in range(NODES):
            sent = [d for d in rig.node(f"n{n}", SLOTS) if isinstance(d, ev.Send)]
            events += SLOTS + 1
            for k, send in enumerate(sent[:SLOTS]):
                *first, last = send.shapes
                rig.tune(*first)
                if k:
                    rig.tune(last)
                else:
                    rig.fault(last)
                events += 2 * len(send.shapes) + 2

    seconds = _seconds(work)
    how = f"{NODES} nodes with {SLOTS} slots, {KINDS * SHAPES:,} shapes, one slot in eight faults"
    return Figure("policy, an event", 1e6 * seconds / events, 500.0, "us", how)


def _health(folder: Path) -> Figure:
    gauge = conditions.Gauge({"HIP_VISIBLE_DEVICES": "0"}, unfold("mi355x", folder))
    gauge.read()
    median = statistics.median(_seconds(gauge.read) for _ in range(50))
    return Figure("health, a reading", 1e3 * median, 5.0, "ms", "a made-up sysfs tree of an MI355X, median of 50")


def _stream(folder: Path) -> Figure:
    with node(folder) as n:
        lines = b"".join(b"line %07d of the tuner's log, as long as such lines are\n" % i for i in range(LINES))
        n.paths.log("0").write_bytes(lines)
        began = time.perf_counter()
        with following(n) as r:
            wait_until(lambda: len(r.data.get(("L", "0"), b"")) == len(lines), "all lines")
            rate = LINES / (time.perf_counter() - began)
    how = f"{LINES:,} lines that are there, its process's start counted"
    return Figure("follow, lines a second", rate, 100_000.0, "lines/s", how, at_least=True)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
