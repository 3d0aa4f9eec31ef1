"""Lock on a device of this host: one run at a time measures on a GPU, or on the cores, whatever its work folder.

The locks are files in one folder that every user of the host may open (LOCKS). A worker holds its device's by flock
until it ends. The file says whose it is, for the others.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from worker.protocol import LOCKS, LOCKS_ENV
from worker.text import clean

MAX_OWNER = 200


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
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
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
