"""The controller at 200 nodes x 8 slots: what it takes in, how soon it hands over, its memory, the ledger's commits.

The real `tune` with its ledger, policy, dispatch and live view drives real node folders of this machine, each with the
real `worker follow` as its stream. Only the workers are stand-ins, by an engine of this file: one process claims specs
by rename as 1,600 workers would, and writes their records: after SECONDS a shape (half to one and a half times that,
the first one up to that), 52 rows and its winner. Every group is one shape, so a completion is an attempt of its own.
Two loads: with the policy as it is, whose work waits in the inboxes; then with one that keeps nothing ahead, so that
each claim waits for the controller. All nodes are prepared by this machine's few cores: BATCH at a time, and none
claims anything until the last has joined.
`python -m benchmarks.scale --help` runs one of another size.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import heapq
import itertools
import json
import os
import random
import resource
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.figure import Figure, show
from orchestrator.controller.messages import FromStream, Message, NodeUp
from orchestrator.controller.node_driver import NodeDriver
from orchestrator.engines import WorkerState
from orchestrator.errors import LedgerError
from orchestrator.events import NodeTroubled
from orchestrator.ledger.ingest import Chunk
from tests.kits.fleet import Bench
from worker.agent.inbox import Inbox
from worker.agent.locks import lock_slot
from worker.protocol import NodePaths, Spec, record

NODES, SLOTS, SHAPES, SECONDS = 200, 8, 100_000, 2.6
ROWS = 53
"""Profile rows of a shape, its winner among them."""
BATCH = 20
"""Nodes that are prepared at a time."""
WARM_UP_S, MEASURED_S = 30.0, 60.0
"""After the last node joined."""
JOINED_WITHIN_S = 1200.0
MARKER, GO = "workers", "go"
"""Files that tell the stand-ins: of a node folder, that its engine started them; beside them, to claim work."""


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a load. `seconds`: of a shape; `busy`: share of its time that a slot works, in the rest it claims
    nothing; `ahead`: whether work waits in the inboxes."""

    nodes: int = NODES
    slots: int = SLOTS
    shapes: int = SHAPES
    seconds: float = SECONDS
    busy: float = 1.0
    warm_up_s: float = WARM_UP_S
    measured_s: float = MEASURED_S
    ahead: bool = True

    def __str__(self) -> str:
        busy = f", {self.busy:.0%} busy" if self.busy < 1 else ""
        kept = "" if self.ahead else ", nothing ahead"
        return f"{self.nodes} nodes x {self.slots} slots, {self.seconds:g} s a shape{busy}{kept}"


def run(folder: Path) -> list[Figure]:
    """Both loads."""
    figures = []
    for size in (Size(), Size(seconds=3.0, ahead=False)):
        place = folder / f"ahead-{size.ahead}"
        place.mkdir()
        figures += measure(place, size)
    return figures


