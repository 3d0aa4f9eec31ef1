"""The controller's loop: turns, requests, interruptions and the end of a run, with a node that lives in memory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator import events as ev
from orchestrator.controller import loop
from orchestrator.controller.context import DriveSettings, RunContext
from orchestrator.controller.drive import drive
from orchestrator.controller.loop import Controller
from orchestrator.controller.messages import FromStream, NodeTakenOver, NodeUp
from orchestrator.controller.node_driver import NodeDriver
from orchestrator.controller.node_stream import NodeStream
from orchestrator.controller.prepare import prepare
from orchestrator.controller.request import RunRequest
from orchestrator.controller.timeouts import Timeouts
from orchestrator.errors import NoUsableNodeError, TakenOverError
from orchestrator.events import NodeTroubled
from orchestrator.inventory.load import parse_inventory
from orchestrator.leases.leased_nodes import LeasedNodes
from orchestrator.ledger.ingest import Chunk
from orchestrator.ledger.reader import LedgerReader, reconcile
from orchestrator.ledger.writer import Ledger
from orchestrator.paths import RunConfig, RunPaths, leave_request
from orchestrator.policy import Policy, PolicySettings
from orchestrator.transport.local import LocalTransport
from orchestrator.view.header import RunHeader
from orchestrator.view.live import LiveStatus
from tests.kits.fleet import Bench
from tests.kits.results import A8W8, DEVICE, ROW, BadNotes, shapes
from worker.protocol import Spec, record

TIMEOUTS = Timeouts(tick=0.01, view=0.01, never_up=0.05, starting=0.05, grace=0.1, shutdown=5.0)


class NodeInMemory:
    """A driver (controller/node_driver.py) whose one worker answers each spec at once, through `post`."""

    node = "a"
    slots = ("0",)

    def __init__(self, ledger: Path) -> None:
        self.controller: Any = None
        self.works = True
        """False: it takes specs and reports nothing."""
        self.trouble = ""
        """If it is set, the node never comes up, for this reason."""
        self.unjournaled: list[str] = []
        """Attempts that were sent before their Send was committed."""
        self.control: list[str] = []
        """The control files that it got, by name."""
        self.workers = SimpleNamespace(
            alive=list, start_no_more=lambda: False, settle=lambda seconds: None, stop=lambda kill: None, fresh=True
        )
        self._ledger = ledger
        self._offset = 0

    def start(self) -> None:
        if self.trouble:
            self.controller.post(NodeTroubled(self.node, self.trouble))
            return
        self.controller.post(NodeUp(self.node, 1, frozenset()))
        self._say(record("canary", 1.0, ok=True, us=10.0, detail="", attempt=None))

    def put(self, session: int, files: dict[str, bytes]) -> None:
        self.control += [name for name in files if name.startswith("control/")]
        for name, data in files.items():
            if name.startswith("inbox/"):
                self._take(Spec.loads(data))

    def _take(self, spec: Spec) -> None:
        with LedgerReader.open_readonly(self._ledger) as ledger:
            rows = ledger.query("SELECT data FROM journal WHERE type='Send'")
        sent = [json.loads(data)["attempt"] for (data,) in rows]
        if spec.attempt not in sent:
            self.unjournaled.append(spec.attempt)
        name = spec.attempt
        records = [record("attempt_started", 1.0, attempt=name, group=name, device=DEVICE)]
        if self.works:
            records += [record("shape_tuned", 2.0, attempt=name, shape=s.id, row=ROW) for s in spec.shapes]
            end: dict[str, Any] = {
                "outcome": "done",
                "in_flight": None,
                "exit": None,
                "detail": "",
                "seconds": 1.0,
                "spent": {},
            }
            records.append(record("attempt_ended", 3.0, attempt=name, **end))
        self._say(*records)

    def _say(self, *records: dict[str, Any]) -> None:
        data = b"".join(json.dumps(entry).encode() + b"\n" for entry in records)
        self.controller.post(FromStream(self.node, Chunk("E", "0", self._offset, data)))
        self._offset += len(data)

    def check_pulse(self) -> None: ...
    def leave(self) -> None: ...
    def close(self, until: float) -> None: ...
    def hang_up(self) -> None: ...
    def take_back(self, session: int, name: object) -> None: ...
    def fetch_reproductions(self) -> None: ...
    def keep_results(self) -> None: ...
    def tidy(self) -> None: ...


class LoopRig:
    """A run of four shapes, and the loop that drives it on a node in memory."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths = RunPaths(folder)
        self.paths.requests.mkdir()
        self.ledger = Ledger.create(self.paths.ledger)
        self.policy = Policy(PolicySettings())
        with self.ledger.transaction():
            self.ledger.set_meta("tuner", "replay")
            self.ledger.add_shapes(shapes(4), A8W8)
            self.ledger.journal(ev.WorkAdded("all", ((1,), (2,), (3,), (4,)), ((2.5,),) * 4), time.time())
        self.ledger.drive(self.policy.state)
        self.interrupts: list[int] = []
        self.watcher = BadNotes()
        self.node = NodeInMemory(self.paths.ledger)
        config = RunConfig("r1", 0.0, [], "", A8W8.name, "replay", "", "", "")
        inventory = parse_inventory(b"nodes: {a: {}}", "i.yaml")
        context = RunContext(
            self.paths, config, inventory, self.ledger, self.policy, self.watcher, 1, DriveSettings(), TIMEOUTS, str
        )
        live_status = LiveStatus(self.policy.state, RunHeader.of(self.ledger, config, {"a": ("0",)}))
        leases = LeasedNodes([], lambda *_: None, known=[])  # type: ignore[arg-type]
        plan: Any = None
        monkeypatch.setattr(loop, "make_driver", lambda *_, launch: self.node)
        self.loop = Controller(
            context, live_status, leases, [plan], launch=True, interrupts=self.interrupts, cancel=False
        )
        self.node.controller = self.loop

    def journaled(self, kind: type[ev.Record]) -> int:
        """The number of records of a type in the journal."""
        return int(self.ledger.query("SELECT count(*) FROM journal WHERE type=?", (kind.__name__,))[0][0])


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopRig]:
    rig = LoopRig(tmp_path, monkeypatch)
    with rig.ledger:
        yield rig


