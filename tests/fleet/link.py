"""Link to a node of the fleet: the transport that the controller gets, with the faults that a test asks for.

A node is a folder of this machine. Its workers are children of the fork server, its stream is the real
`worker.agent.follow` in a thread; all other commands run as they are. The state of the link is a file, so that a test
can change it while a controller runs in another process:

- `up`, or no file;
- `down`, `another key`, `no login`: streams end, and whatever is asked fails, as REFUSALS says;
- `stalled`: nothing comes and nothing goes, until the link is up again or the controller closes it;
- `cut 500`: the stream ends after 500 more bytes, in the middle of a frame; then the link is up again.

Beside it, `NODE.lose` (`OP NTH after|dies`) makes the NTH next `put`, `rename`, `run` or `open` fail after it was done,
or kills the controller after it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from orchestrator.errors import HostKeyError, LoginError, SlowError, TransportError
from orchestrator.machines.check_script import ARGV
from orchestrator.machines.node_files import CODE_MARKER
from orchestrator.machines.node_plan import NodePlan
from orchestrator.transport.base import Channel, Completed, RemoteFile
from orchestrator.transport.local import LocalTransport
from tests.fleet.server import ask
from worker.agent.follow import Stream, follow, parse_start
from worker.protocol import LOCKS_ENV, NodePaths

T = TypeVar("T")
LOOK_S = 0.01
"""Seconds between looks at the state of the link, while a stream waits."""
ANSWER_S = 2.0
"""A call on a stalled link fails after this long."""
BEAT_S = 0.05
REFUSALS = {
    "down": (TransportError, "connection refused"),
    "another key": (HostKeyError, "its host key has changed"),
    "no login": (LoginError, "it did not let us in"),
}


class NodeLink(LocalTransport):
    """A transport to one node. `place`: folder of the fleet."""

    def __init__(self, plan: NodePlan, place: Path) -> None:
        self._locks = place / "start" / plan.node
        """Folder of the locks of the node's devices."""
        super().__init__(plan.node, {**os.environ, LOCKS_ENV: str(self._locks)})
        self._plan, self._place = plan, place
        self._state = place / "links" / plan.node
        self._loses = place / "links" / f"{plan.node}.lose"
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def connect(self) -> None:
        self._closed.clear()
        self._carry("connect", lambda: None)

    def close(self) -> None:
        self._closed.set()

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60.0) -> Completed:
        return self._carry("run", lambda: self._run(argv, stdin, timeout))

    def put(self, folder: str, files: Mapping[str, RemoteFile], empty: Sequence[str] = ()) -> None:
        return self._carry("put", lambda: super(NodeLink, self).put(folder, files, empty))

    def rename(self, src: str, dst: str) -> bool:
        return self._carry("rename", lambda: super(NodeLink, self).rename(src, dst))

    def open(self, argv: Sequence[str]) -> Channel:  # type: ignore[override]
        if argv[1].endswith("/follow.sh"):
            start = parse_start(argv[argv.index("--from") + 1])
            folder = Path(self._plan.folder)
            return self._carry("open", lambda: FollowChannel(self, HeldStream(self, folder, start)))
        return self._carry("open", lambda: super(NodeLink, self).open(argv))

    def _run(self, argv: Sequence[str], stdin: bytes, timeout: float) -> Completed:
        if argv[0] == "test" and argv[-1].endswith(CODE_MARKER):
            return Completed(0, b"", b"")  # the server has the code
        if tuple(argv) == ARGV:
            return Completed(0, self._facts().encode(), b"")
        if argv[0] == "sh" and argv[1].endswith("/launch.sh"):
            return self._launch(argv[2], argv[3:] or self._plan.slots, stdin)
        return super().run(argv, stdin=stdin, timeout=timeout)

    def _facts(self) -> str:
        """The answer of the node's check script: containers as a test says, and the workers that live."""
        said = self._place / "facts" / self.node
        lines = said.read_text().splitlines() if said.exists() else []
        for lock in filter(Path.is_file, self._locks.glob("*")):
            with lock.open() as f:
                try:
                    fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    lines.append(f"lock.held={f.read()}/{lock.name}")
        return "\n".join([*lines, "end=1", ""])

    def _launch(self, verb: str, slots: Sequence[str], stdin: bytes) -> Completed:
        env = dict(line.split("=", 1) for line in stdin.decode().splitlines())
        env[LOCKS_ENV] = str(self._locks)
        found = ask(self._place / "server", verb, folder=self._plan.folder, slots=list(slots), env=env)
        lines = {s: f"{s} {state} {'' if code is None else code}\n" for s, state, code in found}
        return Completed(0, "".join(lines.get(s, f"{s} absent\n") for s in slots).encode(), b"")

    @property
    def state(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return self._state.read_text()
        return "up"

    def mend(self) -> None:
        self._state.unlink(missing_ok=True)

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def _carry(self, op: str, act: Callable[[], T]) -> T:
        until = time.monotonic() + ANSWER_S
        while self.state == "stalled":
            if self._closed.wait(LOOK_S) or time.monotonic() > until:
                raise SlowError(self.node, f"no answer to {op}")
        if refusal := REFUSALS.get(self.state):
            raise refusal[0](self.node, refusal[1])
        lost = self._lost(op)
        result = act()
        if lost == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if lost == "after":
            raise TransportError(self.node, f"the connection broke after {op}")
        return result

    def _lost(self, op: str) -> str:
        """Return when this call's answer is to be lost: `after`, `dies`, or "" for not."""
        with self._lock:
            if not self._loses.exists():
                return ""
            wanted, nth, when = self._loses.read_text().split()
            if wanted != op:
                return ""
            if int(nth) > 1:
                self._loses.write_text(f"{wanted} {int(nth) - 1} {when}")
                return ""
            self._loses.unlink()
            return when


class HeldStream(Stream):
    """The node's files, of which nothing new is read while the link is stalled."""

    def __init__(self, link: NodeLink, folder: Path, start: Mapping[str, Mapping[str, int]]) -> None:
        super().__init__(NodePaths(folder), start)
        self.link = link

    def frames(self) -> Iterator[bytes]:
        return iter(()) if self.link.state == "stalled" else super().frames()


class FollowChannel(Channel):
    """The stream of a node: the real follower writes into a pipe, and the link decides what comes through."""

    def __init__(self, link: NodeLink, stream: Stream) -> None:
        self._node, self._link = link.node, link
        self._closed = False
        self._out, into = os.pipe()
        self._cut: int | None = None
        threading.Thread(target=_follow, args=(stream, into), daemon=True).start()

    def read(self, size: int, deadline: float | None = None) -> bytes:
        while not self._closed and not self._link.closed:
            state = self._link.state
            if state in REFUSALS or self._cut == 0:
                return b""
            if state.startswith("cut ") and self._cut is None:
                self._cut = int(state.split()[1])
                self._link.mend()
            if state == "stalled":
                time.sleep(LOOK_S)
            elif select.select([self._out], [], [], LOOK_S)[0]:
                data = os.read(self._out, size if self._cut is None else min(size, self._cut))
                if self._cut is not None:
                    self._cut -= len(data)
                return data
        return b""

    def send(self, data: bytes, deadline: float | None = None) -> None:
        raise TransportError(self._link.node, "the stream takes no input")

    def close(self) -> None:
        self._closed = True

    def error(self) -> str:
        os.close(self._out)  # the follower ends at its next beat
        return "the connection broke"


def _follow(stream: Stream, into: int) -> None:
    try:
        follow(stream, into, BEAT_S)
    except BrokenPipeError:
        pass
    finally:
        os.close(into)
        for followed in stream.files.values():
            if followed.fd >= 0:
                os.close(followed.fd)