def measure(folder: Path, size: Size) -> list[Figure]:
    """Drive a load for its time; its figures, without the time in which the nodes join and the inboxes fill."""
    bench = Bench(folder)
    bench.shapes(size.shapes)
    bench.inventory.write_text(
        f"defaults:\n  family: a16w16\n  tuner: replay\n  engine: process\n"
        f"  transport: local\n  workdir: {bench.workdir}\nnodes:\n"
        + "".join(
            f"  n{i:03}: {{gpus: {list(range(i * size.slots, (i + 1) * size.slots))}}}\n" for i in range(size.nodes)
        )
    )
    bench.workdir.mkdir()
    seen, gaps = folder / "controller.json", folder / "workers.json"
    env = bench.env()
    me = [sys.executable, "-m", "benchmarks.scale"]
    played = [str(bench.workdir), str(size.seconds), str(size.busy), str(gaps)]
    workers = subprocess.Popen([*me, "workers", *played], env=env)
    argv = [
        *me,
        "controller",
        str(seen),
        str(int(size.ahead)),
        *bench.argv("tune", *bench.tune_args(seconds=size.seconds))[3:],
    ]
    with (folder / "out.txt").open("wb") as out:
        tune = subprocess.Popen(argv, stdout=out, stderr=out, env=env)
    try:
        until = time.monotonic() + JOINED_WITHIN_S
        while tune.poll() is None and len(joined(bench)) < size.nodes and time.monotonic() < until:
            time.sleep(2.0)  # it reads the journal, on the same cores
        (bench.workdir / GO).touch()
        since = time.time() + size.warm_up_s
        time.sleep(size.warm_up_s + size.measured_s)
        if tune.poll() is not None:
            raise SystemExit(f"it ended before it was measured: {(folder / 'out.txt').read_text()[-3000:]}")
        tune.send_signal(signal.SIGINT)
        tune.wait(120.0)
    finally:
        for process in (tune, workers):
            process.terminate()
            process.wait()
        bench.close()
    if not seen.exists():
        raise SystemExit((folder / "out.txt").read_text()[-3000:])
    return figures_of(bench, size, since, json.loads(seen.read_text()), json.loads(gaps.read_text()))


def joined(bench: Bench) -> list[float]:
    """Times at which the nodes that were up joined first."""
    with contextlib.suppress(IndexError, LedgerError), bench.ledger() as ledger:  # there may be no run yet
        sql = "SELECT min(t) FROM journal WHERE type='NodeJoined' GROUP BY json_extract(data, '$.node')"
        return [t for (t,) in ledger.query(sql)]
    return []


def figures_of(bench: Bench, size: Size, since: float, seen: dict[str, Any], gaps: list[list[float]]) -> list[Figure]:
    """Figures of one load."""
    with bench.ledger() as ledger:
        settled = sorted(s.settled_at or 0.0 for s in ledger.shapes("tuned"))
    up = joined(bench)
    until = since + size.measured_s
    done = sum(since <= t < until for t in settled)
    rate, of = done / size.measured_s, str(size)
    commits = [1e3 * s for t, s in seen["commits"] if since <= t < until]
    idle = [1e3 * gap for t, gap in gaps if since <= t < until and gap > 0]
    loop, whole = (_spent(seen["cpu"], since, until, of) for of in (1, 2))
    figures = [
        Figure(
            f"completions, {of}", rate, 500.0, "/s",
            f"{len(up)} of {size.nodes} nodes joined, the last {max(up) - min(up):.0f} s after the first; {done:,} in "
            f"{size.measured_s:g} s, {ROWS} rows each: {ROWS * rate:,.0f} rows/s in the ledger", at_least=True,
        ),
        Figure(
            f"CPU time of the controller's loop a completion, {of}", 1e3 * loop / max(1, done), 1.5, "ms",
            f"{loop / size.measured_s:.0%} of a core; with all its threads {1e3 * whole / max(1, done):.1f} ms",
        ),
        Figure(
            f"ledger commit, p99, {of}", _p99(commits), 20.0, "ms",
            f"{len(commits):,} commits, median {statistics.median(commits):.1f} ms, the longest {max(commits):.0f} ms",
        ),
        Figure(f"controller's memory, {of}", seen["rss_mb"], 1000.0, "MB", f"its peak, {size.shapes:,} shapes planned"),
    ]  # fmt: skip
    if not size.ahead:
        handed = [1e3 * s for t, s in seen["handed"] if since <= t < until]
        for what, values, how in (
            ("idle to next spec", idle, "end on file to next spec in the inbox"),
            ("the controller's part of it", handed, "end read from the node's stream to next spec in the inbox"),
        ):
            how += f", {len(values):,} of them, median {statistics.median(values):.0f} ms"
            figures.append(Figure(f"{what}, p99, {of}", _p99(values), 50.0, "ms", how))
    return figures


