"""Changes of a user's files: one writer at a time, atomic replacement, every old state kept, undo.

A table and the records beside it are one state. Both are kept under one number, `<file>.<number>.<UTC>.bak`; the number
alone says which state is the later one, because a clock may be wrong. An empty kept file of records says that there
were none. The records change first, then the table: a merge that was killed between the two is taken back by the next
merge or undo, which knows it by a kept state that is the table itself.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Any

from orchestrator.errors import TunedDBError
from orchestrator.tables.kinds import records_path
from orchestrator.tables.textfiles import remove_dead_temporaries, sync_folder, write_atomic

LOCK_WAIT_S = 30.0
_STAMP = re.compile(r"(?:\.(\d+))?\.(\d{8}T\d{6}Z)(?:-(\d+))?\.(?:bak|undone)\Z")
"""The end of a kept file's name. Version 0.3 wrote no number, and told files of one second apart by `-2`."""


@contextmanager
def locked(target: Path, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """One writer at a time to a file: an flock on a file beside it, which stays.

    Raises TunedDBError after `wait_s`, and if the lock file cannot be used.
    """
    lock = target.with_name(f".{target.name}.lock")
    fd = _open_lock(lock)
    try:
        until = time.monotonic() + wait_s
        while not _take_lock(fd, lock):
            if time.monotonic() >= until:
                raise TunedDBError(
                    f"{target}: another merge is writing to it (it holds {lock.name}); merge again when it is done"
                )
            time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _open_lock(lock: Path) -> int:
    """Open a lock file, for everybody who may write in its folder: it is made with mode 0666 whatever the umask says.

    It is opened to be written, because NFS grants an exclusive lock to such a file only; another user's file that may
    not be written is opened to be read, which suffices on local disks. A link is never followed. An existing file is
    opened without O_CREAT, which the kernel refuses for another user's file in a folder like /tmp
    (fs.protected_regular).
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o666)
        except FileExistsError:
            try:
                fd = os.open(lock, os.O_RDWR | flags)
            except PermissionError:
                fd = os.open(lock, os.O_RDONLY | flags)
    except OSError as e:
        raise _lock_error(lock, e) from e
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise TunedDBError(f"{lock}: is not a regular file, so nothing can be locked by it; remove it")
    if status.st_uid == os.geteuid():
        os.fchmod(fd, 0o666)
    return fd


def _take_lock(fd: int, lock: Path) -> bool:
    """Return whether the lock is ours now; False if another process holds it. Raises TunedDBError."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as e:
        raise _lock_error(lock, e) from e
    return True


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


def replace(target: Path, parts: Sequence[str], records: Sequence[str], before: os.stat_result | None) -> Path | None:
    """Replace a table and the records beside it; the path of the kept old table.

    `before`: the table as it was read, None where there was none. Raises OSError and TunedDBError; then both files are
    as they were, but for a failure of the very last step, which leaves a whole new table and the old one kept.
    """
    beside, kept, written = records_path(target), dict[Path, Path](), False
    had = beside.exists()
    state = [target, beside] if had or records else [target]
    try:
        if before:
            for path, name in zip(state, _next_names(target, "bak"), strict=False):
                kept[path] = name
                _keep(path, name)
        sync_folder(target.parent)
        if before and _changed(before, target.stat()):
            raise TunedDBError(
                f"{target}: was changed by another process during the merge, and nothing was merged; merge again"
            )
        if written := beside in state:
            write_atomic(beside, lambda f: f.writelines(records), like=beside.stat() if had else before)
        write_atomic(target, lambda f: f.writelines(parts), like=before)
    except BaseException:
        if (target.stat().st_ino if target.exists() else None) == (before.st_ino if before else None):
            if not had:
                beside.unlink(missing_ok=True)
            elif written and beside in kept:
                os.rename(kept[beside], beside)
            for path in kept.values():
                path.unlink(missing_ok=True)
        raise
    return kept.get(target)


def undo(table: Path, lock_wait_s: float = LOCK_WAIT_S) -> dict[str, Any]:
    """Restore the last kept state of a table and its records. The replaced table is kept as
    `<name>.<number>.<UTC>.undone`.

    The document of `db undo`: `restored` is the kept file that is the table again, `aside` what was the table until
    now, `records` says `restored`, `removed` or `left`, `left` is the number of states that can be undone still.

    Raises TunedDBError if nothing is kept, or if nothing can be written; the table is then as it was.
    """
    target = Path(os.path.realpath(table))
    beside = records_path(target)
    if not target.is_file():
        raise TunedDBError(f"{table}: there is no such table")
    try:
        with locked(target, lock_wait_s):
            tidy(target)
            states = kept_states(target)
            if not states:
                raise TunedDBError(
                    f"{table}: nothing to undo: no older state is kept beside it"
                    f" ({target.name}.<number>.<UTC>.bak; a table's first merge has none)"
                )
            kept, records = states[-1], "left"
            of_records = beside.with_name(beside.name + kept.name[len(target.name) :])
            aside, records_aside = _next_names(target, "undone")
            _keep(target, aside)
            if of_records.exists():
                records = "restored" if of_records.stat().st_size else "removed"
                if beside.exists():
                    _keep(beside, records_aside)
                _restore_records(of_records, beside)
            os.rename(kept, target)
            sync_folder(target.parent)
            restored = {"path": str(table), "restored": str(kept), "aside": str(aside), "records": records}
            return {**restored, "left": len(states) - 1}
    except OSError as e:
        raise TunedDBError(f"{table}: cannot be undone (nothing of it is lost): {e.strerror or e}") from e


def tidy(target: Path) -> None:
    """Clean up after a merge or an undo that was killed; the caller holds the lock."""
    beside = records_path(target)
    for path in (target, beside):
        remove_dead_temporaries(path)
    states = kept_states(target)
    if not states or not target.exists() or not states[-1].samefile(target):
        return
    # The table was kept (linked), and never replaced. Its records may have been: they go back first.
    kept_records = beside.with_name(beside.name + states[-1].name[len(target.name) :])
    if kept_records.exists():
        _restore_records(kept_records, beside)
    states[-1].unlink()


def _restore_records(kept: Path, beside: Path) -> None:
    """Make kept records the table's again. An empty file says that it had none."""
    if not kept.stat().st_size:
        beside.unlink(missing_ok=True)
    elif not (beside.exists() and beside.samefile(kept)):  # a rename of a file onto itself would leave both names
        os.rename(kept, beside)
    kept.unlink(missing_ok=True)


def kept_states(target: Path) -> list[Path]:
    """The kept states of a table, the oldest first: those of version 0.3 by their clock, then the numbered ones."""
    kept = []
    for path in target.parent.glob(f"{glob.escape(target.name)}.*.bak"):
        stamp = _STAMP.fullmatch(path.name, len(target.name))
        if stamp and path.is_file():
            number, clock, copy_of_second = stamp.groups()
            kept.append((int(number or 0), clock, int(copy_of_second or 1), path))
    return [path for *_, path in sorted(kept)]


def _next_names(target: Path, word: str) -> tuple[Path, Path]:
    """Names for a table and its records as they are now: `<name>.<number>.<UTC>.<word>`, with a number above every one
    that a kept file of theirs has."""
    names = (path.name for path in target.parent.glob(f"{glob.escape(target.name)}.*"))
    stamps = (_STAMP.search(name) for name in names)
    number = 1 + max((int(stamp[1] or 0) for stamp in stamps if stamp), default=0)
    end = f".{number:04}.{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.{word}"
    return target.with_name(target.name + end), target.with_name(records_path(target).name + end)


def _keep(source: Path, path: Path) -> None:
    """Keep a file durably under a new name, an empty one if the source does not exist. Linked where that is possible:
    the source is only ever replaced, never written to."""
    if source.exists():
        with suppress(OSError):
            os.link(source, path)
            return
    path.touch(exist_ok=False)
    if source.exists():
        shutil.copy2(source, path)
    with path.open("rb") as f:
        os.fsync(f.fileno())


def _changed(a: os.stat_result, b: os.stat_result) -> bool:
    return (a.st_mtime_ns, a.st_size, a.st_ino) != (b.st_mtime_ns, b.st_size, b.st_ino)
