"""The locks of a worker: its slot's in the node folder, and its device's on the host. It holds both until it ends.

So only one run at a time measures on a GPU, or on the cores, even if the runs have different work folders. The devices'
locks are files in one folder that every user of the host may open (LOCKS). A lock file names its owner for the others.
If a worker cannot open the file, another user may hold it: the device counts as occupied.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import stat
import time
from contextlib import suppress
from pathlib import Path

from worker.agent.records import FULL
from worker.protocol import LOCKS, LOCKS_ENV
from worker.text import clean

MAX_OWNER = 200
LOCK_PATIENCE_S = 2.0
"""`worker follow` holds a slot's lock for an instant to see whether the agent lives."""


class SlotTakenError(Exception):
    """Another agent holds the slot."""


class DeviceLock:
    """The lock of one device."""

    def __init__(self, name: str, owner: str) -> None:
        """`name`: the file's name, from the slot's variable DEVICE_LOCK. `owner`: RUN/NODE, the content of the file
        while we hold the lock."""
        self._path = Path(os.environ.get(LOCKS_ENV) or LOCKS).absolute() / name
        self._owner = owner
        self._fd = -1
        self.holder = ""
        """The owner that the last `take` found (RUN/NODE), or a sentence that begins with the path of a closed lock."""

    @property
    def is_closed(self) -> bool:
        """Return whether the last `take` could not open the file, so that nobody knows who measures there."""
        return self.holder.startswith("/")

    def take(self) -> bool:
        """Take the lock if nobody holds it, and return whether it is ours. Raises OSError if the file system has no
        locks."""
        if self._fd >= 0:
            return True
        try:
            fd = self._open()
        except OSError as e:
            self.holder = f"{_place_and_owner(self._path)} ({e.strerror})"
            return False
        if not _locked(fd):
            self.holder = clean(os.pread(fd, MAX_OWNER, 0).decode(errors="replace"))
            os.close(fd)
            return False
        self._fd = fd  # not inherited, so a tuner's process cannot keep the device after its worker is gone
        with suppress(OSError):  # on a full disk the others read no name
            os.ftruncate(fd, 0)
            os.pwrite(fd, self._owner.encode()[:MAX_OWNER], 0)
        return True

    def _open(self) -> int:
        """Open the file, or create it for all users. Raises OSError, also for what is not a regular file."""
        # without O_CREAT: the kernel refuses it in a sticky folder for a file of another user (fs.protected_regular)
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        before = os.umask(0)
        try:
            self._path.parent.mkdir(0o1777, exist_ok=True)
            try:
                fd = os.open(self._path, flags)
            except FileNotFoundError:
                fd = os.open(self._path, flags | os.O_CREAT, 0o666)
        finally:
            os.umask(before)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "it is not a regular file")
        return fd


def _place_and_owner(path: Path) -> str:
    """`PATH of OWNER, mode 600`: of the file, or of its folder if the file is not there or cannot be seen."""
    for place in (path, path.parent):
        with suppress(OSError):
            info = place.lstat()
            owner = f"user {info.st_uid}"
            with suppress(KeyError):
                owner = pwd.getpwuid(info.st_uid).pw_name
            return f"{place} of {owner}, mode {stat.S_IMODE(info.st_mode):o}"
    return str(path)


def lock_slot(path: Path) -> int:
    """Lock the slot's lock file and write our pid into it. Raises SlotTakenError after LOCK_PATIENCE_S.

    The descriptor is not inherited, so the tuner's process cannot keep the slot after the agent is gone.
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
    """Write into the slot's lock file: our process id, and below it the `holder` of the device that we wait for."""
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