def _spent(samples: list[list[float]], since: float, until: float, of: int) -> float:
    """CPU seconds between two times, of samples (time, loop, all threads)."""
    within = [s[of] for s in samples if since <= s[0] < until]
    return within[-1] - within[0]


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[-1]


# --- the controller ---------------------------------------------------------------------------------------------------


class TimedConnection(sqlite3.Connection):
    """A connection that notes when it committed, and for how long."""

    commits: ClassVar[list[tuple[float, float]]] = []

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if sql != "COMMIT":
            return super().execute(sql, *args)
        began = time.perf_counter()
        cursor = super().execute(sql, *args)
        self.commits.append((time.time(), time.perf_counter() - began))
        return cursor


class BatchedDriver(NodeDriver):
    """A driver that waits until fewer than BATCH others prepare their nodes, and notes how long the controller takes
    from the arrival of an attempt's end to the node's next spec in the inbox."""

    _batch: ClassVar = threading.BoundedSemaphore(BATCH)
    _holds = False
    handed: ClassVar[list[tuple[float, float]]] = []
    """(time, seconds)."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._ended, post = deque[float](), self._post

        def noting(message: Message) -> None:
            if isinstance(message, FromStream) and isinstance(message.frame, Chunk):
                self._ended.extend([time.time()] * message.frame.data.count(b'"attempt_ended"'))
            post(message)

        self._post = noting

    def put(self, session: int, files: dict[str, bytes]) -> None:
        super().put(session, files)
        self._writes.put((session, functools.partial(self._written, files)))

    def _written(self, files: dict[str, bytes]) -> None:
        now = time.time()
        for path in files:
            if path.startswith("inbox/") and self._ended:
                self.handed.append((now, now - self._ended.popleft()))

    def _prepare(self) -> NodeUp:
        self._batch.acquire()
        self._holds, post = True, self._post

        def until_up(message: Message) -> None:
            if self._holds and isinstance(message, NodeUp | NodeTroubled):
                self._holds, self._post = False, post
                self._batch.release()
            post(message)

        self._post = until_up
        return super()._prepare()


class StandInEngine:
    """Workers that a process of its own plays."""

    def __init__(self, plan: Any, transport: Any, progress: Any) -> None:
        self._folder = Path(plan.folder)

    def prepare(self) -> None: ...

    def start(self, slots: Any = (), env: Any = None) -> None:
        (self._folder / MARKER).touch()

    def hold(self) -> None: ...

    def list(self) -> list[WorkerState]:
        return []

    def stop(self, *, kill: bool = False) -> None: ...

    def tidy(self) -> None: ...

    def close(self) -> None: ...


def controller(seen: Path, ahead: bool, argv: list[str]) -> None:
    """Run the command line `argv` with stand-in workers. Writes the measurements to `seen`."""
    from orchestrator.cli.main import main as command
    from orchestrator.controller import context, deployment, drive
    from orchestrator.controller.timeouts import Timeouts
    from orchestrator.engine import process
    from orchestrator.policy import PolicySettings

    vars(sqlite3)["connect"] = functools.partial(sqlite3.connect, factory=TimedConnection)
    vars(process)["SPEC"] = replace(process.SPEC, create=StandInEngine)
    vars(drive)["export"] = lambda *args: None  # another benchmark's
    vars(deployment)["NodeDriver"] = BatchedDriver
    patient = Timeouts(starting=600.0, never_up=600.0)
    policy = PolicySettings() if ahead else PolicySettings(ahead_s=0.0)
    vars(drive)["DriveSettings"] = lambda: context.DriveSettings(timeouts=patient, policy=policy)
    cpu: list[tuple[float, float, float]] = []
    threading.Thread(target=_sample, args=(cpu,), daemon=True).start()
    sys.argv = ["gemmfleet", *argv]
    try:
        command()
    finally:
        used = resource.getrusage(resource.RUSAGE_SELF)
        noted = {"commits": TimedConnection.commits, "handed": BatchedDriver.handed, "cpu": cpu}
        seen.write_text(json.dumps({**noted, "rss_mb": used.ru_maxrss / 1024}))


def _sample(into: list[tuple[float, float, float]]) -> None:
    """Note (time, CPU seconds of the main thread, of the process) now and then."""
    ident = threading.main_thread().ident
    assert ident is not None
    loop = time.pthread_getcpuclockid(ident)
    while True:
        into.append((time.time(), time.clock_gettime(loop), time.process_time()))
        time.sleep(0.5)


# --- the workers ------------------------------------------------------------------------------------------------------

BURSTS = 4
"""Writes of a shape's rows, over its time."""
POLL_S, LOOK_S = 0.01, 0.5
RECENT_S = 0.1
"""A folder's time may stand still for some milliseconds while names come and go."""
DEVICE = {"gfx": "gfx950", "cu_num": 256, "device": "AMD Instinct MI355X"}
CONDITIONS = {"temperature_c": {"edge": 61.0, "junction": 74.0, "memory": 58.0}, "power_w": 812.0, "errors": {"umc": 0}}
A, S = "@attempt@", -7_777_777


