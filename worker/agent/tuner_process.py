"""The tuner's process, from both sides: the agent's handle on it, why it ended, and what runs in it.

The agent spawns it, exchanges messages with it, interrupts, kills and reaps it. It leads a session and a process group
of its own, so that what it forked dies with it, and it dies with the agent. It reads commands on stdin, one a line: `C`
canary, `P` timed canary, `T <spec>` tune, `V <spec>` verdicts on blocked candidates, `A <shape>` the shape's start is
on record. It writes messages, JSON objects one a line, to a pipe of its own; its stdout and stderr are the slot's log.

It holds one tuner, kept between attempts. SIGINT ends the running attempt, with the message `interrupted`; between
attempts it is ignored. An exception of the tuner is a message and no crash; the end of the process by its libraries (a
GPU fault, an abort) is noticed by the agent.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from worker import PACKAGE_PARENT
from worker.device import numbers, text_of
from worker.process import Child, Stopwatch, die_with, exit_words, write_all
from worker.protocol import MAX_RECORD_BYTES, Spec
from worker.text import clean
from worker.tuners.base import Configurable, Emit, Judging, Place, Timed, Tuner, TunerFault
from worker.tuners.catalog import TunerNotFoundError, make_tuner

UNKILLABLE_S = 5.0
TICK_S = 0.1
NO_START = 3  # exit status where the tuner did not start; the message before it has the reason
_VMSTAT = Path("/proc/vmstat")
# environment variable that marks a tuner's process and all it starts with its node folder and slot
TOKEN = "GEMMFLEET_TUNER_OF"


class TunerProcess:
    """A running child. Call `pump` often: it moves bytes both ways and returns the tuner's messages."""

    def __init__(
        self,
        tuner: str,
        options: Mapping[str, Any],
        place: Mapping[str, str],
        env: Mapping[str, str],
        log_fd: int,
    ) -> None:
        """Spawn it. `place`: node_dir, node, slot, token. Raises OSError."""
        messages, theirs = os.pipe()
        argv = [
            sys.executable,
            "-u",
            "-m",
            "worker",
            "child",
            "--tuner",
            tuner,
            "--options",
            json.dumps(options),
            "--fd",
            str(theirs),
            "--parent",
            str(os.getpid()),
            "--slot",
            place["slot"],
            "--node",
            place["node"],
            "--node-dir",
            place["node_dir"],
        ]
        path = os.pathsep.join(p for p in (str(PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")) if p)
        try:
            self._child = Child(
                argv,
                stdin=subprocess.PIPE,
                out=log_fd,
                keep=(theirs,),
                session=True,
                cwd=PACKAGE_PARENT,
                env={**os.environ, **env, "PYTHONPATH": path, TOKEN: place["token"]},
            )
        except OSError:
            os.close(messages)
            raise
        finally:
            os.close(theirs)
        self.pid = self._child.pid
        self._in = self._child.stdin.fileno()
        self._messages = messages
        os.set_blocking(self._in, False)
        os.set_blocking(messages, False)
        self.spawned = time.monotonic()
        self.killed = False
        self.stuck = False
        self.exit: int | None = None
        self._to_send = bytearray()
        self._received = bytearray()
        self._ended = False

    def send(self, line: bytes) -> None:
        """Send a command; what the pipe does not take at once, `pump` writes."""
        self._to_send += line + b"\n"
        self._write()

    def pump(self, timeout: float) -> list[dict[str, Any]]:
        """Wait up to `timeout` seconds for something to happen; the messages that came, in order.

        A line that is no message comes as type `garbled`.
        """
        poll = select.poll()
        if not self._ended:
            poll.register(self._messages, select.POLLIN)
            if self._to_send:
                poll.register(self._in, select.POLLOUT)
        for fd, _ in poll.poll(timeout * 1000):
            if fd == self._in:
                self._write()
            else:
                self._read()
        return self._parse()

    def turns(self, tick: Callable[[], None]) -> Iterator[tuple[list[dict[str, Any]], float]]:
        """Its messages as they come, in turns of TICK_S at most: each calls `tick`, and says how many seconds passed.

        Once it is gone it is reaped, and the last turn has its last messages.
        """
        watch = Stopwatch()
        while not self.gone:
            messages = self.pump(TICK_S)
            tick()
            yield messages, watch.turn()
        yield self.reap(), 0.0

    @property
    def gone(self) -> bool:
        """The process ended, or closed its side of the pipe. Call `reap` then."""
        return self._ended or self.exit is not None or self._child.returncode is not None

    def interrupt(self) -> None:
        """SIGINT to the child alone: it decides what becomes of its own children."""
        if self.exit is None and self._child.returncode is None:
            os.kill(self.pid, signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL to the whole session: the group, and groups that the tuner made for processes of its own."""
        if self.exit is None:
            self.killed = True
            self._child.kill()

    def reap(self, grace: float = 1.0) -> list[dict[str, Any]]:
        """End what is left of it (after `grace` seconds by force), set `exit`; its last messages.

        A process that the kernel cannot end (stuck in a driver) is left behind after UNKILLABLE_S: `stuck`.
        """
        if self.exit is not None:
            return []
        self.killed |= not self._child.wait(grace)
        self._child.kill(UNKILLABLE_S)
        status = self._child.returncode
        self.stuck = status is None
        self.exit = -signal.SIGKILL if status is None else status
        while not self._ended and self._read():
            pass
        self._ended = True
        return self._parse()

    def close(self, grace: float = 2.0) -> None:
        """Ask it to end by closing its stdin, then end it."""
        with suppress(OSError):
            self._child.stdin.close()
        self.reap(grace)
        if self._messages >= 0:
            os.close(self._messages)
            self._messages = -1

    def _write(self) -> None:
        try:
            del self._to_send[: os.write(self._in, self._to_send[:65536])]
        except BlockingIOError:
            pass
        except OSError:  # it closed its stdin: `gone` is true soon
            self._to_send.clear()

    def _read(self) -> bool:
        """One read; True where there was something."""
        try:
            data = os.read(self._messages, 65536)
        except BlockingIOError:
            return False
        if not data:
            self._ended = True
            return False
        self._received += data
        return True

    def _parse(self) -> list[dict[str, Any]]:
        *lines, rest = self._received.split(b"\n")
        if len(rest) > MAX_RECORD_BYTES:
            lines, rest = [*lines, rest], bytearray()
        self._received = rest
        return [_message(bytes(line)) for line in lines]


def _message(line: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(line) if len(line) <= MAX_RECORD_BYTES else None
    except (ValueError, RecursionError):
        raw = None
    if isinstance(raw, dict) and isinstance(raw.get("type"), str):
        return raw
    return {"type": "garbled", "detail": f"the tuner's process sent {len(line)} bytes that are no message"}


def slot_token(root: Path, slot: str) -> str:
    """The token of a slot's tuner: by the folder itself, which may have the same path in several containers."""
    info = os.stat(root)
    return f"{root.resolve()}:{info.st_dev}.{info.st_ino}:{slot}"


def ending_of(proc: TunerProcess, counters: dict[str, int]) -> tuple[str, str]:
    """(outcome, detail) of a process that ended by itself, without a message why; `counters` are from before."""
    status = proc.exit
    if status == -signal.SIGKILL and not proc.killed:
        if oom_killed(counters):
            return "oom", "the tuner's process was killed by the kernel for memory"
        not_us = "not sent by the worker nor, as far as its counters show, by the kernel for memory"
        return "fault", f"the tuner's process {exit_words(status)}, {not_us}"
    assert status is not None
    return "fault", f"the tuner's process {exit_words(status)}"


def oom_counters(pid: int, cgroups: Path = Path("/sys/fs/cgroup")) -> dict[str, int]:
    """Counters of the kernel's out-of-memory killer that cover the process, by file; empty where none can be read.

    A SIGKILL has no sender's name, but the kernel counts its own: `oom_kill` in a cgroup's memory.events (v2) or
    memory.oom_control (v1), which has precedence because it counts only ours, and for the machine in /proc/vmstat.
    """
    return _oom_kills(_cgroup_files(pid, cgroups)) or _oom_kills([_VMSTAT])


def oom_killed(before: Mapping[str, int]) -> bool:
    """True where one of the counters has risen since `before`."""
    now = _oom_kills(map(Path, before))
    return any(now.get(path, 0) > count for path, count in before.items())


def _oom_kills(paths: Iterable[Path]) -> dict[str, int]:
    found = {str(path): numbers(text_of(path)).get("oom_kill") for path in paths}
    return {path: count for path, count in found.items() if count is not None}


def _cgroup_files(pid: int, cgroups: Path) -> list[Path]:
    """Files that may hold the process's memory counters; within a container the path of /proc may be the host's."""
    found: dict[str, Path] = {}
    for line in text_of(Path(f"/proc/{pid}/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = cgroups, "memory.events"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.oom_control"
        else:
            continue
        for folder in (root / path.lstrip("/"), root):
            if (folder / name).is_file():
                found.setdefault(name, folder / name)
    return list(found.values())


def serve(tuner: str, options: str, fd: int, parent: int, place: Place) -> int:
    """Be the tuner's process until stdin ends; the exit status."""
    os.set_inheritable(fd, False)
    die_with(parent)
    faulthandler.enable()
    _offer_to_oom_killer()
    wire = Wire(fd)
    try:
        held = make_tuner(tuner)
        if isinstance(held, Configurable):
            held.configure(json.loads(options), place)
        timed = {"timed_canary_s": held.timed_canary_s} if isinstance(held, Timed) else {}
        wire.send({"type": "ready", "device": held.open(), **timed})
    except BaseException as e:  # noqa: BLE001 - whatever it was, the agent must know
        wire.send(_error(e))
        return NO_START
    while line := sys.stdin.buffer.readline():
        if not line.startswith(b"A"):  # an answer to what was interrupted meanwhile
            wire.send(wire.interruptible(lambda line=line: _execute(line, held, wire)))  # type: ignore[misc]
    return 0


def _execute(line: bytes, tuner: Tuner, wire: Wire) -> dict[str, Any]:
    """Execute one command; its last message."""
    try:
        if line.startswith(b"C"):
            ok, us, detail = tuner.canary()
            return {"type": "canary", "ok": bool(ok), "us": float(us), "detail": clean(str(detail))}
        if line.startswith(b"P"):
            assert isinstance(tuner, Timed)
            compute, memory = tuner.time_canary()
            return {"type": "canary_timed", "compute_us": float(compute), "memory_us": float(memory)}
        if line.startswith(b"V"):
            if isinstance(tuner, Judging):
                tuner.judge(Spec.loads(line[2:]))
            return {"type": "alive"}
        spent = tuner.tune(Spec.loads(line[2:]), Emit(wire.send_in_tune))
        return {"type": "done", "spent": {str(k): float(v) for k, v in spent.items()}}
    except Exception as e:  # noqa: BLE001 - a tuner may raise anything
        return _error(e)


class Wire:
    """Pipe to the agent, with the handling of SIGINT: it never tears a message and never ends an idle child."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._busy = False
        self._sending = False
        self._held = False
        signal.signal(signal.SIGINT, self._on_sigint)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def send(self, message: dict[str, Any]) -> None:
        """Write one message whole. A tuner's helper threads may call it as well."""
        line = json.dumps(message, separators=(",", ":"), default=_plain).encode() + b"\n"
        main = threading.current_thread() is threading.main_thread()
        with self._lock:
            self._sending = main
            try:
                write_all(self._fd, line)
            finally:
                self._sending = False
        if main and self._held:
            self._held = False
            raise KeyboardInterrupt

    def send_in_tune(self, message: dict[str, Any]) -> None:
        """Send a message; a shape's start returns only when it is on record, so that whatever happens names it."""
        self.send(message)
        if message["type"] != "shape_started":
            return
        answer = b"A %d\n" % message["shape"]
        while (line := sys.stdin.buffer.readline()) != answer:
            if not line:
                os._exit(0)  # the agent is gone

    def interruptible(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The last message of `work`, or `interrupted` if SIGINT came while it ran."""
        try:
            self._busy = True
            try:
                return work()
            finally:
                self._busy = False
        except KeyboardInterrupt:
            self._busy = self._held = False
            return {"type": "interrupted"}

    def _on_sigint(self, _signal: int, _frame: FrameType | None) -> None:
        if not self._busy:
            return
        if self._sending:
            self._held = True
            return
        raise KeyboardInterrupt


def _offer_to_oom_killer() -> None:
    """Have the kernel kill the tuner before the agent, which reports it, where memory runs out."""
    path = Path("/proc/self/oom_score_adj")
    with suppress(OSError, ValueError):
        path.write_text(str(min(1000, int(path.read_text()) + 300)))


def _error(e: BaseException) -> dict[str, Any]:
    """The message for an exception: `oom`, `disk_full` or `error`. Its traceback goes to the log."""
    name, text = type(e).__name__, str(e)
    if isinstance(e, TunerFault):  # its text is complete, a traceback adds nothing
        return {"type": e.outcome, "detail": clean(text)}
    full = isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT)
    kind = "disk_full" if full else "error"
    if isinstance(e, MemoryError) or name == "OutOfMemoryError" or "out of memory" in text.lower():
        traceback.clear_frames(e.__traceback__)  # let go of what filled the memory
        kind = "oom"
    if not isinstance(e, TunerNotFoundError):
        with suppress(OSError):  # the log's disk may be full
            traceback.print_exception(type(e), e, e.__traceback__)
    return {"type": kind, "detail": clean(f"{name}: {text}" if text else name)}


def _plain(value: Any) -> Any:
    """JSON for numpy's and torch's scalars."""
    return value.item() if hasattr(value, "item") else str(value)
