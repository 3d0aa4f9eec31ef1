"""A folder with shapes and runs: what a run has done so far, and the books at its end."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from orchestrator import events as ev
from orchestrator.ledger.reader import LedgerReader, reconcile
from orchestrator.paths import RunPaths, list_runs
from tests.support.processes import kill_in, working_in
from tests.waiting import wait_until

R = TypeVar("R", bound=ev.Record)


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV, by column name."""
    with path.open(newline="") as f:
        return list(csv.DictReader(f))


def records(ledger: LedgerReader) -> list[tuple[float, ev.Record]]:
    """(time, record) of the journal in order: what resume replays."""
    return [(t, ev.from_json(*row)) for t, *row in ledger.query("SELECT t, type, data FROM journal ORDER BY id")]


class Books:
    """The folder. Its nodes are folders below `workdir`."""

    def __init__(self, root: Path, runs: str = "runs") -> None:
        self.root, self.runs, self.workdir = root, root / runs, root / "nodes"
        self.shapes_csv, self.groups = root / "shapes.csv", 0

    def shapes(self, groups: int, per_group: int = 1) -> int:
        """Write the list of shapes. N names the group (N = 16 * number), M the shape."""
        rows = [(m + 1, 16 * (g + 1), 64) for g in range(groups) for m in range(per_group)]
        self.shapes_csv.write_text("M,N,K\n" + "".join(f"{m},{n},{k}\n" for m, n, k in rows))
        self.groups = groups
        return len(rows)

    def held(self, after: int, until: str = "released") -> dict[str, Any]:
        """A fault: all but the first `after` groups wait while they are measured, until `release`."""
        later = [str(16 * g) for g in range(after + 1, self.groups + 1)]
        return {"kind": "hold", "until": until, "match": {"N": later}}

    @property
    def paths(self) -> RunPaths:
        """The latest run."""
        return list_runs(self.runs)[-1]

    def ledger(self) -> LedgerReader:
        return LedgerReader.open_readonly(self.paths.ledger)

    def tuned(self) -> int:
        """Shapes tuned so far, 0 while there is no run."""
        with contextlib.suppress(Exception), self.ledger() as ledger:
            return ledger.counts().tuned
        return 0

    def journaled(self, kind: type[R]) -> list[tuple[float, R]]:
        """Records of a kind with their times, in order; none while there is no run."""
        with contextlib.suppress(OSError, IndexError), self.ledger() as ledger:
            return [(t, r) for t, r in records(ledger) if isinstance(r, kind)]
        return []

    def journal(self, kind: type[R], where: Callable[[R], bool] = lambda r: True) -> list[R]:
        """Records of a kind, in order."""
        return [r for _, r in self.journaled(kind) if where(r)]

    def failed(self) -> dict[str, str]:
        """Reason by shape, as MxNxK."""
        with self.ledger() as ledger:
            return {"x".join(str(v) for v in f.key[:3]): f.reason or "" for f in ledger.failed()}

    def folder(self, node: str = "here") -> Path:
        return self.workdir / self.paths.run / node

    def workers(self, node: str = "here") -> dict[str, int]:
        """Id of every living worker of a node, by slot."""
        found = {}
        for lock in self.folder(node).glob("claimed/*/lock"):
            with contextlib.suppress(OSError, ValueError):
                pid = int(lock.read_text())
                if Path(f"/proc/{pid}").exists():
                    found[lock.parent.name] = pid
        return found

    def tuners(self, node: str = "here") -> list[int]:
        """Ids of the processes of a node's tuners."""
        found = []
        for pid in self.workers(node).values():
            with contextlib.suppress(OSError):
                found += [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return found

    def processes(self) -> list[int]:
        """Every process that works in our node folders."""
        return working_in(self.workdir)

    def check_books(self, tuned: int, failed: Mapping[str, str] | None = None) -> None:
        """Every shape is settled once, files agree with the ledger, and no process is left on any node."""
        with self.ledger() as ledger:
            assert reconcile(ledger) == []
            counts = ledger.counts()
        assert counts.pending + counts.running == 0, counts
        assert self.failed() == (failed or {})
        assert counts.tuned == tuned, counts
        rows = read_csv(self.paths.tuned)
        assert len(rows) == len({(r["M"], r["N"], r["K"]) for r in rows}) == counts.tuned
        assert len(read_csv(self.paths.failed)) == counts.failed
        wait_until(lambda: not self.processes(), "no worker is left")

    def close(self) -> None:
        """Kill whatever is left."""
        kill_in(self.workdir)
