"""Kit of whole runs on the fleet of `server.py` and `link.py`: shapes, faults, controllers, and the books.

def test_x(fleet: Fleet) -> None:
    n = fleet.shapes(groups=6)
    run = fleet.begun(2)
    fleet.link("h1", "down")
    fleet.mend("h1")
    fleet.finish(run, n)
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import events as ev
from orchestrator.controller.prepared_run import PreparedRun
from orchestrator.controller.request import RunRequest
from orchestrator.families import get_family
from orchestrator.inventory.load import load_inventory
from orchestrator.machines.node_plan import plan_nodes
from orchestrator.paths import RunConfig, RunPaths, new_run_id
from orchestrator.planning.cost import CostModel
from orchestrator.planning.plan import make_plan
from orchestrator.shapes.reader import read_shapes
from tests.fleet.server import ask
from tests.kits.fleet import Books, Done, command, read_csv
from tests.waiting import wait_until
from worker.protocol import ProtocolError, parse_record

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

    def ends_with(self, code: int) -> str:
        """Wait for its end, which is this exit code; all that it printed."""
        assert self.wait() == code, self.out
        return self.out

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, if it has not ended by itself, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        wait_until(lambda: self.poll() is not None, "it is gone")


class Fleet(Books):
    """A few nodes, and runs on them. `nodes`: number of slots by name."""

    def __init__(
        self,
        root: Path,
        server: Path,
        nodes: Mapping[str, int] | None = None,
        runs: str = "runs",
        timeouts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(root, runs)
        self.csv, self.server, self.timeouts = self.shapes_csv, server, dict(timeouts or {})
        self.nodes = dict(nodes or {"h1": 1, "h2": 1, "h3": 1})
        for name in (runs, "links", "facts", "start", "out"):
            (self.root / name).mkdir(exist_ok=True)
        if not (self.root / "server").exists():
            (self.root / "server").symlink_to(self.server)

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
        family = get_family("a16w16")
        inventory, listed = load_inventory(path), read_shapes(self.csv, family)
        run, cost = new_run_id(0.0), CostModel.default("faulty", family, "gfx950")
        nodes = plan_nodes(inventory, run, self.runs / run, {})
        plan = make_plan(
            listed.shapes, family, cost, {n.node: len(n.slots) for n in nodes}, tuner="faulty", chip=("gfx950", 256)
        )
        config = RunConfig(
            run=run, created=0.0, argv=[], version="0", family=family.name, tuner="faulty", shapes=str(self.csv),
            shapes_sha256=listed.sha256, inventory=str(path), limit=None, **{
                "db": None, "retune": False, "watchdog_s": 30.0, "grace_s": 30.0, "err_ratio": 0.05, "options": options,
                "accept_new_host_keys": False, "lost_after_s": 90.0, "busy": "wait", **more,
            },
        )  # fmt: skip
        request = RunRequest(self.csv, self.runs, path, family.name, "faulty", options=options)
        return PreparedRun(request, config, family, listed, plan, cost, nodes, path, path.read_bytes(), []).create()

    def drive(self, what: str = "drive", run: RunPaths | None = None, retry: Sequence[int] = ()) -> Controller:
        """Start a controller of a run, the latest by default. `what`: drive or cancel."""
        out = self.root / "out" / f"{len(list((self.root / 'out').iterdir()))}.txt"
        run = run or self.paths
        pid = ask(
            self.server, "control", what=what, run=str(run.root), place=str(self.root), retry=list(retry), out=str(out),
            timeouts=self.timeouts,
        )  # fmt: skip
        return Controller(self.server, pid, out)

    def start(self, *faults: Fault, seconds: float = 0.0, **more: Any) -> Controller:
        """Start a run. `faults` as in gemmfleet_faulty.tuner, `more` as for `create`."""
        return self.drive(run=self.create(faults, seconds, **more))

    def tune(self, *faults: Fault, code: int = 0, **more: Any) -> Controller:
        """Drive a run to its end, which is this exit code; the rest as for `start`."""
        done = self.start(*faults, **more)
        done.ends_with(code)
        return done

    def begun(self, tuned: int, *faults: Fault, free: int = 0, **more: Any) -> Controller:
        """Start a run and wait until it has tuned `tuned` groups of one shape. Groups after the first `free` wait."""
        run = self.start(*faults, self.held(max(tuned, free)), **more)
        wait_until(lambda: self.tuned() >= tuned or run.poll() is not None, f"{tuned} shapes are tuned")
        assert run.poll() is None, run.out
        return run

    def resume(self) -> Controller:
        """Drive the run on, to a good end."""
        done = self.drive()
        done.ends_with(0)
        return done

    def cancel(self) -> str:
        """Cancel the run; what the command printed."""
        return self.drive("cancel").ends_with(0)

    def finish(self, run: Controller, tuned: int) -> None:
        """Let go what is held, and wait for a good end of the run, whose ledger holds this number of tuned shapes."""
        self.release()
        run.ends_with(0)
        self.check_books(tuned)

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
        self.link(f"{node}.lose", f"{op} {nth} {when}")

    def kill_workers(self, *nodes: str) -> None:
        for node in nodes:
            for pid in self.workers(node).values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def power_off(self, node: str) -> None:
        """Nobody reaches it, and nothing runs there any more."""
        self.link(node, "down")
        ask(self.server, "end", below=str(self.folder(node)))

    def events(self, node: str, slot: str = "0") -> Path:
        return self.folder(node) / "events" / f"{slot}.jsonl"

    def measured(self, node: str) -> int:
        """Shapes that the node's workers have tuned, whoever has heard of it."""
        files = self.folder(node).glob("events/*.jsonl")
        return sum(path.read_bytes().count(b'"shape_tuned"') for path in files)

    def struck(self, node: str) -> int:
        """Number of times that faults with `times` struck on a node."""
        return sum(p.stat().st_size for p in self.folder(node).glob("replay/*") if p.name != "blocklist.jsonl")

    def at_work(self, *nodes: str) -> bool:
        """Return whether these nodes (all) have begun a group that has not ended, as far as the run knows."""
        over = {r.attempt for r in self.journal(ev.AttemptEnded)}
        begun = self.journal(ev.AttemptStarted, lambda r: r.attempt not in over)
        return {r.node for r in begun} >= set(nodes or self.nodes)

    def copy_ledger(self, to: Path) -> None:
        """A consistent copy of the ledger, whoever writes to it."""
        source, target = sqlite3.connect(self.paths.ledger), sqlite3.connect(to)
        source.backup(target)
        source.close()
        target.close()

    def command(self, *argv: str) -> Done:
        """Run a command on the runs."""
        return command(*argv, "--runs", str(self.runs))

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

    def rows(self, name: str = "tuned") -> list[dict[str, str]]:
        """Rows of a CSV of the run."""
        return read_csv(self.paths.root / f"{name}.csv")

    def provenance(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.paths.provenance.read_text())
        return found

    def check_books(self, tuned: int, failed: Mapping[str, str] | None = None) -> None:
        """The same, and that the ledger knows everything that any node measured: nothing measured was lost."""
        super().check_books(tuned, failed)
        with self.ledger() as ledger:
            known = {s.id for s in ledger.shapes() if s.state == "tuned"}
        for path in (self.workdir / self.paths.run).glob("*/events/*.jsonl"):
            for line in path.read_bytes().splitlines() if path.is_file() and not path.is_symlink() else ():
                with contextlib.suppress(ProtocolError):
                    record = parse_record(line)
                    assert record["type"] != "shape_tuned" or record["shape"] in known, record

    def close(self) -> None:
        ask(self.server, "end", below=str(self.root))
        super().close()
