"""Drawn mixtures of mishaps: the laws hold whatever happens together. A hundred more: `make soak`.

One node always comes back at once, and there is a way to tune every innocent shape.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from orchestrator import events as ev
from tests.fleet.kit import Controller, Fleet
from tests.fleet.server import ask
from tests.kits.fleet import records
from tests.support.marks import full_but

GROUPS, PER_GROUP = 40, 2
SHORT = ("cut", "kill_worker", "lose")
"""Mishaps that last no longer than it takes to do them."""
LONG = ("down", "stalled", "pause", "power", "full_disk")
CONTROLLER = "controller"
REASONS = {
    "abort": "fault", "exit": "fault", "error": "error", "oom": "oom", "no_candidate": "no_candidate",
    "wrong": "wrong_result", "kill_worker": "kills_nodes",
}  # fmt: skip
"""The faulty tuner's faults, and the reason that a shape fails with."""


@dataclass(frozen=True, slots=True)
class Mishap:
    """A mishap at the moment when the share `at` of all shapes is settled. `seconds` None: it lasts for ever."""

    at: float
    kind: str
    node: str = ""
    seconds: float | None = 0.0


class Chaos:
    """All that goes wrong; the same seed always draws the same.

    `guilty`: shapes (MxNxK) that fail by right, with their reasons. `sick`: a node whose slot faults a few times
    although its canary passes.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        nodes = ["h1", "h2", "h3"]
        others = rng.sample(nodes, 2)
        self.mishaps = [Mishap(rng.uniform(0.05, 0.8), rng.choice(SHORT), rng.choice(nodes)) for _ in range(2)]
        for node in others[: rng.randint(1, 2)]:  # one long mishap at a time, and so at most one
            kind, seconds = rng.choice(LONG), rng.uniform(0.3, 1.8)
            for_good = kind == "power" and rng.random() < 0.3
            self.mishaps.append(Mishap(rng.uniform(0.05, 0.6), kind, node, None if for_good else seconds))
        if rng.random() < 0.5:
            self.mishaps.append(Mishap(rng.uniform(0.1, 0.7), CONTROLLER, seconds=rng.uniform(0.1, 0.6)))
        self.mishaps.sort(key=lambda x: x.at)
        shapes = [(m + 1, 16 * (g + 1)) for g in range(GROUPS) for m in range(PER_GROUP)]
        rng.shuffle(shapes)
        kinds = [rng.choice([k for k in REASONS if k != "kill_worker"]) for _ in range(rng.randint(0, 3))]
        kinds += ["kill_worker"] if rng.random() < 0.3 else []
        chosen = [(kind, *shapes.pop()) for kind in kinds]
        self.guilty = {f"{m}x{n}x64": REASONS[kind] for kind, m, n in chosen}
        self.faults: list[dict[str, Any]] = [
            {"kind": kind, "match": {"M": str(m), "N": str(n)}} for kind, m, n in chosen
        ]
        if rng.random() < 0.5:  # an intermittent one: innocent, and tuned in the end
            m, n = shapes.pop()
            match = {"M": str(m), "N": str(n), "node": rng.choice(nodes)}
            self.faults.append({"kind": "abort", "match": match, "times": 1})
        self.sick = others[0] if rng.random() < 0.2 else ""
        if self.sick:
            self.faults.append({"kind": "abort", "match": {"node": self.sick}, "times": 4})
        elif rng.random() < 0.3:
            self.faults.append({"kind": "sick_canary", "match": {"node": others[1]}, "times": rng.randint(1, 2)})


@pytest.mark.parametrize(
    "seed", [*full_but(range(1, 16), 1, 2, 3), *(pytest.param(s, marks=pytest.mark.soak) for s in range(100, 200))]
)
def test_the_laws_hold(fleet: Fleet, seed: int) -> None:
    chaos = Chaos(seed)
    print(vars(chaos))
    n = fleet.shapes(GROUPS, PER_GROUP)
    run = Run(fleet, chaos, n)
    run.go()
    failed = fleet.failed()
    assert run.controller.code == (1 if failed else 0)
    with fleet.ledger() as ledger:
        sure = {"x".join(str(v) for v in f.key[:3]) for f in ledger.failed() if f.confirmed}
    innocent = {k: v for k, v in failed.items() if k not in chaos.guilty and (k in sure or not chaos.sick)}
    assert not innocent, "innocent shapes failed"
    assert {k: failed[k] for k in chaos.guilty if k in failed} == chaos.guilty
    fleet.check_books(n - len(failed), failed)
    lost = {r.node for r in fleet.journal(ev.NodeLost)}
    assert lost <= {m.node for m in chaos.mishaps}, "no node is given up that was not hurt"
    if not lost:
        with fleet.ledger() as ledger:
            innocent_ids = {i for i, key in ledger.keys.items() if "x".join(map(str, key[:3])) not in chaos.guilty}
        ended = Counter(r.in_flight for r in fleet.journal(ev.AttemptEnded) if r.outcome.value != "done")
        copied = sent_to_two(fleet)
        again = {s: k for s, k in fleet.starts().items() if s in innocent_ids - copied and k > 1 + ended[s]}
        assert not again, "without a loss only shapes in flight are repeated"


def sent_to_two(fleet: Fleet) -> set[int]:
    """Shapes that an idle slot got while another still had them, as happens at the end of a run."""
    running: dict[str, set[int]] = {}
    copied: set[int] = set()
    with fleet.ledger() as ledger:
        journal = records(ledger)
    for _, record in journal:
        if isinstance(record, ev.Send):
            copied |= set(record.shapes) & set().union(*running.values())
            running[record.attempt] = set(record.shapes)
        elif isinstance(record, ev.AttemptEnded) or (isinstance(record, ev.AttemptTaken) and record.won):
            running.pop(record.attempt, None)
    return copied


class Run:
    """A run while things happen to it."""

    def __init__(self, fleet: Fleet, chaos: Chaos, total: int) -> None:
        self.fleet, self.left, self.total = fleet, list(chaos.mishaps), total
        self.controller: Controller = fleet.start(*chaos.faults, seconds=0.02, lost_after_s=0.5)
        self.undo: dict[str, tuple[float, Callable[[], None]]] = {}

    def go(self) -> None:
        patience = 60  # on a busy machine all nodes are lost many times in half a second each
        while True:
            if self.controller.poll() is not None:
                if self.controller.code != 3 or not patience:
                    break
                patience -= 1  # no slot was left for the moment: a person tries again
                self.controller = self.fleet.drive()
            for node, (due, mend) in list(self.undo.items()):
                if time.monotonic() >= due:
                    del self.undo[node]
                    mend()
            if self.left and self.fleet.tuned() >= self.left[0].at * self.total:
                self.inject(self.left.pop(0))
            time.sleep(0.02)
        self.controller.wait()
        for _, mend in self.undo.values():
            mend()
        for node in self.fleet.nodes:  # a person would stop what a lost node still does
            ask(self.fleet.server, "end", below=str(self.fleet.folder(node)))

    def inject(self, mishap: Mishap) -> None:
        fleet, node, kind = self.fleet, mishap.node, mishap.kind
        if kind == CONTROLLER:
            self.controller.kill()
            time.sleep(mishap.seconds or 0.0)
            self.controller = fleet.drive()
        if kind == CONTROLLER or node in self.undo:
            return  # what is down cannot be hurt
        undo = partial(fleet.mend, node)
        if kind in ("kill_worker", "power"):
            fleet.kill_workers(node)
        if kind == "cut":
            fleet.link(node, "cut 30")
        elif kind == "lose":
            fleet.lose(node, "put", 1)
        elif kind in ("down", "stalled", "power"):
            fleet.link(node, "stalled" if kind == "stalled" else "down")
        elif kind in ("pause", "full_disk"):
            pids = list(fleet.workers(node).values())
            size = fleet.events(node).stat().st_size if kind == "full_disk" and pids else resource.RLIM_INFINITY
            for pid in pids:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
                if kind == "pause":
                    os.kill(pid, signal.SIGSTOP)
            undo = partial(heal, pids)
        if kind not in SHORT and mishap.seconds is not None:
            self.undo[node] = (time.monotonic() + mishap.seconds, undo)


def heal(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            os.kill(pid, signal.SIGCONT)
