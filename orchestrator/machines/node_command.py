"""Runs a command where workers run (as a process, or in a container like theirs), and reads its output line by line.

A node folder is deployed for it, and removed at the end.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from orchestrator import clean
from orchestrator.errors import EngineError, NodeError
from orchestrator.files.scratch import scratch_folder
from orchestrator.inventory.model import Inventory, Node
from orchestrator.machines.node_check import check_nodes
from orchestrator.machines.node_files import node_files
from orchestrator.machines.node_link import engine_of, transport_of
from orchestrator.machines.node_plan import plan_nodes
from orchestrator.paths import new_run_id
from orchestrator.transport.base import RemoteFile, Transport, as_file, connected

MAX_LINE = 64 * 1024
NO_TUNER = ""
"""Nothing is tuned there, and nothing is kept on the node."""
IDLE_EXIT_S = 600.0


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
        raise EngineError(node.name, report.problem_text())
    run = f"{name}-{new_run_id(time.time())}"
    only = inventory.model_copy(update={"nodes": {node.name: node}})
    with scratch_folder("gemmfleet-node-") as scratch:
        plan = plan_nodes(only, run, scratch, {node.name: report.facts})[0]
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
