"""Commands where workers run (as a process, or in a container like theirs), with their output line by line; and a
workload, here or on a node, whose output shows the shapes that AITER had no tuned row for.

A node folder is deployed, and removed at the end.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from orchestrator import clean
from orchestrator.errors import EngineError, InputError, NodeError
from orchestrator.families import get_family
from orchestrator.inventory.model import Inventory, Node
from orchestrator.machines.node_check import check_nodes
from orchestrator.machines.node_plan import engine_of, node_files, plan_nodes, transport_of
from orchestrator.paths import new_run_id
from orchestrator.shapes.aiter_log import Miss, Misses, key_of
from orchestrator.transport.base import RemoteFile, Transport, as_file, connected
from worker.capture import MARK, Recording

MAX_LINE = 64 * 1024
# No tuner: nothing is tuned, and nothing kept on the node.
NO_TUNER = ""
IDLE_EXIT_S = 600.0
BF16 = "a16w16"


@dataclass(frozen=True, slots=True)
class WorkerHost:
    """A node with a deployed folder, for as long as `deployed_on` lasts."""

    slots: tuple[str, ...]
    _transport: Transport
    _folder: str

    def run(self, words: Sequence[str], line: Callable[[str], None]) -> str:
        """Run `worker WORDS` to its end; return how it ended ("ended with code 0").

        `line` gets each line as it comes, with terminal sequences and control characters gone. Raises NodeError.
        """
        channel = self._transport.open(["sh", f"{self._folder}/tune.sh", *words])
        with contextlib.closing(channel):
            for raw in lines(channel.read):
                line(raw)
            return channel.error()


@contextlib.contextmanager
def deployed_on(
    inventory: Inventory,
    node: Node,
    name: str,
    *,
    files: Callable[[tuple[str, ...]], Mapping[str, bytes]] = lambda slots: {},
    accept_new_host_keys: bool = False,
) -> Iterator[WorkerHost]:
    """Deploy to the node, ready for worker commands. `name` begins the folder's name; `files`, given the slots, are put
    beside it, paths relative to the node folder, where commands begin. Raises NodeError, InputError.
    """
    (report,) = check_nodes([node], accept_new_host_keys=accept_new_host_keys)
    if not report.usable:
        raise EngineError(node.name, "; ".join(t.removeprefix(f"{node.name}: ") for t in report.problems()))
    run = f"{name}-{new_run_id(time.time())}"
    only = inventory.model_copy(update={"nodes": {node.name: node}})
    with tempfile.TemporaryDirectory(prefix="gemmfleet-") as scratch:
        plan = plan_nodes(only, run, Path(scratch), {node.name: report.facts})[0]
        with connected(transport_of(plan, accept_new_host_keys=accept_new_host_keys)) as transport:
            deployed = node_files(plan, run, NO_TUNER, {}, IDLE_EXIT_S)
            more = {path: RemoteFile(data) for path, data in files(plan.slots).items()}
            transport.put(plan.folder, {**deployed, **more}, ("home", "logs"))
            engine = engine_of(plan, transport)
            try:
                engine.hold()
                yield WorkerHost(plan.slots, transport, plan.folder)
            finally:
                with contextlib.suppress(NodeError):
                    engine.tidy()
                    transport.run(["rm", "-rf", "--", plan.folder])
                    transport.run(["rmdir", "--", str(PurePosixPath(plan.folder).parent)])  # the run's: empty now


def lines(read: Callable[[int], bytes]) -> Iterator[str]:
    """Yield the lines of a stream, sanitized; a line without an end is cut."""
    stream = io.TextIOWrapper(as_file(read), "utf-8", "replace", newline="\n")
    while line := stream.readline(MAX_LINE):
        yield clean.text(line.removesuffix("\n"), MAX_LINE)


class WorkloadLog:
    """Reader of a workload's output, and of AITER's own record at its end: `record`."""

    def __init__(self, family: str | None, say: Callable[[str], None]) -> None:
        self._counting, self._say = Misses(family), say
        self.record: dict[str, Any] = {}

    def line(self, text: str) -> None:
        """One line, clean."""
        if not text.startswith(MARK):
            self._counting.line(text.encode("utf-8", "replace"))
            self._say(text)
            return
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(text.removeprefix(MARK))
            self.record = record if isinstance(record, dict) else {}

    def done(self) -> tuple[Misses, int | None]:
        """The shapes without a tuned row, and the workload's exit code. A recorded shape counts where the log has no
        bf16 miss (before v0.1.7)."""
        misses = self._counting.done()
        notes, recorded = self.record.get("notes"), self.record.get("recorded")
        misses.notes += [clean.text(n, 300) for n in notes[:20]] if isinstance(notes, list) else []
        texts = [t for t in recorded.values() if isinstance(t, str)] if isinstance(recorded, dict) else []
        if BF16 not in misses.counts and (keys := _keys(texts, misses)):
            misses.counts[BF16] = Counter(keys)
            misses.notes.append(
                f"{len(keys)} bf16 shapes are from AITER_TUNE_GEMM, which does not show whether they have a row;"
                " `tune --db` skips those that have"
            )
        return misses, clean.integer(self.record.get("code"))


def _keys(texts: Sequence[str], misses: Misses) -> list[tuple[int | str, ...]]:
    """The shapes of AITER's own lists."""
    out: dict[tuple[int | str, ...], None] = {}
    for row in (row for text in texts for row in csv.DictReader(io.StringIO(text))):
        values = {n: str(row[n]).strip() for n in get_family(BF16).key_names if row.get(n)}
        try:
            out[key_of(Miss(BF16, values), BF16)] = None
        except ValueError as e:
            misses.odd[str(e)] += 1
    return list(out)


def capture_here(argv: Sequence[str], log: WorkloadLog) -> tuple[Misses, int | None]:
    """Run `argv` on this machine to its end. Ctrl-C goes to the workload, which may then end in its own way; a second
    one kills it. Raises InputError where it cannot be started."""
    with Recording(os.environ) as recording:
        try:
            proc = subprocess.Popen(
                argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=recording.env, start_new_session=True
            )
        except OSError as e:
            raise InputError(f"{argv[0]}: cannot be started: {e.strerror or e}") from e
        signals = iter((signal.SIGINT,))

        def pass_on(*_: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(proc.pid, next(signals, signal.SIGKILL))

        before = signal.signal(signal.SIGINT, pass_on)
        try:
            with proc:
                assert proc.stdout is not None
                for text in lines(partial(os.read, proc.stdout.fileno())):
                    log.line(text)
        finally:
            signal.signal(signal.SIGINT, before)
    log.record = {"code": proc.returncode, "recorded": recording.recorded, "notes": recording.notes}
    return log.done()


def capture_on(
    inventory: Inventory, name: str, argv: Sequence[str], log: WorkloadLog, *, accept_new_host_keys: bool
) -> tuple[Misses, int | None]:
    """Run `argv` on the first slot of a node, where its workers run. Ctrl-C ends it and keeps what was counted.

    Raises NodeError, InputError.
    """
    if name not in inventory.nodes:
        raise InputError(f"the inventory has no node {name[:60]!r} (there: {', '.join(inventory.nodes)})")
    ended, node = "was interrupted", inventory.nodes[name]
    with (
        contextlib.suppress(KeyboardInterrupt),
        deployed_on(inventory, node, "capture", accept_new_host_keys=accept_new_host_keys) as host,
    ):
        ended = host.run(["capture", "--until-eof", "--", *argv], log.line)
    misses, code = log.done()
    misses.notes += [] if code is not None else [f"{name}: the workload {ended}"]
    return misses, code