def test_a_run_ends_when_every_shape_is_settled_and_nothing_is_sent_before_it_is_journaled(rig: LoopRig) -> None:
    assert rig.loop.run() == "finished"
    assert (rig.ledger.counts().tuned, reconcile(rig.ledger)) == (4, [])
    assert (rig.node.unjournaled, rig.journaled(ev.Send) > 0) == ([], True)
    assert rig.node.control == ["control/stop"], "the workers are told to finish"
    assert rig.journaled(ev.Tick) == 0


def test_a_ctrl_c_gives_running_attempts_a_grace_and_leaves_them_to_their_workers(rig: LoopRig) -> None:
    rig.node.works = False
    rig.interrupts.append(1)
    assert rig.loop.run([]) == "interrupted"
    assert rig.journaled(ev.StopAsked) == 1
    assert (rig.ledger.counts().tuned, rig.policy.state.stopped) == (0, True)


def test_a_request_of_another_command_cancels_the_run(rig: LoopRig) -> None:
    rig.node.works = False
    leave_request(rig.paths.requests, "cancel")
    assert rig.loop.run() == "cancelled"
    assert list(rig.paths.requests.iterdir()) == []


def test_a_node_that_cannot_be_prepared_ends_the_run_with_its_reason(rig: LoopRig) -> None:
    rig.node.trouble = "no image"
    with pytest.raises(NoUsableNodeError, match="a: no image"):
        rig.loop.run()
    assert rig.journaled(ev.NodeLost) == 1, "it is given up once"


def test_a_controller_that_was_taken_over_writes_nothing_more(rig: LoopRig) -> None:
    rig.node.start = lambda: rig.loop.post(NodeTakenOver("a", 2))  # type: ignore[method-assign]
    with pytest.raises(TakenOverError, match="this is epoch 1"):
        rig.loop.run()
    assert rig.ledger.meta("farewell") is None


def drive_with(paths: RunPaths, lines: list[str]) -> str:
    """Drive a run on this machine; `lines` gets the lines that a person sees."""
    view: Any = SimpleNamespace(update=lambda status: None, note=lambda text, **_: lines.append(text))
    return drive(paths, view, handle_signals=False)


@pytest.mark.parametrize(
    ("thread", "part", "method"),
    [("read", NodeStream, "handle"), ("read", NodeDriver, "_prepare"), ("write", LocalTransport, "put")],
)
def test_a_bug_in_the_work_with_a_node_ends_the_node_and_the_run_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thread: str, part: type, method: str
) -> None:
    bench, lines, as_it_is = Bench(tmp_path, slots=1), list[str](), getattr(part, method)
    bench.shapes(groups=2)
    request = RunRequest(bench.shapes_csv, bench.runs, bench.inventory, "a16w16", options={"seconds_per_shape": 0.1})
    paths = prepare(request).create()

    def fail(*args: Any) -> Any:
        if threading.current_thread().name.startswith(thread):
            raise KeyError("slot")
        return as_it_is(*args)

    try:
        monkeypatch.setattr(part, method, fail)
        with pytest.raises(NoUsableNodeError, match=r"bug in it.*traceback\.txt"):
            drive_with(paths, lines)
        monkeypatch.undo()
        assert 'raise KeyError("slot")' in paths.traceback("here").read_text()
        assert any("gemmfleet failed with KeyError: 'slot', which is a bug in it" in line for line in lines), lines
        assert drive_with(paths, lines) == "finished"
        bench.check_books(tuned=2)
    finally:
        bench.close()
