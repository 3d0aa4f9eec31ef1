"""The real program in a folder of its own: real command line, real workers as processes, the replay tuner.

The replay tuner is the stand-in for measuring; with faults it is the tests' own tuner `faulty`, whose faults are real
(it kills, stops and fills for real).
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.ledger.reader import LedgerReader, reconcile
from orchestrator.paths import RunPaths, list_runs
from tests.standins import FAULTY
from tests.support.command import Done
from tests.support.command import command as run_command
from tests.support.processes import kill_in, working_in
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
__all__ = ["ROOT", "Bench", "Done", "read_csv"]


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV, by column name."""
    with path.open(newline="") as f:
        return list(csv.DictReader(f))


@dataclass
class Bench:
    """A folder with shapes, an inventory and runs."""

    root: Path
    slots: int = 2
    live: list[subprocess.Popen[str]] = field(default_factory=list)
    site: list[Path] = field(default_factory=list)
    """Folders with installed packages of others."""

    def __post_init__(self) -> None:
        self.inventory = self.root / "inv.yaml"
        self.shapes_csv = self.root / "shapes.csv"
        self.runs = self.root / "runs"
        self.workdir = self.root / "nodes"
        gpus = list(range(self.slots))
        self.inventory.write_text(
            "defaults: {family: a16w16, tuner: replay}\n"
            f"nodes:\n  here:\n    gpus: {gpus}\n    workdir: {self.workdir}\n"
        )

    def shapes(self, groups: int, per_group: int = 1) -> int:
        """Write `groups` groups of `per_group` shapes; N names the group (N = 16 * number), M the shape."""
        rows = [(m + 1, 16 * (g + 1), 64) for g in range(groups) for m in range(per_group)]
        self.shapes_csv.write_text("M,N,K\n" + "".join(f"{m},{n},{k}\n" for m, n, k in rows))
        return len(rows)

    def held(self, after: int, groups: int, until: str = "released") -> dict[str, Any]:
        """A fault: what comes after the first `after` of so many groups waits where it is measured, until `release`."""
        return {"kind": "hold", "until": until, "match": {"N": [str(16 * g) for g in range(after + 1, groups + 1)]}}

    def release(self, until: str = "released") -> None:
        """Let groups held until then go on, on the nodes that are folders of this machine."""
        for folder, _, files in os.walk(self.workdir):  # glob minds folders that go meanwhile
            if "node.json" in files:
                (Path(folder) / until).touch()

    def argv(self, command: str, *args: str) -> list[str]:
        return [sys.executable, "-m", "orchestrator", *command.split(), *args, "--runs", str(self.runs)]

    def tune_args(
        self, faults: Sequence[dict[str, Any]] = (), seconds: float = 0.0, more: Sequence[str] = ()
    ) -> list[str]:
        return [
            str(self.shapes_csv), "-i", str(self.inventory), "-O", f"seconds_per_shape={seconds}",
            *(("--tuner", "faulty", "-O", f"faults={json.dumps(list(faults))}") if faults else ()), *more,
        ]  # fmt: skip

    def env(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, FAULTY, *self.site))),
            "PYTHONUNBUFFERED": "1",
        }

    def run(self, command: str, *args: str) -> Done:
        """Run a command to its end: in this process, unless packages of others are to be installed or it detaches."""
        return self.run_plain(*command.split(), *args, "--runs", str(self.runs))

    def run_plain(self, *argv: str) -> Done:
        """Run a command that knows no --runs."""
        if not self.site and "--detach" not in argv:
            return run_command(*argv)
        p = subprocess.run(
            [sys.executable, "-m", "orchestrator", *argv],
            capture_output=True, text=True, timeout=PATIENCE_S, env=self.env(),
        )  # fmt: skip
        assert "Traceback" not in p.stderr, p.stderr
        return Done(p.returncode, p.stdout, p.stderr)

    def start(self, command: str, *args: str) -> subprocess.Popen[str]:
        """Start a command that is to be interrupted or killed."""
        p = subprocess.Popen(
            self.argv(command, *args), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.env()
        )
        self.live.append(p)
        return p

    def tune(self, **kw: Any) -> Done:
        return self.run("tune", *self.tune_args(**kw))

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

    def node(self) -> Path:
        return self.workdir / self.paths.run / "here"

    def agents(self) -> dict[str, int]:
        """Pid of each slot's living worker, by its last worker_started."""
        out: dict[str, int] = {}
        if not list_runs(self.runs):
            return out
        for path in (self.node() / "events").glob("*.jsonl"):
            for line in path.read_bytes().splitlines():
                with contextlib.suppress(ValueError):
                    record = json.loads(line)
                    if record["type"] == "worker_started":
                        out[path.stem] = record["info"]["pid"]
        return {slot: pid for slot, pid in out.items() if _alive(pid)}

    def children(self) -> list[int]:
        """Pids of the tuners' processes."""
        out = []
        for pid in self.agents().values():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
                out += [int(c) for c in text.split()]
        return out

    def processes(self) -> list[int]:
        """Every process that works in our node folders."""
        return working_in(self.workdir)

    def close(self) -> None:
        for p in self.live:
            if p.poll() is None:
                p.kill()
            p.wait()
            if p.stdout:
                p.stdout.close()
        kill_in(self.workdir)

    # --- the books ------------------------------------------------------------------------------------------------

    def check_books(self, *, tuned: int | None = None, failed: dict[str, str] | None = None) -> None:
        """Check that every shape is settled once, files agree with the ledger, nothing is left running."""
        with self.ledger() as ledger:
            assert reconcile(ledger) == []
            counts = ledger.counts()
            assert counts.pending + counts.running == 0, counts
            if tuned is not None:
                assert counts.tuned == tuned, (counts, ledger.failures())
            reasons = {"x".join(str(v) for v in f.key[:3]): f.reason for f in ledger.failed()}
            if failed is not None:
                assert reasons == failed
        rows = read_csv(self.paths.tuned)
        keys = [(r["M"], r["N"], r["K"]) for r in rows]
        assert len(keys) == len(set(keys)) == counts.tuned
        assert len(read_csv(self.paths.failed)) == counts.failed
        wait_until(lambda: not self.processes(), f"no worker is left: {self.processes()}")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False
