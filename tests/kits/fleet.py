"""Kit of whole runs: a folder with an inventory, shapes and runs, commands on it, and the books at the end of a run.

def test_x(bench: Bench) -> None:
    n = bench.shapes(groups=6)
    run = bench.begun(2)
    bench.release()
    bench.finish(run)
    bench.check_books(tuned=n)

A `Bench` has this machine as its node. Two more have other nodes: `tests.fleet.kit.Fleet`, whose links inject faults,
and `tests.integration.heavy.bench.NodesBench`, whose nodes are containers with an sshd and a dockerd. The tuner is
`replay`, which replays recorded times; with faults it is the tests' own tuner `faulty`, whose faults are real (it
kills, stops and fills for real).
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from orchestrator import events as ev
from orchestrator.cli.main import main
from orchestrator.ledger.reader import LedgerReader, reconcile
from orchestrator.paths import RunPaths, list_runs
from tests.paths import ROOT
from tests.standins import FAULTY
from tests.support.processes import kill_in, working_in
from tests.waiting import PATIENCE_S, wait_until

R = TypeVar("R", bound=ev.Record)


class Done(NamedTuple):
    """A command that ended."""

    code: int
    out: str
    err: str

    def ok(self) -> Done:
        """It ended with 0."""
        assert self.code == 0, self.out + self.err
        return self

    def failed_with(self, code: int, *says: str) -> Done:
        """It ended with this code, and standard error has these texts."""
        assert self.code == code, self.out + self.err
        for text in says:
            assert text in self.err, self.err
        return self

    def json(self) -> Any:
        """Its output, read as one JSON document."""
        return json.loads(self.out)


def command(*argv: object, stdin: str = "") -> Done:
    """Run `gemmfleet ARGV` in this process. A user's mistake is an exit code, and anything else that is raised fails
    the test."""
    words = [str(word) for word in argv]
    out, err, code = io.StringIO(), io.StringIO(), 0
    before, sys.argv = sys.argv, ["gemmfleet", *words]
    before_stdin, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(stdin.encode()))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(words)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    finally:
        sys.argv, sys.stdin = before, before_stdin
    return Done(code, out.getvalue(), err.getvalue())


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV, by column name."""
    with path.open(newline="") as f:
        return list(csv.DictReader(f))


def records(ledger: LedgerReader) -> list[tuple[float, ev.Record]]:
    """(time, record) of the journal in order: what resume replays."""
    return [(t, ev.from_json(*row)) for t, *row in ledger.query("SELECT t, type, data FROM journal ORDER BY id")]


class Books:
    """A folder with shapes and runs: what the latest run has done so far, and the books at its end.

    Its nodes are folders below `workdir`.
    """

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


class Bench(Books):
    """A folder with an inventory of this machine, on which real commands are run."""

    def __init__(self, root: Path, slots: int = 2) -> None:
        super().__init__(root)
        self.live: list[subprocess.Popen[str]] = []
        self.site: list[Path] = []
        """Folders with installed packages of others."""
        self.inventory = self.root / "inv.yaml"
        self.inventory.write_text(
            "defaults: {family: a16w16, tuner: replay}\n"
            f"nodes:\n  here:\n    gpus: {list(range(slots))}\n    workdir: {self.workdir}\n"
        )

    def argv(self, command: str, *args: object) -> list[str]:
        return [sys.executable, "-m", "orchestrator", *command.split(), *map(str, args), "--runs", str(self.runs)]

    def tune_args(
        self, faults: Sequence[dict[str, Any]] = (), seconds: float = 0.0, more: Sequence[object] = ()
    ) -> list[str]:
        return [
            str(self.shapes_csv), "-i", str(self.inventory), "-O", f"seconds_per_shape={seconds}",
            *(("--tuner", "faulty", "-O", f"faults={json.dumps(list(faults))}") if faults else ()), *map(str, more),
        ]  # fmt: skip

    def env(self) -> dict[str, str]:
        path = os.pathsep.join(map(str, (ROOT, FAULTY, *self.site)))
        return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}

    def run(self, command: str, *args: object) -> Done:
        """Run a command to its end: in this process, unless packages of others are to be installed or it detaches."""
        return self.run_plain(*command.split(), *args, "--runs", self.runs)

    def run_plain(self, *args: object) -> Done:
        """Run a command that knows no --runs."""
        if not self.site and "--detach" not in args:
            return command(*args)
        argv = [sys.executable, "-m", "orchestrator", *map(str, args)]
        p = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, env=self.env())
        assert "Traceback" not in p.stderr, p.stderr
        return Done(p.returncode, p.stdout, p.stderr)

    def start(self, command: str, *args: object) -> subprocess.Popen[str]:
        """Start a command that is to be interrupted or killed."""
        p = subprocess.Popen(
            self.argv(command, *args), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.env()
        )
        self.live.append(p)
        return p

    def tune(self, **kw: Any) -> Done:
        """Tune the list to its end; `kw` as for `tune_args`."""
        return self.run("tune", *self.tune_args(**kw))

    def begun(self, tuned: int, **kw: Any) -> subprocess.Popen[str]:
        """A tune of groups of one shape that has tuned this number; the rest waits for `release`."""
        before = len(list_runs(self.runs))
        run = self.start("tune", *self.tune_args([self.held(tuned)], **kw))

        def has_begun() -> bool:
            return len(list_runs(self.runs)) > before and self.tuned() >= tuned

        wait_until(lambda: has_begun() or run.poll() is not None, f"{tuned} shapes are tuned")
        assert run.poll() is None, run.communicate()[0]
        return run

    def release(self, until: str = "released") -> None:
        """Let groups held until then go on, on the nodes that are folders of this machine."""
        for folder, _, files in os.walk(self.workdir):  # glob minds folders that go meanwhile
            if "node.json" in files:
                (Path(folder) / until).touch()

    def finish(self, run: subprocess.Popen[str], code: int = 0) -> str:
        """Wait for the end of a command, which is this code; its output."""
        out, _ = run.communicate(timeout=PATIENCE_S)
        # one of ours, not one that is quoted from a tuner's log
        assert not any(line.startswith("Traceback") for line in out.splitlines()), out
        assert "\x1b" not in out, out
        assert run.returncode == code, out
        return out

    def has_joined(self, node: str, since: float = 0.0) -> bool:
        """Return whether the node has joined (again) since then."""
        return any(r.node == node and t >= since for t, r in self.journaled(ev.NodeJoined))

    def close(self) -> None:
        for p in self.live:
            if p.poll() is None:
                p.kill()
            p.wait()
            if p.stdout:
                p.stdout.close()
        super().close()
