"""Worker commands on a node, with their output line by line. A node folder is deployed, and removed at the end. A
command runs where workers run: as a process, or in a container like theirs.
"""

from __future__ import annotations

import codecs
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from orchestrator.dispatch.deploy import node_files
from orchestrator.errors import EngineError, NodeError
from orchestrator.inventory import Inventory, Node
from orchestrator.ledger import clean
from orchestrator.nodes.link import engine_of, transport_of
from orchestrator.nodes.plan import plan_nodes
from orchestrator.nodes.poll import check_nodes
from orchestrator.paths import new_run_id
from orchestrator.transport import RemoteFile, Transport, connected
from orchestrator.transport.base import Channel

MAX_LINE = 64 * 1024
NO_TUNER = ""
"""No tuner: nothing is tuned, and nothing kept on the node."""
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
        return _follow(self._transport.open(["sh", f"{self._folder}/tune.sh", *words]), line)


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
    reports = check_nodes([node], accept_new_host_keys=accept_new_host_keys)
    if not reports[0].usable:
        raise EngineError(node.name, "; ".join(t.removeprefix(f"{node.name}: ") for t in reports[0].problems()))
    run = f"{name}-{new_run_id(time.time())}"
    only = inventory.model_copy(update={"nodes": {node.name: node}})
    with tempfile.TemporaryDirectory(prefix="gemmfleet-") as scratch:
        plan = plan_nodes(only, run, Path(scratch), {node.name: reports[0].facts})[0]
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


def run_worker_command(
    inventory: Inventory,
    node: Node,
    words: Sequence[str],
    line: Callable[[str], None],
    *,
    accept_new_host_keys: bool = False,
) -> str:
    """Run one worker command on the node's first slot, as `WorkerHost.run` does. Raises NodeError, InputError."""
    with deployed_on(inventory, node, words[0], accept_new_host_keys=accept_new_host_keys) as host:
        return host.run(words, line)


def _follow(channel: Channel, line: Callable[[str], None]) -> str:
    try:
        for raw in lines(channel.read):
            line(raw)
        return channel.error()
    finally:
        channel.close()


def lines(read: Callable[[int], bytes]) -> Iterator[str]:
    """Yield the lines of a stream, sanitized; a line without an end is cut."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    rest = ""
    while data := read(1 << 16):
        *whole, rest = (rest + decoder.decode(data)).split("\n")
        for one in whole:
            yield clean.text(one, MAX_LINE)
        if len(rest) > MAX_LINE:
            yield clean.text(rest, MAX_LINE)
            rest = ""
    if rest:
        yield clean.text(rest, MAX_LINE)
