"""Fork server of the fleet: workers and controllers start in milliseconds, as children of one process that has imported
what they need.

A worker is the real agent (`worker.agent.loop`) in a process of its own, and its tuner is the real child
(`worker.agent.tuner_child`) in another, so that a fault can abort, stop or kill either. Both are forked instead of
executed. The server does what launch.sh does: one worker a slot, started again when it dies, told to end, or killed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from orchestrator.engine.docker_options import RESTARTS
from worker import process
from worker.__main__ import main as worker_main
from worker.agent import loop, tuner_process


@dataclass
class _Process:
    """A forked process with the parts of subprocess.Popen that `process.Child` uses."""

    pid: int
    stdin: IO[bytes]
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class ForkedChild(process.Child):
    """The tuner's process as the agent starts it, forked from the agent."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        out: int | None = None,
        stdin: int = subprocess.DEVNULL,
        keep: Sequence[int] = (),
        session: bool = False,
    ) -> None:
        assert session
        assert out is not None
        self._session = session
        theirs, ours = os.pipe()

        def tune() -> int:
            os.environ.clear()
            os.environ.update(env)
            return worker_main(list(argv[argv.index("worker") + 1 :]))

        self.pid = _fork(tune, theirs, out, keep)
        os.close(theirs)
        self._proc: Any = _Process(self.pid, os.fdopen(ours, "wb", 0))


def _fork(work: Callable[[], int], stdin: int, out: int, keep: Sequence[int] = ()) -> int:
    """Fork a process that leads a session, has these descriptors and no others, and ends with the status of `work`."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        process.die_with(parent)
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(stdin, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        last = 2
        for fd in sorted(keep):
            os.closerange(last + 1, fd)
            last = fd
        os.closerange(last + 1, 4096)
        status = work()
    except BaseException as e:  # noqa: BLE001 - whatever it was, the log must tell, and the process end here
        sys.excepthook(type(e), e, e.__traceback__)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


@dataclass
class Worker:
    """A slot's worker. `code`: its status once it is not started again."""

    folder: Path
    slot: str
    env: dict[str, str]
    pid: int = 0
    code: int | None = None
    failures: int = 0
    stopping: bool = False

    def start(self) -> None:
        (self.folder / "logs").mkdir(exist_ok=True)
        null = os.open(os.devnull, os.O_RDWR)
        log = os.open(self.folder / "logs" / f"{self.slot}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.pid = _fork(self._run, null, log)
        os.close(null)
        os.close(log)

    def _run(self) -> int:
        os.chdir(self.folder)
        os.environ.update(self.env)
        return loop.main(self.folder, self.slot)

    def ended(self, code: int) -> None:
        """Start it again as launch.sh does, or note its end."""
        self.pid = 0
        self.failures += 1
        if code == 0 or self.stopping or self.failures > RESTARTS:
            self.code = code
        else:
            self.start()


@dataclass
class Server:
    """Answers requests, one JSON object a connection, and collects children that ended."""

    listener: socket.socket
    workers: dict[tuple[str, str], Worker] = field(default_factory=dict)
    codes: dict[int, int | None] = field(default_factory=dict)
    """Status of every controller, None while it runs."""

    def serve(self) -> None:
        """Serve until standard input ends; then nothing of ours is left."""
        told, tell = os.pipe()
        os.set_blocking(tell, False)
        signal.set_wakeup_fd(tell)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            inputs: list[Any] = [0, self.listener, told]
            ready, _, _ = select.select(inputs, [], [])
            if told in ready:
                os.read(told, 4096)
            self._collect()
            if self.listener in ready:
                connection, _ = self.listener.accept()
                # a controller may be killed before it asked, or before it has its answer
                with contextlib.suppress(OSError, json.JSONDecodeError), connection, connection.makefile("rwb") as wire:
                    wire.write(json.dumps(self.answer(json.loads(wire.readline()))).encode() + b"\n")
            if 0 in ready and not os.read(0, 1):
                self.end("/")
                return

    def _collect(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid in self.codes:
                self.codes[pid] = code
            for worker in self.workers.values():
                if worker.pid == pid:
                    worker.ended(code)

    def answer(self, request: Mapping[str, Any]) -> Any:
        """The answer to `control`, `code`, `end`, or a verb of launch.sh on a node folder."""
        verb = request["verb"]
        if verb == "control":
            return self._control(request)
        if verb == "code":
            return self.codes[request["pid"]]
        if verb == "end":
            return self.end(request["below"])
        folder, slots = request["folder"], request["slots"]
        found = {s: w for s in slots if (w := self.workers.get((folder, s)))}
        if verb == "start":
            for slot in slots:
                if slot not in found or not found[slot].pid:
                    worker = self.workers[folder, slot] = Worker(Path(folder), slot, request["env"])
                    worker.start()
        elif verb in ("stop", "kill"):
            for worker in found.values():
                worker.stopping = True
                if worker.pid:
                    os.kill(worker.pid, signal.SIGKILL if verb == "kill" else signal.SIGTERM)
        return [[s, "running", None] if w.pid else [s, "ended", w.code] for s, w in found.items()]

    def _control(self, request: Mapping[str, Any]) -> int:
        from tests.fleet.control import main

        null = os.open(os.devnull, os.O_RDWR)
        out = os.open(request["out"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        pid = _fork(lambda: main(request), null, out)
        os.close(null)
        os.close(out)
        self.codes[pid] = None
        return pid

    def end(self, below: str) -> list[int]:
        """Kill all workers whose folder lies below; their ids."""
        killed = []
        for worker in self.workers.values():
            if worker.folder.is_relative_to(below):
                worker.stopping = True
                if worker.pid:
                    os.kill(worker.pid, signal.SIGKILL)
                    killed.append(worker.pid)
        for pid, code in self.codes.items() if below == "/" else ():
            if code is None:
                os.kill(pid, signal.SIGKILL)
        return killed


def ask(server: Path, verb: str, **fields: Any) -> Any:
    """Ask the server that listens there."""
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(str(server))
        with s.makefile("rwb") as wire:
            wire.write(json.dumps({"verb": verb, **fields}).encode() + b"\n")
            wire.flush()
            return json.loads(wire.readline())


def main(place: Path) -> None:
    """Listen at a socket."""

    import worker.tuners.replay  # noqa: F401 - imported once, for all that are forked

    vars(tuner_process)["Child"] = ForkedChild
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place))
    listener.listen(64)
    gc.freeze()
    print("ready", flush=True)
    Server(listener).serve()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
