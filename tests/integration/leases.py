"""Kit of runs on leases: a bench whose inventory is one pool, the books, and work that waits until it is released."""

from __future__ import annotations

import contextlib
import json
import subprocess

from orchestrator.events import LeaseEnded, NodeExpected, Record
from orchestrator.paths import list_runs
from tests.integration.kit import Bench
from tests.waiting import wait_until


class LeaseBench:
    """A bench whose inventory is one pool of leases, whose folders are on this machine."""

    def __init__(self, bench: Bench, **options: str) -> None:
        """`options`: of the pool, as YAML."""
        self.bench, self._options = bench, options
        self.hosts = ""
        """Section `hosts:` of the inventory."""
        self.inventory()

    def inventory(self, **options: str) -> None:
        """Write the inventory; `options` win over those of the pool."""
        values = {"workdir": str(self.bench.workdir), "gpus": "2", "time": "10m", **self._options, **options}
        lines = "".join(f"    {name}: {value}\n" for name, value in values.items())
        self.bench.inventory.write_text(
            f"defaults: {{family: a16w16, tuner: replay}}\n{self.hosts}nodes:\n  pool:\n{lines}"
        )

    def over(self, run: subprocess.Popen[str]) -> bool:
        """Let every held group go on, on leases that come later, too; return whether the run is over."""
        with contextlib.suppress(OSError):  # folders come and go
            self.bench.release()
        return run.poll() is not None

    def at_work(self) -> subprocess.Popen[str]:
        """A run of six one-shape groups with two of them tuned; the others wait until `over`."""
        self.bench.shapes(groups=6)
        run = self.bench.start("tune", *self.bench.tune_args([self.bench.held(2, 6)]))
        wait_until(lambda: self.bench.tuned() >= 2, "a lease works")
        return run

    def finish(self, run: subprocess.Popen[str]) -> None:
        """Wait until the run is over; every shape of the list is tuned, and the books are right."""
        wait_until(lambda: self.over(run), "the run is over")
        assert run.returncode == 0
        self.bench.check_books(tuned=self.listed, failed={})

    @property
    def listed(self) -> int:
        """Shapes of the list."""
        return len(self.bench.shapes_csv.read_text().splitlines()) - 1

    def rows(self) -> int:
        """Shapes with a row in the leases' own folders."""
        found: set[str] = set()
        for events in self.bench.workdir.glob("leases/*/*/events/*.jsonl"):
            records = map(json.loads, events.read_text().splitlines())
            found |= {str(r["shape"]) for r in records if r.get("type") == "shape_tuned"}
        return len(found)

    def records(self, *kinds: type[Record]) -> list[Record]:
        if not list_runs(self.bench.runs):
            return []
        with self.bench.ledger() as ledger:
            return [r for _, r in ledger.journal_records() if isinstance(r, kinds)]

    def expected(self) -> list[NodeExpected]:
        """The leases that became nodes."""
        return [r for r in self.records(NodeExpected) if isinstance(r, NodeExpected)]

    def ends(self) -> list[LeaseEnded]:
        return [r for r in self.records(LeaseEnded) if isinstance(r, LeaseEnded)]
