"""Drawn mixtures of mishaps: the laws hold whatever happens together. A hundred more: `make soak`."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable

import pytest

from orchestrator import events as ev
from tests.fleet.kit import Controller, Fleet
from tests.fleet.server import ask
from tests.support.chaosplan import CONTROLLER, PER_GROUP, Chaos, Mishap, draw
from tests.support.marks import full_but

SEEDS = range(1, 16)
GROUPS = 40
PACE = 0.15
"""Of the drawn seconds, which are those of real nodes."""


@pytest.mark.parametrize(
    "seed", [*full_but(SEEDS, 1, 2, 3), *(pytest.param(s, marks=pytest.mark.soak) for s in range(100, 200))]
)
def test_the_laws_hold(fleet: Fleet, seed: int) -> None:
    chaos = draw(seed, groups=GROUPS)
    print(chaos)
    n = fleet.shapes(GROUPS, PER_GROUP)
    run = Run(fleet, chaos, n)
    run.go()
    failed = fleet.failed()
    with fleet.ledger() as ledger:
        sure = {"x".join(str(v) for v in f.key[:3]) for f in ledger.failed() if f.confirmed}
    innocent = {k: v for k, v in failed.items() if k not in chaos.guilty and (k in sure or not chaos.sick)}
    assert not innocent, "innocent shapes failed"
    assert {k: failed[k] for k in chaos.guilty if k in failed} == chaos.guilty
    fleet.check_books(n - len(failed), failed)
    assert run.controller.code == (1 if failed else 0)
    lost = {r.node for r in fleet.journal(ev.NodeLost)}
    assert lost <= {m.node for m in chaos.mishaps}, "no node is given up that was not hurt"
    if not lost:
        with fleet.ledger() as ledger:
            innocent_ids = {i for i, key in ledger.keys.items() if "x".join(map(str, key[:3])) not in chaos.guilty}
        ended = Counter(r.in_flight for r in fleet.journal(ev.AttemptEnded) if r.outcome.value != "done")
        again = {s: k for s, k in fleet.starts().items() if s in innocent_ids and k > 1 + ended[s]}
        assert not again, "without a loss only what was in flight is repeated"


class Run:
    """A run while things happen to it."""

    def __init__(self, fleet: Fleet, chaos: Chaos, total: int) -> None:
        self.fleet, self.left, self.total = fleet, list(chaos.mishaps), total
        self.controller: Controller = fleet.start(*chaos.faults, seconds=0.02, lost_after_s=0.5)
        self.undo: dict[str, tuple[float, Callable[[], None]]] = {}

    def go(self) -> None:
        patience = 5
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
        fleet, node = self.fleet, mishap.node
        if mishap.kind == CONTROLLER:
            self.controller.kill()
            time.sleep((mishap.seconds or 0.0) * PACE)
            self.controller = fleet.drive()
            return
        if node in self.undo:
            return  # what is down cannot be hurt
        undo: Callable[[], None] | None = None
        if mishap.kind == "cut":
            fleet.link(node, "cut 30")
        elif mishap.kind == "kill_worker":
            fleet.kill_workers(node)
        elif mishap.kind == "restart_dockerd":
            fleet.lose(node, "put", 1)
        elif mishap.kind in ("no_sshd", "partition", "power"):
            fleet.link(node, "stalled" if mishap.kind == "partition" else "down")
            if mishap.kind == "power":
                fleet.kill_workers(node)
            undo = lambda: fleet.mend(node)  # noqa: E731
        else:
            pids = list(fleet.workers(node).values())
            self.hurt(pids, mishap.kind, node)
            undo = lambda: self.heal(pids)  # noqa: E731
        if undo is not None and mishap.seconds is not None:
            self.undo[node] = (time.monotonic() + mishap.seconds * PACE, undo)

    def hurt(self, pids: list[int], kind: str, node: str) -> None:
        for pid in pids:
            if kind == "pause":
                os.kill(pid, signal.SIGSTOP)
            else:
                size = self.fleet.events(node).stat().st_size
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def heal(self, pids: list[int]) -> None:
        for pid in pids:
            try:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass
