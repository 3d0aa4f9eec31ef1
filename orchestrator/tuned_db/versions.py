"""The versions of a tuned DB: one writer at a time, atomic replacement, every old version kept, undo, split.

A state is the table and the records beside it. Both are kept under one stamp, `<file>.<UTC>.bak`; an empty kept file
of records says that there were none. The records change first: a crash between the two leaves records of which some
fit no row, which is seen, and never a table without its old state.
"""

from __future__ import annotations

import fcntl
import glob
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import TunedDBError
from orchestrator.tuned_db.records import records_path
from orchestrator.userfiles import sync_folder, write_atomic

_STAMP = re.compile(r"\.(\d{8}T\d{6}Z(?:-\d+)?)\.bak\Z")


@dataclass(frozen=True, slots=True)
class Undone:
    """`restored`: the kept file that is the table again; `aside`: what was the table until now; `left`: states that
    can be undone still."""

    path: str
    restored: str
    aside: str
    records: str
    left: int


@contextmanager
def locked(target: Path, wait_s: float) -> Iterator[None]:
    """One writer at a time to a table: an flock on a file beside it, which stays."""
    fd = os.open(target.with_name(f".{target.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        until = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise TunedDBError(
                        f"{target}: another merge is writing to it; merge again when it is done"
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def replace(target: Path, parts: Sequence[str], records: Sequence[str], before: os.stat_result | None) -> Path | None:
    """Replace the table and the records beside it; the path of the kept old table.

    `before`: the table as it was read; None where there was none. Raises OSError and TunedDBError; then both files are
    as they were, but for a failure of the very last step, which leaves a whole new table and the old one kept.
    """
    beside = records_path(target)
    kept: list[Path] = []
    had = beside.exists()
    try:
        if before:
            kept = _keep(target, with_records=had or bool(records))
        sync_folder(target.parent)
        now = target.stat() if before else None
        if before and now and _changed(before, now):
            raise TunedDBError(
                f"{target}: was changed by another process during the merge and is as they left it; merge again"
            )
        if had or records:
            write_atomic(beside, lambda f: f.writelines(records), like=beside.stat() if had else before)
        write_atomic(target, lambda f: f.writelines(parts), like=before)
    except BaseException:
        if _same(target, before):
            _back_out(beside, kept, had)
        raise
    return kept[0] if kept else None


def kept_states(target: Path) -> list[tuple[str, Path]]:
    """(stamp, kept table), the oldest first."""
    found = []
    for path in target.parent.glob(f"{glob.escape(target.name)}.*.bak"):
        stamp = _STAMP.fullmatch(path.name[len(target.name) :])
        if stamp and path.is_file():
            at, _, n = stamp[1].partition("-")
            found.append((at, int(n or 1), stamp[1], path))
    return [(stamp, path) for _, _, stamp, path in sorted(found)]


def undo(table: Path, lock_wait_s: float) -> Undone:
    """Make the last kept state the table again, records too. What was the table is kept as `<name>.<UTC>.undone`.

    Raises TunedDBError where nothing is kept, or nothing can be written; the table is then as it was.
    """
    target = Path(os.path.realpath(table))
    if not target.is_file():
        raise TunedDBError(f"{table}: there is no such table")
    try:
        with locked(target, lock_wait_s):
            states = kept_states(target)
            if not states:
                raise TunedDBError(
                    f"{table}: nothing to undo: no older state is kept beside it"
                    f" ({target.name}.<UTC>.bak; a table's first merge has none)"
                )
            stamp, kept = states[-1]
            aside = _second_name(target, "undone")
            records = _undo_records(target, stamp, _of_records(target, aside))
            _move(kept, target)
            sync_folder(target.parent)
            return Undone(str(table), str(kept), str(aside), records, len(states) - 1)
    except OSError as e:
        raise TunedDBError(f"{table}: cannot be undone (nothing of it is lost): {e.strerror or e}") from e


def _undo_records(target: Path, stamp: str, aside: str) -> str:
    """`restored`, `removed` or `left`. `aside`: the name for what was there until now."""
    beside = records_path(target)
    kept = beside.with_name(f"{beside.name}.{stamp}.bak")
    if not kept.exists():
        return "left"
    if beside.exists():
        _link(beside, beside.with_name(aside))
    if kept.stat().st_size:
        _move(kept, beside)
        return "restored"
    beside.unlink(missing_ok=True)
    kept.unlink()
    return "removed"


def _keep(target: Path, *, with_records: bool) -> list[Path]:
    """The kept table, and the kept records (empty where there were none)."""
    kept = _second_name(target, "bak")
    if not with_records:
        return [kept]
    beside, also = records_path(target), target.with_name(_of_records(target, kept))
    try:
        if beside.exists():
            _link(beside, also)
        else:
            also.touch(exist_ok=False)
    except BaseException:
        kept.unlink(missing_ok=True)
        raise
    return [kept, also]


def _back_out(beside: Path, kept: Sequence[Path], had: bool) -> None:
    """The table was not replaced: the records become what they were, and nothing more is kept."""
    if len(kept) > 1 and kept[1].exists():
        if had:
            _move(kept[1], beside)
        else:
            kept[1].unlink()
            beside.unlink(missing_ok=True)
    elif not had:
        beside.unlink(missing_ok=True)
    for path in kept[:1]:
        path.unlink(missing_ok=True)


def _second_name(target: Path, word: str) -> Path:
    """A second name for the file as it is, never one that is taken: `<name>.<UTC>.<word>`."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for n in range(1, 10_000):
        path = target.with_name(f"{target.name}.{stamp}{f'-{n}' if n > 1 else ''}.{word}")
        if path.exists() or target.with_name(_of_records(target, path)).exists():
            continue
        try:
            _link(target, path)
        except FileExistsError:
            continue
        return path
    raise TunedDBError(f"{target}: has too many kept copies of this second; move some away")


def _of_records(target: Path, path: Path) -> str:
    """The name of the records that belong to a second name of the table."""
    return records_path(target).name + path.name[len(target.name) :]


def _link(source: Path, path: Path) -> None:
    """A hard link, or a copy where there are none. Raises FileExistsError."""
    try:
        os.link(source, path)
    except FileExistsError:
        raise
    except OSError:  # no hard links here
        try:
            with source.open("rb") as f, path.open("xb") as copy:
                shutil.copyfileobj(f, copy)
                copy.flush()
                os.fsync(copy.fileno())
        except FileExistsError:
            raise
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        shutil.copystat(source, path)


def _move(source: Path, path: Path) -> None:
    """Rename, also where both are names of one file: the system leaves both then."""
    os.rename(source, path)
    source.unlink(missing_ok=True)


def _changed(a: os.stat_result, b: os.stat_result) -> bool:
    return (a.st_mtime_ns, a.st_size, a.st_ino) != (b.st_mtime_ns, b.st_size, b.st_ino)


def _same(target: Path, before: os.stat_result | None) -> bool:
    """True where the table is unchanged."""
    try:
        now = target.stat()
    except FileNotFoundError:
        return before is None
    return before is not None and os.path.samestat(now, before)
