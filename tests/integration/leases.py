"""Runs on leases: a bench with one pool, work that waits until it is let go, a log of faults, and the books."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from abc import ABC, abstractmethod
from collections import Counter

from orchestrator.events import FailShape, LeaseEnded, NodeExpected, ShapeTuned
from tests.kits.fleet import Bench
from tests.waiting import wait_until


class LeaseBench(ABC):
    """A bench whose inventory is one pool of leases, whose folders are on this machine."""

    def __init__(self, bench: Bench, **options: str) -> None:
        """`options`: of the pool, as YAML."""
        self.bench, self._options = bench, options
        self.faults: list[tuple[float, str, str]] = []
        """Log of the faults that were done: when, to which lease, and the cause of its end that this is."""
        self._printed = ""
        self.inventory()

    def inventory(self, **options: str) -> None:
        """Write the inventory; `options` win over those of the pool."""
        values = {"workdir": str(self.bench.workdir), "gpus": "2", "time": "10m", **self._options, **options}
        lines = "".join(f"    {name}: {value}\n" for name, value in values.items())
        self.bench.inventory.write_text(f"defaults: {{family: a16w16, tuner: replay}}\nnodes:\n  pool:\n{lines}")

    @abstractmethod
    def left(self) -> list[str]:
        """Leases that the scheduler still has."""

    def at_work(self) -> subprocess.Popen[str]:
        """A run of six groups with a shape each, of which two are tuned. The others wait for `over`."""
        self.bench.shapes(groups=6)
        run = self.bench.start("tune", *self.bench.tune_args([self.bench.held(2)]))
        wait_until(lambda: self.bench.tuned() >= 2 or run.poll() is not None, "two shapes are tuned")
        assert run.poll() is None, self.printed(run)
        return run

    def printed(self, run: subprocess.Popen[str]) -> str:
        """Everything that a run has printed so far."""
        assert run.stdout is not None
        os.set_blocking(run.stdout.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while more := os.read(run.stdout.fileno(), 1 << 16):
                self._printed += more.decode("utf-8", "replace")
        return self._printed

    def fault(self, lease: str, cause: str) -> None:
        """Log a fault that is about to be done."""
        self.faults.append((time.time(), lease, cause))

    def finish(self, run: subprocess.Popen[str]) -> None:
        """Wait until the run ends, and check its books."""
        wait_until(lambda: self.over(run), "the run is over")
        assert run.returncode == 0, self.printed(run)
        self.check()

    def check(self) -> None:
        """No shape is lost, none was measured twice for nothing, no innocent one charged, nothing is left in the queue,
        and `explain` agrees with the log of faults."""
        self.bench.check_books(self.bench.groups)
        measured = Counter(r.shape for r in self.bench.journal(ShapeTuned))
        assert set(measured.values()) == {1}
        assert not self.bench.journal(FailShape), "nobody is suspected"
        wait_until(lambda: not self.left(), "nothing is left in the queue")
        self.check_explained()

    def check_explained(self) -> None:
        """`explain` names exactly the ends of leases that were injected, each after its fault."""
        stories = [s for s in self.bench.run("explain", "--json").json()["stories"] if s["kind"] == "node"]
        of = {e.node: e.lease for e in self.expected()}
        assert all(f"lease {of[s['subject']]} on " in s["now"] for s in stories), stories
        steps = [(of[s["subject"]], step) for s in stories for step in s["steps"]]
        ended = {lease: step for lease, step in steps if step["kind"] == "ended"}
        assert ended.keys() == {lease for _, lease, _ in self.faults}
        for t, lease, cause in self.faults:
            assert ended[lease]["t"] >= t
            words = "cancelled or preempted" if cause == "preempted" else cause.replace("_", " ")
            assert f"({words}" in ended[lease]["text"]

    def over(self, run: subprocess.Popen[str]) -> bool:
        """Let every held group go on, on leases that come later, too; return whether the run is over."""
        self.printed(run)  # a run whose output nobody reads would stop in the end
        with contextlib.suppress(OSError):  # folders come and go
            self.bench.release()
        return run.poll() is not None

    def expected(self) -> list[NodeExpected]:
        """The leases that became nodes."""
        return self.bench.journal(NodeExpected)

    def ends(self) -> list[LeaseEnded]:
        return self.bench.journal(LeaseEnded)
