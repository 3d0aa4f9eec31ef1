"""A process of AITER in a process group and with a log of its own, ended together with all that it started.

The group stays in the session of the tuner's process, so that the agent's SIGKILL reaches it too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
READ_AT_ONCE = 1 << 20


class AiterProcess:
    """One process, started at once."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path) -> None:
        """Raises OSError."""
        self._log = log
        with open(log, "ab") as out:
            self._at = out.tell()
            self._proc = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=cwd,
                env=dict(env),
                preexec_fn=_own_group(),  # process_group= came with Python 3.11
            )
        self._lines = Splitter()
        self.pid = self._proc.pid

    @property
    def returncode(self) -> int | None:
        """Its status once it ended."""
        return self._proc.poll()

    def read(self, mirror: int | None = None) -> tuple[list[str], bool]:
        """(lines that ended since the last time, whether there was output). `mirror`: a descriptor for all bytes."""
        with open(self._log, "rb") as f:
            f.seek(self._at)
            data = f.read(READ_AT_ONCE)
        self._at += len(data)
        if mirror is not None and data:
            _write_all(mirror, data)
        return self._lines.feed(data), bool(data)

    def tree(self) -> dict[int, str]:
        """Its living descendants and itself: number to name of program."""
        return {pid: name for pid, (name, _, group, _) in _processes().items() if group == self.pid}

    def interrupt(self) -> None:
        """SIGINT to the whole group, as from a terminal."""
        _signal_group(self.pid, signal.SIGINT)

    def stop(self, grace_s: float) -> None:
        """SIGINT, and after `grace_s` an end by force."""
        if self.returncode is None:
            self.interrupt()
            until = time.monotonic() + grace_s
            while self.returncode is None and time.monotonic() < until:
                time.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the group, until nothing of it is left but what the kernel cannot end."""
        until = time.monotonic() + 2.0
        _signal_group(self.pid, signal.SIGKILL)
        while (self.tree() or self.returncode is None) and time.monotonic() < until:
            _signal_group(self.pid, signal.SIGKILL)
            time.sleep(0.01)


class Splitter:
    """Bytes as they come to whole lines; a carriage return ends a line too (progress bars)."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that ended in `data`."""
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        if len(self._rest) > 65536:
            lines, self._rest = [*lines, self._rest], b""
        return [line.decode(errors="replace") for line in lines if line.strip()]


def alive(pid: int) -> bool:
    """True if a process exists and is no zombie."""
    found = _stat(pid)
    return found is not None and found[1] not in "ZX"


def busy_s(pids: Sequence[int]) -> float:
    """Processor seconds that these processes have used."""
    return sum(found[3] for found in map(_stat, pids) if found) / os.sysconf("SC_CLK_TCK")


def _own_group() -> Callable[[], None]:
    """First act of a new process: lead a group of its own, and end when its parent ends."""
    try:
        import ctypes

        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (ImportError, OSError, AttributeError):
        return os.setpgrp

    def first() -> None:
        os.setpgrp()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    return first


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass


def _processes() -> dict[int, tuple[str, str, int, int]]:
    """By number: (name, state, process group, clock ticks used) of everything alive."""
    out = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if entry.isdigit():
            found = _stat(int(entry))
            if found is not None and found[1] not in "ZX":
                out[int(entry)] = found
    return out


def _stat(pid: int) -> tuple[str, str, int, int] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            data = f.read().decode(errors="replace")
        name = data[data.index("(") + 1 : data.rindex(")")]
        rest = data[data.rindex(")") + 2 :].split()
        return name, rest[0], int(rest[2]), int(rest[11]) + int(rest[12])
    except (OSError, ValueError, IndexError):
        return None


def _write_all(fd: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:  # the slot's log is full or closed; the tuner's own log has it
        pass
