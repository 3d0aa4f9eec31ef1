"""Kit of whole runs on the fleet of `server.py` and `link.py`: shapes, faults, controllers, and the books.

def test_x(fleet: Fleet) -> None:
    n = fleet.shapes(groups=6)
    run = fleet.start(held_after=2)
    fleet.cut("h1")
    fleet.release()
    assert run.wait() == 0
    fleet.check_books(tuned=n)
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from orchestrator import events as ev
from orchestrator.controller.node_plan import plan_nodes
from orchestrator.controller.prepare import Prepared, RunRequest
from orchestrator.families import get_family
from orchestrator.inventory.load import load_inventory
from orchestrator.ledger.reader import LedgerReader, reconcile
from orchestrator.paths import RunConfig, RunPaths, list_runs, new_run_id
from orchestrator.planning.cost import CostModel
from orchestrator.planning.plan import make_plan
from orchestrator.shapes.reader import read_shapes
from tests.fleet.server import ask
from tests.support.command import Done, command
from tests.support.processes import kill_in, working_in
from tests.waiting import wait_until
from worker.protocol import ProtocolError, parse_record

R = TypeVar("R", bound=ev.Record)
Fault = Mapping[str, Any]


@dataclass
class Controller:
    """A controller that was started."""

    server: Path
    pid: int
    path: Path
    code: int | None = None

    @property
    def out(self) -> str:
        """All that it printed so far, notes and errors."""
        return self.path.read_text()

    def poll(self) -> int | None:
        if self.code is None:
            self.code = ask(self.server, "code", pid=self.pid)
        return self.code

    def wait(self) -> int:
        """Its exit code."""
        code: int = (wait_until(lambda: self.poll() is not None, "the controller ends") and self.code) or 0
        assert not any(line.startswith("Traceback") for line in self.out.splitlines()), self.out
        return code

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, if it has not ended by itself, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        wait_until(lambda: self.poll() is not None, "it is gone")


@dataclass
class Fleet:
    """A few nodes, and runs on them. `nodes`: number of slots by name."""

    root: Path
    server: Path
    nodes: dict[str, int] = field(default_factory=lambda: {"h1": 1, "h2": 1, "h3": 1})
    runs: Path = Path("runs")
    timeouts: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runs = self.root / self.runs
        self.csv = self.root / "shapes.csv"
        for name in (self.runs.name, "links", "facts", "start", "out"):
            (self.root / name).mkdir(exist_ok=True)
        if not (self.root / "server").exists():
            (self.root / "server").symlink_to(self.server)

    # --- the request ------------------------------------------------------------------------------------------------

    def shapes(self, groups: int, per_group: int = 1) -> int:
        """Write so many shapes; N names the group (N = 16 * number), M the shape."""
        rows = [(m + 1, 16 * (g + 1), 64) for g in range(groups) for m in range(per_group)]
        self.csv.write_text("M,N,K\n" + "".join(f"{m},{n},{k}\n" for m, n, k in rows))
        self.groups = groups
        return len(rows)

    def held(self, after: int, until: str = "released") -> dict[str, Any]:
        """A fault: groups after the first so many wait where they are measured, until `release`."""
        return {
            "kind": "hold",
            "until": until,
            "match": {"N": [str(16 * g) for g in range(after + 1, self.groups + 1)]},
        }

    def release(self, *nodes: str, until: str = "released") -> None:
        """Let what is held go on, on all nodes or on some."""
        for node in nodes or self.nodes:
            if self.folder(node).is_dir():
                (self.folder(node) / until).touch()

    def inventory(self, nodes: Mapping[str, int] | None = None) -> Path:
        """Write the inventory."""
        path = self.root / "inventory.yaml"
        path.write_text(
            "defaults: {family: a16w16, tuner: faulty, transport: ssh}\nnodes:\n"
            + "".join(
                f"  {name}: {{gpus: {list(range(slots))}, gfx: gfx950, cu_num: 256, workdir: {self.root}/nodes}}\n"
                for name, slots in (nodes or self.nodes).items()
            )
        )
        return path

    def create(self, faults: Sequence[Fault] = (), seconds: float = 0.0, **more: Any) -> RunPaths:
        """Make the folder of a run. `more`: fields of its RunConfig, and `options` of the tuner."""
        path = self.inventory()
        options = {"faults": [dict(f) for f in faults], "seconds_per_shape": seconds, **more.pop("options", {})}
        inventory, family, listed = (
            load_inventory(path),
            get_family("a16w16"),
            read_shapes(self.csv, get_family("a16w16")),
        )
        run, cost = new_run_id(0.0), CostModel.default("faulty", family, "gfx950")
        nodes = plan_nodes(inventory, run, self.runs / run, {})
        plan = make_plan(
            listed.shapes, family, cost, {n.node: len(n.slots) for n in nodes}, tuner="faulty", gfx="gfx950", cu_num=256
        )
        config = RunConfig(
            run=run, created=0.0, argv=[], version="0", family=family.name, tuner="faulty", shapes=str(self.csv),
            shapes_sha256=listed.sha256, inventory=str(path), limit=None, **{
                "db": None, "retune": False, "watchdog_s": 30.0, "grace_s": 30.0, "err_ratio": 0.05, "options": options,
                "accept_new_host_keys": False, "lost_after_s": 90.0, "busy": "wait", **more,
            },
        )  # fmt: skip
        request = RunRequest(self.csv, self.runs, path, family.name, "faulty", options=options)
        return Prepared(request, config, family, listed, plan, cost, nodes, path, path.read_bytes(), []).create()

    # --- controllers ------------------------------------------------------------------------------------------------

    def drive(self, what: str = "drive", run: RunPaths | None = None, retry: Sequence[int] = ()) -> Controller:
        """Start a controller of a run, the latest by default. `what`: drive or cancel."""
        out = self.root / "out" / f"{len(list((self.root / 'out').iterdir()))}.txt"
        run = run or self.paths
        pid = ask(
            self.server, "control", what=what, run=str(run.root), place=str(self.root), retry=list(retry), out=str(out),
            timeouts=self.timeouts, policy=self.policy,
        )  # fmt: skip
        return Controller(self.server, pid, out)

    def start(self, *faults: Fault, seconds: float = 0.0, **more: Any) -> Controller:
        """Start a run. `faults` as in gemmfleet_faulty.tuner, `more` as for `create`."""
        return self.drive(run=self.create(faults, seconds, **more))

    def tune(self, *faults: Fault, seconds: float = 0.0, **more: Any) -> Controller:
        """Drive a run to its end."""
        done = self.start(*faults, seconds=seconds, **more)
        done.wait()
        return done

    def begun(self, tuned: int, *faults: Fault, free: int = 0, **more: Any) -> Controller:
        """Start a run that has tuned so many groups of one shape; what comes after the first `free` is held."""
        run = self.start(*faults, self.held(max(tuned, free)), **more)
        wait_until(lambda: self.tuned() >= tuned or run.poll() is not None, f"{tuned} shapes are tuned")
        assert run.poll() is None, run.out
        return run

    def resume(self) -> Controller:
        done = self.drive()
        done.wait()
        return done

    # --- what happens to nodes --------------------------------------------------------------------------------------

    def folder(self, node: str) -> Path:
        return self.root / "nodes" / self.paths.run / node

    def link(self, node: str, state: str) -> None:
        """Set the state of a node's link (see tests.fleet.link)."""
        path = self.root / "links" / node
        aside = path.with_suffix(".aside")
        aside.write_text(state)
        os.rename(aside, path)

    def mend(self, node: str) -> None:
        (self.root / "links" / node).unlink(missing_ok=True)

    def lose(self, node: str, op: str, nth: int = 1, when: str = "after") -> None:
        """Lose the answer to the NTH next call of a kind."""
        (self.root / "links" / f"{node}.lose").write_text(f"{op} {nth} {when}")

    def workers(self, node: str) -> dict[str, int]:
        """Id of every living worker of a node, by slot."""
        found = {}
        for slot in map(str, range(self.nodes[node])):
            with contextlib.suppress(OSError, ValueError):
                pid = int((self.folder(node) / "claimed" / slot / "lock").read_text())
                if Path(f"/proc/{pid}").exists():
                    found[slot] = pid
        return found

    def kill_workers(self, *nodes: str) -> None:
        for node in nodes:
            for pid in self.workers(node).values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def power_off(self, node: str) -> None:
        """Nobody reaches it, and nothing runs there any more."""
        self.link(node, "down")
        ask(self.server, "end", below=str(self.folder(node)))

    def tuners(self, node: str) -> list[int]:
        """Ids of the processes of a node's tuners."""
        found = []
        for pid in self.workers(node).values():
            with contextlib.suppress(OSError):
                found += [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return found

    def events(self, node: str, slot: str = "0") -> Path:
        return self.folder(node) / "events" / f"{slot}.jsonl"

    def measured(self, node: str) -> int:
        """Shapes that the node's workers have tuned, whoever has heard of it."""
        files = self.folder(node).glob("events/*.jsonl")
        return sum(path.read_bytes().count(b'"shape_tuned"') for path in files)

    def processes(self) -> list[int]:
        return working_in(self.root / "nodes")

    def struck(self, node: str) -> int:
        """Number of times that faults with `times` struck on a node."""
        return sum(p.stat().st_size for p in self.folder(node).glob("replay/*") if p.name != "blocklist.jsonl")

    def at_work(self, *nodes: str) -> bool:
        """Return whether these nodes (all) have begun a group that has not ended, as far as the run knows."""
        over = {r.attempt for r in self.journal(ev.AttemptEnded)}
        begun = self.journal(ev.AttemptStarted, lambda r: r.attempt not in over)
        return {r.node for r in begun} >= set(nodes or self.nodes)

    # --- what the run tells -----------------------------------------------------------------------------------------

    @property
    def paths(self) -> RunPaths:
        """The latest run."""
        return list_runs(self.runs)[-1]

    def copy_ledger(self, to: Path) -> None:
        """A consistent copy of the ledger, whoever writes to it."""
        source, target = sqlite3.connect(self.paths.ledger), sqlite3.connect(to)
        source.backup(target)
        source.close()
        target.close()

    def command(self, *argv: str) -> Done:
        """Run a command on the runs."""
        return command(*argv, "--runs", str(self.runs))

    def ledger(self) -> LedgerReader:
        return LedgerReader.open_readonly(self.paths.ledger)

    def tuned(self) -> int:
        with contextlib.suppress(Exception), self.ledger() as ledger:
            return ledger.counts().tuned
        return 0

    def journal(self, kind: type[R], where: Callable[[R], bool] = lambda r: True) -> list[R]:
        """Records of a kind, in order."""
        return [r for _, r in self.journaled(kind) if where(r)]

    def journaled(self, kind: type[R]) -> list[tuple[float, R]]:
        """The same with their times."""
        with contextlib.suppress(OSError), self.ledger() as ledger:
            return [(t, r) for t, r in ledger.journal_records() if isinstance(r, kind)]
        return []

    @staticmethod
    def now() -> float:
        return time.time()

    def of(self, node: str, kind: type[Any]) -> list[Any]:
        """Records of a kind that name a node."""
        return self.journal(kind, lambda r: r.node == node)

    def sent(self) -> dict[str, str]:
        """Attempt -> its node."""
        return {r.attempt: r.node for r in self.journal(ev.Send)}

    def ends(self, outcome: str) -> list[tuple[str, ev.AttemptEnded]]:
        """(node, end) of the attempts that ended so."""
        sent = self.sent()
        return [(sent[r.attempt], r) for r in self.journal(ev.AttemptEnded) if r.outcome.value == outcome]

    def tuned_by(self) -> Counter[str]:
        """Shapes tuned, by node."""
        tuned = self.journal(ev.ShapeTuned)  # before what was sent, which grows
        sent = self.sent()
        return Counter(sent[r.attempt] for r in tuned)

    def starts(self) -> Counter[int]:
        """Number of times that each shape was begun."""
        return Counter(r.shape for r in self.journal(ev.ShapeStarted))

    def innocent_starts(self, guilty: Collection[str]) -> Counter[int]:
        """The same of the shapes that are not among these (MxNxK)."""
        with self.ledger() as ledger:
            names = {i: "x".join(str(v) for v in key[:3]) for i, key in ledger.keys.items()}
        return Counter({s: n for s, n in self.starts().items() if names[s] not in guilty})

    def failed(self) -> dict[str, str]:
        """Reason by shape, as MxNxK."""
        with self.ledger() as ledger:
            return {"x".join(str(v) for v in f.key[:3]): f.reason or "" for f in ledger.failed()}

    def rows(self, name: str = "tuned") -> list[dict[str, str]]:
        """Rows of a CSV of the run."""
        with (self.paths.root / f"{name}.csv").open(newline="") as f:
            return list(csv.DictReader(f))

    def provenance(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.paths.provenance.read_text())
        return found

    # --- the books --------------------------------------------------------------------------------------------------

    def check_books(self, tuned: int, failed: Mapping[str, str] | None = None) -> None:
        """Every shape is settled once, files agree with the ledger, and no process is left on any node."""
        with self.ledger() as ledger:
            assert reconcile(ledger) == []
            counts = ledger.counts()
            assert counts.pending + counts.running == 0, counts
        assert self.failed() == (failed or {})
        assert counts.tuned == tuned, counts
        keys = [(r["M"], r["N"], r["K"]) for r in self.rows()]
        assert len(keys) == len(set(keys)) == counts.tuned
        assert len(self.rows("failed")) == counts.failed
        self.check_measured()
        wait_until(lambda: not self.processes(), "no worker is left")

    def check_measured(self) -> None:
        """Everything that any node measured is known to the ledger: nothing measured was lost."""
        with self.ledger() as ledger:
            known = {s.id for s in ledger.shapes() if s.state == "tuned"}
        for path in (self.root / "nodes" / self.paths.run).glob("*/events/*.jsonl"):
            for line in path.read_bytes().splitlines() if path.is_file() and not path.is_symlink() else ():
                with contextlib.suppress(ProtocolError):
                    record = parse_record(line)
                    assert record["type"] != "shape_tuned" or record["shape"] in known, record

    def close(self) -> None:
        """Kill whatever is left."""
        ask(self.server, "end", below=str(self.root))
        kill_in(self.root / "nodes")
