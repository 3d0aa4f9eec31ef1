"""A run of a hundred groups on three real nodes while drawn mishaps happen, and the laws checked afterwards."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.events import AttemptEnded, NodeJoined, NodeLost, NodeTroubled, Send, ShapeTuned
from orchestrator.paths import list_runs
from tests.integration.fleetkit import finish, journal, running, steps, write_inventory
from tests.integration.heavy import HeavyFleet, HeavyNode
from tests.integration.kit import Bench, read_csv
from tests.support.chaosplan import CONTROLLER, GROUPS, PER_GROUP, Chaos, Mishap
from tests.waiting import PATIENCE_S

WORKDIR = "/data/work"
LOST_AFTER_S = 5.0
SECONDS = 0.18


@dataclass
class Done:
    """A mishap that was injected, with the injector's own times."""

    mishap: Mishap
    began: float
    ended: float = 0.0
    undo: Callable[[], None] | None = None

    @property
    def due(self) -> float:
        """Time at which it is to be undone."""
        return self.began + (float("inf") if self.mishap.seconds is None else self.mishap.seconds)


@dataclass
class ChaosRun:
    """One run. `go` raises AssertionError where a law does not hold."""

    fleet: HeavyFleet
    bench: Bench
    chaos: Chaos
    log: list[Done] = field(default_factory=list)
    out: str = ""
    took: float = 0.0
    code: int = 0

    def go(self) -> None:
        """Run, hurt, and check."""
        began = time.monotonic()
        write_inventory(self.bench, self.fleet, more=f"  workdir: {WORKDIR}\n")
        self.total = self.bench.shapes(GROUPS, PER_GROUP)
        more = ("--lost-after", str(LOST_AFTER_S), "--db", str(self.bench.root / "db.csv"))
        args = self.bench.tune_args(self.chaos.faults, SECONDS, more)
        self._drive(self.bench.start("tune", *args), began + PATIENCE_S)
        self.took = time.monotonic() - began
        self.at_end = {d.mishap.node for d in self.log if d.undo is not None}
        for done in self.log:
            self._undo(done)
        self._check()

    # --- the run and what is done to it -----------------------------------------------------------------------------

    def _drive(self, run: Any, until: float) -> None:
        left = list(self.chaos.mishaps)
        patience = 2
        while time.monotonic() < until:
            if run.poll() is not None:
                self.out += finish(run)
                self.code = run.returncode
                if self.code != 3 or not patience or not list_runs(self.bench.runs):
                    return
                patience -= 1  # no slot was left for the moment: a person tries again
                time.sleep(1.0)
                run = self.bench.start("resume")
            for done in self.log:
                if time.time() >= done.due:
                    self._undo(done)
            if left and self.bench.tuned() >= left[0].at * self.total and run.poll() is None:
                mishap = left.pop(0)
                if mishap.kind == CONTROLLER:
                    run = self._kill(run, mishap)
                else:
                    self._inject(mishap)
            time.sleep(0.1)
        run.kill()
        raise AssertionError(f"not over after {PATIENCE_S:.0f} s: {finish(run)[-2000:]}")

    def _kill(self, run: Any, mishap: Mishap) -> Any:
        done = Done(mishap, time.time())
        run.kill()
        run.wait()
        time.sleep(mishap.seconds or 0.0)
        done.ended = time.time()
        self.log.append(done)
        return self.bench.start("resume")

    def _node(self, name: str) -> HeavyNode:
        return next(n for n in self.fleet.nodes if n.name == name)

    def _inject(self, mishap: Mishap) -> None:
        node = self._node(mishap.node)
        if any(d.undo is not None and d.mishap.node == mishap.node for d in self.log):
            return  # what is down cannot be hurt
        act, undo = {
            "cut": (node.drop_connections, None),
            "kill_worker": (lambda: kill_workers(node), None),
            "restart_dockerd": (node.restart_dockerd, None),
            "no_sshd": (node.stop_sshd, node.start_sshd),
            "partition": (node.partition, node.heal),
            "pause": (node.pause, node.unpause),
            "power": (node.kill, node.revive),
            "full_disk": (node.fill_disk, node.free_disk),
        }[mishap.kind]
        done = Done(mishap, time.time(), undo=undo)
        self.log.append(done)
        act()
        if undo is None:
            done.ended = time.time()

    def _undo(self, done: Done) -> None:
        if done.undo is not None:
            undo, done.undo = done.undo, None
            undo()
            done.ended = time.time()

    # --- the laws ---------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        bench, chaos = self.bench, self.chaos
        bench.check_books()
        with bench.ledger() as ledger:
            shapes = {"x".join(str(v) for v in s.key[:3]): s for s in ledger.shapes()}
            failed = {"x".join(str(v) for v in f.key[:3]): f for f in ledger.failed()}
        names = {s.id: name for name, s in shapes.items()}
        assert len(shapes) == self.total
        assert self.code == (1 if failed else 0), self.out[-2000:]
        innocent = {k: (f.reason, f.detail) for k, f in failed.items() if k not in chaos.guilty}
        if chaos.sick:  # where nothing but a slot is left that hides its sickness, "unconfirmed" is the truth
            innocent = {k: v for k, v in innocent.items() if failed[k].confirmed}
        assert not innocent, f"innocent shapes failed: {innocent}"
        assert {k: failed[k].reason for k in chaos.guilty if k in failed} == chaos.guilty
        for name in failed:
            (story,) = bench.run("explain", name, "--json").json()["stories"]
            assert story["now"].startswith(f"failed ({failed[name].reason}")
        rows = read_csv(bench.root / "db.csv")
        assert len({(r["M"], r["N"], r["K"]) for r in rows}) == len(rows) == self.total - len(failed)
        self._check_measured({s.id for s in shapes.values() if s.state == "tuned"}, names)
        self._check_told(names)
        left = {x.partition(":")[0] for x in running(self.fleet, bench)}
        assert left <= self.at_end | self._gone(), f"workers run on {left}; {self.out[-1500:]}"

    def _gone(self) -> set[str]:
        """Nodes of which the last word is that they are given up or do not answer."""
        last: dict[str, Any] = {}
        for _, r in [*journal(self.bench, NodeLost), *journal(self.bench, NodeTroubled)]:
            last.setdefault(r.node, None)
        with self.bench.ledger() as ledger:
            for _, r in ledger.journal_records():
                if isinstance(r, NodeJoined | NodeLost | NodeTroubled):
                    last[r.node] = r
        return {n for n, r in last.items() if not isinstance(r, NodeJoined)}

    def _check_measured(self, tuned: set[int], names: dict[int, str]) -> None:
        """Check that what any node measured counts, and that without a loss nothing is measured twice."""
        seen: dict[int, int] = {}
        for node in self.fleet.nodes:
            node.wait_ready()
            events = f"{WORKDIR}/{self.bench.paths.run}/{node.name}/events/*.jsonl"
            text = node.sh(f"cat {events} 2>/dev/null | grep shape_tuned || true")
            for line in text.splitlines():
                record = json.loads(line)
                seen[record["shape"]] = seen.get(record["shape"], 0) + 1
        lost = {names[s] for s in seen.keys() - tuned} - self.chaos.guilty.keys()
        assert not lost, f"measured, yet not tuned: {lost}"
        settled = [r.shape for _, r in journal(self.bench, ShapeTuned)]
        assert len(set(settled)) == len(tuned)
        if not journal(self.bench, NodeLost):
            twice = {names[s]: n for s, n in seen.items() if n > 1}
            assert not twice, f"measured twice without a loss: {twice}"

    def _check_told(self, names: dict[int, str]) -> None:
        """No node is given up, and no worker dead, that was not hurt before; faults are those that were made."""
        sent = {r.attempt: r.node for _, r in journal(self.bench, Send)}
        kills = any(f["kind"] == "kill_worker" for f in self.chaos.faults)
        for node in self.fleet.nodes:
            done = [d for d in self.log if d.mishap.node in (node.name, "")]
            for s in steps(self.bench, node.name, "away"):
                assert any(d.began <= s["t"] for d in done), (s, done)
        guilty = set(self.chaos.guilty)
        flaky = {f"{f['match']['M']}x{f['match']['N']}x64" for f in self.chaos.faults if "M" in f["match"]}
        for t, r in journal(self.bench, AttemptEnded):
            name = names.get(r.in_flight or 0, "?")
            if r.outcome.value in ("fault", "error", "oom") and name != "?":
                assert name in guilty | flaky or sent[r.attempt] == self.chaos.sick, (name, r)
            if r.outcome.value == "worker_died" and not kills:
                done = [d for d in self.log if d.mishap.node == sent[r.attempt]]
                assert any(d.began <= t for d in done), (r, done)


def kill_workers(node: HeavyNode) -> None:
    """Kill the workers' containers that run on the node."""
    for name in node.containers("label=gemmfleet.slot", "status=running"):
        node.exec(["sh", "-c", f"kill -9 \"$(docker inspect -f '{{{{.State.Pid}}}}' {name})\""])


def run_seed(fleet: HeavyFleet, folder: Path, chaos: Chaos) -> ChaosRun:
    """One seed in a folder of its own."""
    bench = Bench(folder)
    try:
        run = ChaosRun(fleet, bench, chaos)
        run.go()
    finally:
        bench.close()
    return run
