"""Runs child processes for the worker: starts one, follows its log, ends it with all its children, describes its exit.

A child leads a session. If the agent's SIGKILL to our session must reach it too, it only leads a process group. Its
members are found in /proc; without /proc only the group gets signals.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, NamedTuple

from worker.text import tail

PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl  # found now: a process that was just forked may not look for it
GRACE_S = 10.0
"""Seconds from SIGINT to SIGKILL of a command in the foreground."""
KILL_WITHIN_S = 2.0
"""Seconds after which we give up a process that SIGKILL does not end."""
POLL_S = 0.002
ASK_POLL_S = 0.05
MAX_STEP_S = 1.0
"""Seconds that one turn of a Stopwatch counts at most."""
READ_AT_ONCE = 1 << 20
MAX_LINE_BYTES = 65536
"""A longer line is cut."""


class Child:
    """A child process, with all processes that it starts."""

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
        """Start it. `out`: descriptor for both outputs, None for ours. `keep`: further descriptors that it inherits.
        `session`: it leads a session; else it leads a process group, and the kernel kills it when we end. Raises
        OSError."""
        self._session = session
        self._proc = subprocess.Popen(
            list(argv),
            stdin=stdin,
            stdout=out,
            stderr=subprocess.STDOUT,
            pass_fds=keep,
            cwd=cwd,
            env=dict(env),
            start_new_session=session,
            preexec_fn=None if session else _lead_group,  # process_group= came with Python 3.11
        )
        self.pid = self._proc.pid

    @property
    def stdin(self) -> IO[bytes]:
        assert self._proc.stdin is not None
        return self._proc.stdin

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal, None while it runs.

        `kill` reaps it, and nothing before: while it is a zombie, no other group can get its number.
        """
        if self._proc.returncode is None:
            return self._peek(os.WNOHANG)
        return self._proc.returncode

    def wait(self, seconds: float) -> bool:
        """Wait at most this many seconds for its end; return whether it ended."""
        until = time.monotonic() + seconds
        while self.returncode is None:
            if time.monotonic() > until:
                return False
            time.sleep(POLL_S)
        return True

    def wait_for_end(self) -> int:
        """Wait for its end, however long it takes, and return the exit status."""
        status = self._peek(0)
        assert status is not None
        return status

    def members(self) -> dict[int, str]:
        """Living processes of its session (or group): process number -> program name."""
        members = {}
        for pid in _numbers():
            stat = _stat(pid)
            if stat is not None and self.pid == (stat.session if self._session else stat.group):
                members[pid] = stat.name
        return members

    def signal(self, number: int) -> None:
        """Send a signal to its whole group, as a terminal does."""
        if self._proc.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def stop(self, grace_s: float) -> None:
        """Send SIGINT to the group, and SIGKILL after `grace_s` seconds. No process of it survives."""
        if self.returncode is None:
            self.signal(signal.SIGINT)
            self.wait(grace_s)
        self.kill()

    def kill(self, within_s: float = KILL_WITHIN_S) -> None:
        """Send SIGKILL to all members until none is left, then reap it.

        Give up after `within_s` seconds if the kernel cannot end a process (stuck in a driver). Then `returncode` may
        be None.
        """
        if self._proc.returncode is not None:
            return
        until = time.monotonic() + within_s
        while True:
            self.signal(signal.SIGKILL)
            others = [pid for pid in self.members() if pid != self.pid]
            for pid in others:
                with suppress(OSError):  # it ended meanwhile, or is another user's
                    os.kill(pid, signal.SIGKILL)
            if (not others and self.returncode is not None) or time.monotonic() > until:
                break
            time.sleep(POLL_S)  # again: one may have forked meanwhile
        self.reap()

    def reap(self) -> None:
        """Reap it if it has ended. Its number is free then."""
        self._proc.poll()

    def _peek(self, options: int) -> int | None:
        """The exit status without reaping."""
        try:
            info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | options)
        except ChildProcessError:  # another thread reaped it
            return self._proc.wait()
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


class OutputLog:
    """The log file of a child, read while it grows."""

    def __init__(self, path: Path) -> None:
        """Create the file if it does not exist. Existing content is not read. Raises OSError."""
        self.path = path
        with self.open() as f:
            self._start = f.tell()
        self._offset = self._start

    def open(self) -> IO[bytes]:
        """Open it for a child to append to."""
        return open(self.path, "ab")

    def read(self, mirror: int | None = None) -> bytes:
        """Bytes printed since the last call, at most READ_AT_ONCE. They are copied to the descriptor `mirror`."""
        with open(self.path, "rb") as f:
            f.seek(self._offset)
            data = f.read(READ_AT_ONCE)
        self._offset += len(data)
        if mirror is not None:
            with suppress(OSError):  # the slot's log is full or closed; this log has it
                write_all(mirror, data)
        return data

    def tail(self, limit: int) -> str:
        """The end of the output, cleaned, at most `limit` bytes."""
        with open(self.path, "rb") as f:
            return tail(f.fileno(), self._start, limit)


def write_all(fd: int, data: bytes) -> None:
    """Write all of it, however little the descriptor takes at once."""
    while data:
        data = data[os.write(fd, data) :]


class Splitter:
    """Splits arriving bytes into whole lines. A carriage return ends a line too (progress bars)."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that ended in `data`."""
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in lines if line.strip()]


