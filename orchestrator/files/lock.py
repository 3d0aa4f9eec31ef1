"""Locks a file of a user for one writer: an flock on `.<name>.lock` beside it.

Merges into tuned tables (`orchestrator/tables/merge.py`) and into config files (`orchestrator/configs/journal.py`)
write within `locked`.

The holder removes the lock file before it lets go, so that nothing of ours stays in a user's folder. Another process
may have opened that file meanwhile, and then locks one that is gone. So a lock counts only if the file that is locked
is the one in the folder (`_is_in_folder`), and whoever waits opens it anew for each try.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote

from orchestrator.errors import TunedDBError

LOCK_WAIT_S = 30.0
"""A merge of the largest tables takes a few seconds."""
RETRY_S = 0.02
FOR_EVERYBODY = 0o666
"""The mode of a lock file: whoever may write in its folder may lock."""


@contextmanager
def locked(target: Path, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """One writer at a time to a file. Raises TunedDBError after `wait_s`, and if the lock file cannot be used."""
    lock = target.with_name(f".{target.name}.lock")
    deadline = time.monotonic() + wait_s
    while (fd := _take_lock(lock)) is None:
        if time.monotonic() >= deadline:
            raise TunedDBError(
                f"{target}: another merge is writing to it (it holds {lock.name}); merge again when it is done"
            )
        time.sleep(RETRY_S)
    try:
        yield
    finally:
        if _is_in_folder(fd, lock):
            with suppress(OSError):  # another user's, in a folder like /tmp
                lock.unlink()
        os.close(fd)


def _take_lock(lock: Path) -> int | None:
    """Lock the file and return its descriptor; None if another process holds or removes it. Raises TunedDBError."""
    try:
        fd = _open_lock(lock)
    except OSError as e:
        if e.errno == errno.ENOENT and lock.parent.is_dir():  # removed just before we opened it
            return None
        raise _lock_error(lock, e) from e
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_in_folder(fd, lock):
            return fd
    except BlockingIOError:
        pass
    except OSError as e:
        if e.errno != errno.ESTALE:  # removed from another machine, on NFS
            os.close(fd)
            raise _lock_error(lock, e) from e
    os.close(fd)
    return None


def _is_in_folder(fd: int, lock: Path) -> bool:
    """Return whether the open file is still the lock file in the folder."""
    try:
        return os.path.samestat(os.fstat(fd), lock.lstat())
    except OSError:
        return False


def _open_lock(lock: Path) -> int:
    """Open a lock file, for everybody who may write in its folder: it is made with mode 0666 whatever the umask says.

    It is opened to be written, because NFS grants an exclusive lock to such a file only; another user's file that may
    not be written is opened to be read, which suffices on local disks. A link is never followed. An existing file is
    opened without O_CREAT, which the kernel refuses for another user's file in a folder like /tmp
    (fs.protected_regular). Raises OSError, TunedDBError.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, FOR_EVERYBODY)
    except FileExistsError:
        try:
            fd = os.open(lock, os.O_RDWR | flags)
        except PermissionError:
            fd = os.open(lock, os.O_RDONLY | flags)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise TunedDBError(f"{lock}: is not a regular file, so nothing can be locked by it; remove it")
    if status.st_uid == os.geteuid():
        os.fchmod(fd, FOR_EVERYBODY)
    return fd


def _lock_error(lock: Path, e: OSError) -> TunedDBError:
    if e.errno == errno.ELOOP:
        return TunedDBError(f"{lock}: is a symbolic link, and a lock file is not; remove it")
    if not lock.parent.is_dir():
        return TunedDBError(f"{lock.parent}: there is no such folder; nothing was changed")
    if e.errno in (errno.EACCES, errno.EPERM, errno.EBADF) and lock.exists():
        return TunedDBError(
            f"{lock}: this lock file cannot be used ({e.strerror}); its owner (uid {lock.lstat().st_uid}) can run:"
            f" chmod 666 {quote(str(lock))}"
        )
    return TunedDBError(f"{lock}: this lock file cannot be used: {e.strerror or e}; nothing was changed")
