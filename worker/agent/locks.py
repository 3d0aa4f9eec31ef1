"""Locks of a worker, held by flock until it ends: its slot's in the node folder, and its device's on the host.

One run at a time measures on a GPU, or on the cores, whatever its work folder. The devices' locks are files in one
folder that every user of the host may open (LOCKS). A file says whose it is, for the others.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from worker.agent.records import FULL
from worker.protocol import LOCKS, LOCKS_ENV
from worker.text import clean

MAX_OWNER = 200
LOCK_PATIENCE_S = 2.0  # `worker follow` holds a slot's lock for an instant to see whether the agent lives


class SlotTakenError(Exception):
    """Another agent holds the slot."""


class DeviceLock:
    """The lock of one device. `owner`: what the file says while we hold it."""

    def __init__(self, name: str, owner: str) -> None:
        self._path = Path(os.environ.get(LOCKS_ENV) or LOCKS) / name
        self._owner = owner
        self._fd = -1
        self.holder = ""
        """The owner that the last `take` found."""

    def take(self) -> bool:
        """Take the lock if nobody holds it; return whether it is ours. Raises OSError if there can be no lock."""
        if self._fd >= 0:
            return True
        fd = self._open()
        if not _locked(fd):
            self.holder = clean(os.pread(fd, MAX_OWNER, 0).decode(errors="replace"))
            os.close(fd)
            return False
        os.ftruncate(fd, 0)
        os.pwrite(fd, self._owner.encode()[:MAX_OWNER], 0)
        self._fd = fd  # not inherited: a tuner's process must not keep the device when its worker is gone
        return True

    def _open(self) -> int:
        # without O_CREAT: the kernel refuses it in a sticky folder for a file of another user (fs.protected_regular)
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        before = os.umask(0)
        try:
            self._path.parent.mkdir(0o1777, exist_ok=True)
            try:
                return os.open(self._path, flags)
            except FileNotFoundError:
                return os.open(self._path, flags | os.O_CREAT, 0o666)
        finally:
            os.umask(before)


def lock_slot(path: Path) -> int:
    """The slot's lock file, locked, our pid in it. Raises SlotTakenError after LOCK_PATIENCE_S.

    The descriptor is not inherited: the tuner's process must not keep the slot when the agent is gone.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + LOCK_PATIENCE_S
    while not _locked(fd):
        if time.monotonic() > until:
            holder = os.pread(fd, 20, 0).decode(errors="replace").partition("\n")[0].strip() or "unknown"
            os.close(fd)
            raise SlotTakenError(f"slot {path.parent.name} has an agent already (process {holder})")
        time.sleep(0.02)
    sign(fd)
    return fd


def sign(fd: int, waits_for: str = "") -> None:
    """Write into the slot's lock file: our process id, and below it the owner of the device that we wait for."""
    os.ftruncate(fd, 0)
    try:
        os.pwrite(fd, f"{os.getpid()}\n{waits_for}".encode(), 0)
    except OSError as e:
        if e.errno not in FULL:
            raise


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