class Stopwatch:
    """Seconds between turns of a loop. A turn counts at most MAX_STEP_S, so that a paused machine is not a hang."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def turn(self) -> float:
        """Seconds since the last turn."""
        now = time.monotonic()
        seconds = now - self._last
        self._last = now
        return min(seconds, MAX_STEP_S)


def ask_child(
    argv: Sequence[str],
    out: IO[bytes],
    *,
    env: Mapping[str, str],
    limit_s: float,
    cwd: Path | None = None,
    alive: Callable[[], None] = lambda: None,
) -> int | None:
    """Run a program that answers once, with both outputs appended to `out`, and end whatever it started.

    Returns its exit status, None if it did not end within `limit_s` seconds. `alive` is called again and again
    meanwhile. Raises OSError if it cannot be started.
    """
    child = Child(argv, env=env, cwd=cwd, out=out.fileno())
    stopwatch = Stopwatch()
    seconds = 0.0
    try:
        while not child.wait(ASK_POLL_S):
            seconds += stopwatch.turn()
            if seconds > limit_s:
                return None
            alive()
        return child.returncode
    finally:
        child.kill()


def run_in_foreground(
    argv: Sequence[str], env: Mapping[str, str], cwd: Path | None = None, *, until_eof: bool = False
) -> int:
    """Run a command to its end, with both outputs on our standard output. Return its exit status. Raises OSError.

    `until_eof`: the end of our standard input ends it too, like Ctrl-C: first by SIGINT.
    """
    sys.stdout.flush()
    child = Child(argv, env=env, cwd=cwd, session=True)
    eof = threading.Event()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        eof.set()
        child.stop(GRACE_S)

    if until_eof:
        threading.Thread(target=watch, daemon=True).start()
    try:
        status = child.wait_for_end()
    except KeyboardInterrupt:
        child.stop(GRACE_S)
        raise
    child.kill() if eof.is_set() else child.reap()
    return status


def exit_words(status: int) -> str:
    """An exit status in words: `was killed by SIGSEGV`, `exited with status 3`."""
    return f"exited with status {status}" if status >= 0 else f"was killed by {signal_name(-status)}"


class WorkerEnd(NamedTuple):
    """The end of a worker, as launch.sh, tune.sh or Docker saw it."""

    code: int
    """The exit code as a shell shows it: 128 + N for a signal."""
    began: float
    """Epoch seconds."""
    ended: float
    out_of_memory: bool

    @classmethod
    def read(cls, path: Path) -> WorkerEnd | None:
        """The end that a script noted (`137 1790000000 1790000012 false`; Docker's times are ISO); None if none is."""
        try:
            code, began, ended, memory = path.read_text(errors="replace").split()
            return cls(int(code), _seconds(began), _seconds(ended), memory == "true")
        except (OSError, ValueError):
            return None

    @property
    def words(self) -> str:
        """`it ended with code 137 (SIGKILL) after 12 s, ended from outside`."""
        text = f"it ended with code {self.code}"
        if self.code > 128:
            text += f" ({signal_name(self.code - 128)})"
        text += f" after {max(0.0, self.ended - self.began):.0f} s"
        if self.out_of_memory:
            return f"{text}, because its memory was used up"
        killed = self.code in (128 + signal.SIGKILL, 128 + signal.SIGTERM)
        return f"{text}, ended from outside (docker kill, a user, or the kernel)" if killed else text


def _seconds(text: str) -> float:
    """Epoch seconds of a number, or of Docker's `2026-11-29T05:56:52.470159073Z`."""
    if text.isdigit():
        return float(text)
    return datetime.fromisoformat(text[:19]).replace(tzinfo=timezone.utc).timestamp()


def signal_name(number: int) -> str:
    """SIGSEGV for 11; `signal 99` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends."""
    _PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)


def is_alive(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    return _stat(pid) is not None


def cpu_seconds(pids: Sequence[int]) -> float:
    """Processor seconds that these processes have used."""
    return sum(stat.ticks for stat in map(_stat, pids) if stat) / os.sysconf("SC_CLK_TCK")


def kill_marked(mark: str) -> list[int]:
    """Kill every process that was started with the environment variable `mark` (NAME=value). Return their numbers."""
    killed: list[int] = []
    for pid in _numbers():
        if pid in (os.getpid(), os.getppid()):
            continue
        with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as f:  # it ended meanwhile, or is another user's
            if mark.encode() in f.read().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
    return killed


class _Stat(NamedTuple):
    """A living process from /proc/PID/stat. `ticks`: processor ticks that it has used."""

    name: str
    group: int
    session: int
    ticks: int


def _stat(pid: int) -> _Stat | None:
    """Read /proc/PID/stat. None if the process has ended; a zombie has ended too."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            name, _, rest = f.read().decode(errors="replace").rpartition(")")
        state, _, group, session, *cells = rest.split()
        ticks = int(cells[7]) + int(cells[8])  # utime and stime, the 14th and 15th of proc(5)
        return None if state in "ZX" else _Stat(name.partition("(")[2], int(group), int(session), ticks)
    except (OSError, ValueError, IndexError):
        return None


def _numbers() -> list[int]:
    return [int(n) for n in os.listdir("/proc") if n.isdigit()] if os.path.isdir("/proc") else []


def _lead_group() -> None:
    """The first action of a new process: lead a group, and end when the parent ends."""
    os.setpgrp()
    _PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