def _lines(*records: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(r, separators=(",", ":")).encode() + b"\n" for r in records)


def _row(i: int) -> dict[str, Any]:
    name = f"a16w16_256x{16 << i % 4}x128x{i}_16x16_8x32x1_intrawave"
    return {
        "kernelId": i, "splitK": i % 3, "us": 181.25 + i, "kernelName": name, "libtype": "ck", "tflops": 612.3 - i,
        "bw": 2210.7, "errRatio": 0.0, "status": "ok", "spread": 0.0031, "samples": 21, "detail": "",
    }  # fmt: skip


def _bursts() -> list[bytes]:
    """Writes of a worker for an attempt, in turn."""
    rows = [record("row", 0.0, attempt=A, shape=S, row=_row(i)) for i in range(1, ROWS)]
    cut = [len(rows) * b // BURSTS for b in range(BURSTS + 1)]
    began = record("attempt_started", 0.0, attempt=A, group="g", device=DEVICE, conditions=CONDITIONS)
    ended = record(
        "attempt_ended", 0.0, attempt=A, outcome="done", in_flight=None, exit=None, detail="", seconds=2.5,
        spent={"inputs": 0.2, "check": 0.3, "measure": 1.9}, conditions=CONDITIONS,
    )  # fmt: skip
    last = [record("shape_tuned", 0.0, attempt=A, shape=S, row=_row(0)), ended]
    parts = [rows[a:b] for a, b in itertools.pairwise(cut)]
    return [
        _lines(began, record("shape_started", 0.0, attempt=A, shape=S)),
        *(_lines(*p) for p in parts[:-1]),
        _lines(*parts[-1], *last),
    ]


@dataclass
class Node:
    """A node folder and its slots; `idle`: slot -> when its last attempt ended."""

    paths: NodePaths
    idle: dict[str, float]
    events: dict[str, int] = field(default_factory=dict)
    locks: list[int] = field(default_factory=list)
    seen: float = 0.0

    def begin(self) -> None:
        """Start every slot's worker."""
        for slot in self.idle:
            self.locks.append(lock_slot(self.paths.lock(slot)))
            self.events[slot] = os.open(self.paths.events(slot), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            started = record("worker_started", time.time(), info={"pid": os.getpid(), "code": "c0de", "host": "here"})
            ready = record("tuner_ready", time.time(), tuner="replay", device=DEVICE, seconds=0.1)
            os.write(self.events[slot], _lines(started, ready))
            self.prove(slot, None)

    def prove(self, slot: str, attempt: str | None) -> None:
        """Pass a canary."""
        passed = record("canary", time.time(), ok=True, us=12.0, detail="", attempt=attempt)
        os.write(self.events[slot], _lines(passed))

    def changed(self, now: float) -> bool:
        """Return whether an idle slot may find something new in the inbox."""
        if not self.idle:
            return False
        before, self.seen = self.seen, os.stat(self.paths.inbox).st_mtime
        return self.seen != before or now - self.seen < RECENT_S


def workers(workdir: Path, seconds: float, busy: float, gaps: Path) -> None:
    """Play all workers of the node folders in `workdir`, until SIGTERM; (time, seconds idle) go to `gaps`."""
    nodes: dict[Path, Node] = {}
    due: list[tuple[float, int, int, float, Node, str, Any, int]] = []
    resting: list[tuple[float, int, Node, str, float]] = []
    bursts, seen, order, ended = _bursts(), list[tuple[float, float]](), 0, list[int]()
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    next_look = next_poll = 0.0
    going = False
    while not ended:
        now = time.time()
        if now >= next_look:
            next_look = now + LOOK_S
            going = (workdir / GO).exists()
            for marker in set(workdir.glob(f"*/*/{MARKER}")) - nodes.keys():
                paths = NodePaths(marker.parent)
                slots = sorted(p.name for p in (paths.root / "claimed").iterdir())
                nodes[marker] = Node(paths, dict.fromkeys(slots, 0.0))
                nodes[marker].begin()
        for node in nodes.values() if going and now >= next_poll else ():
            next_poll = now + POLL_S
            if not node.changed(now):
                continue
            for slot, since in list(node.idle.items()):
                claim = Inbox(node.paths, slot).claim()
                if claim is None:
                    continue
                path = Inbox(node.paths, slot).path(claim)
                came, spec = path.stat().st_mtime, Spec.loads(path.read_bytes())
                if spec.kind == "canary":
                    node.prove(slot, spec.attempt)
                    Inbox(node.paths, slot).put_away(claim)
                    continue
                if since:
                    seen.append((came, came - since))
                del node.idle[slot]
                order += 1
                # all begin at once, and must not end at once
                takes = seconds * (random.uniform(0.5, 1.5) if since else random.uniform(0.0, 1.0))
                heapq.heappush(due, (now, order, 0, takes, node, slot, claim, spec.shapes[0].id))
        while due and due[0][0] <= time.time():
            at, n, part, takes, node, slot, claim, shape = heapq.heappop(due)
            data = bursts[part].replace(A.encode(), claim.attempt.encode()).replace(b"%d" % S, b"%d" % shape)
            os.write(node.events[slot], data)
            if part < BURSTS:
                heapq.heappush(due, (at + takes / BURSTS, n, part + 1, takes, node, slot, claim, shape))
            else:
                end = time.time()
                Inbox(node.paths, slot).put_away(claim)
                rest = seconds * (1 / busy - 1) * random.uniform(0, 2)
                heapq.heappush(resting, (end + rest, n, node, slot, end))
        while resting and resting[0][0] <= time.time():
            _, _, node, slot, end = heapq.heappop(resting)
            node.idle[slot] = end
        time.sleep(max(0.0005, min(POLL_S, due[0][0] - time.time() if due else POLL_S)))
    gaps.write_text(json.dumps(seen))


def main() -> None:
    """The parts of a load, or a load of another size."""
    if sys.argv[1:2] == ["controller"]:
        controller(Path(sys.argv[2]), sys.argv[3] == "1", sys.argv[4:])
        return
    if sys.argv[1:2] == ["workers"]:
        workers(Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
        return
    parser = argparse.ArgumentParser("python -m benchmarks.scale")
    for name, value in asdict(Size()).items():
        if name != "ahead":
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--nothing-ahead", dest="ahead", action="store_false")
    parser.add_argument("--keep", type=Path, help="folder for all files, which stay")
    args = vars(parser.parse_args())
    keep = args.pop("keep")
    with tempfile.TemporaryDirectory(prefix="gemmfleet-bench-") as folder:
        show(measure(keep or Path(folder), Size(**args)))


if __name__ == "__main__":
    main()
