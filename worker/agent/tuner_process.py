"""The agent's handle on the tuner's process: it spawns it, exchanges messages with it, ends it, and says why it ended.

tuner_child.py is what runs in the process. The process leads a session and a process group of its own, so that what it
forked dies with it, and it dies with the agent. Its stdout and stderr are the slot's log. The agent writes commands to
its stdin, one a line; the process writes messages, JSON objects one a line, to a pipe of its own:

    command         means                               messages
    (its start)                                         {"type": "ready", "device": {...}, "timed_canary_s": 0.5}
    C               run the canary                      {"type": "canary", "ok": true, "us": 9.1, "detail": "..."}
    P               time the two known kernels          {"type": "canary_timed", "compute_us": ..., "memory_us": ...}
    T <spec>        tune                                those of worker/tuners/base.py, and `done` with `spent`
    A <shape>       the shape's start is on record      none
    V <spec>        verdicts on blocked candidates           {"type": "alive"}

Instead of the last message of a command, one of the types error, oom, disk_full, fault, hang or interrupted may come,
with `detail`. `TunerProcess.turns` gives the messages as they come.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from worker import PACKAGE_PARENT
from worker.device import numbers, text_of
from worker.process import Child, Stopwatch, exit_words
from worker.protocol import MAX_RECORD_BYTES

UNKILLABLE_S = 5.0
"""A process that SIGKILL does not end within this many seconds is left behind."""
TICK_S = 0.1
_VMSTAT = Path("/proc/vmstat")
TOKEN = "GEMMFLEET_TUNER_OF"
"""Environment variable that marks a tuner's process and all it starts with its node folder and slot."""


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
        argv = [sys.executable, "-u", "-m", "worker", "child", "--tuner", tuner, "--options", json.dumps(options)]
        argv += ["--fd", str(theirs), "--parent", str(os.getpid()), "--slot", place["slot"]]
        argv += ["--node", place["node"], "--node-dir", place["node_dir"]]
        path = os.pathsep.join(filter(None, (str(PACKAGE_PARENT), os.environ.get("PYTHONPATH", ""))))
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
        """We killed it."""
        self.stuck = False
        """It was killed, and the kernel cannot end it."""
        self.exit: int | None = None
        """Its exit status once it is reaped, -N for a signal."""
        self._to_send = bytearray()
        self._received = bytearray()
        self._has_closed = False
        """It closed its side of the pipe."""

    def send(self, line: bytes) -> None:
        """Send a command; what the pipe does not take at once, `pump` writes."""
        self._to_send += line + b"\n"
        self._write()

    def pump(self, timeout: float) -> list[dict[str, Any]]:
        """Wait up to `timeout` seconds for something to happen; the messages that came, in order.

        A line that is no message comes as type `garbled`.
        """
        poll = select.poll()
        if not self._has_closed:
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
        return self._has_closed or self.exit is not None or self._child.returncode is not None

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
        while not self._has_closed and self._read():
            pass
        self._has_closed = True
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
            self._has_closed = True
            return False
        self._received += data
        return True

    def _parse(self) -> list[dict[str, Any]]:
        *lines, rest = self._received.split(b"\n")
        if len(rest) > MAX_RECORD_BYTES:
            lines.append(rest)  # too long for a message: `garbled`
            rest = bytearray()
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
    """(outcome, detail) of a reaped process that ended by itself, without a message why.

    `counters`: those of `oom_counters` from before.
    """
    status = proc.exit
    assert status is not None
    if status != -signal.SIGKILL or proc.killed:
        return "fault", f"the tuner's process {exit_words(status)}"
    if oom_killed(counters):
        return "oom", "the tuner's process was killed by the kernel for memory"
    not_us = "not sent by the worker nor, as far as its counters show, by the kernel for memory"
    return "fault", f"the tuner's process {exit_words(status)}, {not_us}"


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
    counts = {}
    for path in paths:
        count = numbers(text_of(path)).get("oom_kill")
        if count is not None:
            counts[str(path)] = count
    return counts


def _cgroup_files(pid: int, cgroups: Path) -> list[Path]:
    """Files that may hold the process's memory counters; within a container the path of /proc may be the host's."""
    files: dict[str, Path] = {}
    for line in text_of(Path(f"/proc/{pid}/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = cgroups
            name = "memory.events"
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            name = "memory.oom_control"
        else:
            continue
        for folder in (root / path.lstrip("/"), root):
            if (folder / name).is_file():
                files.setdefault(name, folder / name)
    return list(files.values())
