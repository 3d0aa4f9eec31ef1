"""Changes of a user's files: one writer at a time, atomic replacement, every old state kept, undo.

A table and the records beside it are one state. Both are kept under one stamp, `<file>.<UTC>.bak`. An empty kept file
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from orchestrator.errors import TunedDBError
from orchestrator.tables.kinds import records_path
from orchestrator.tables.textfiles import sync_folder, write_atomic

LOCK_WAIT_S = 30.0
_STAMP = re.compile(r"\.(\d{8}T\d{6}Z)(?:-(\d+))?\.bak\Z")


@contextmanager
def locked(target: Path, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """One writer at a time to a file: an flock on a file beside it, which stays. Raises TunedDBError after `wait_s`."""
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
    """Replace a table and the records beside it; the path of the kept old table.

    `before`: the table as it was read, None where there was none. Raises OSError and TunedDBError; then both files are
    as they were, but for a failure of the very last step, which leaves a whole new table and the old one kept.
    """
    beside, kept, written = records_path(target), dict[Path, Path](), False
    had = beside.exists()
    state = [target, beside] if had or records else [target]
    try:
        if before:
            for path, name in zip(state, _second_names(target, "bak"), strict=False):
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
    """Restore the last kept state of a table and its records. The replaced table is kept as `<name>.<UTC>.undone`.

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
            states = kept_states(target)
            if not states:
                raise TunedDBError(
                    f"{table}: nothing to undo: no older state is kept beside it"
                    f" ({target.name}.<UTC>.bak; a table's first merge has none)"
                )
            kept, records = states[-1], "left"
            of_records = beside.with_name(beside.name + kept.name[len(target.name) :])
            aside, records_aside = _second_names(target, "undone")
            _keep(target, aside)
            if of_records.exists():
                records = "restored" if of_records.stat().st_size else "removed"
                if beside.exists():
                    _keep(beside, records_aside)
                os.rename(of_records, beside)
                if records == "removed":
                    beside.unlink()
            os.rename(kept, target)
            sync_folder(target.parent)
            restored = {"path": str(table), "restored": str(kept), "aside": str(aside), "records": records}
            return {**restored, "left": len(states) - 1}
    except OSError as e:
        raise TunedDBError(f"{table}: cannot be undone (nothing of it is lost): {e.strerror or e}") from e


def kept_states(target: Path) -> list[Path]:
    """The kept states of a table, the oldest first."""
    names = target.parent.glob(f"{glob.escape(target.name)}.*.bak")
    found = ((_STAMP.fullmatch(path.name[len(target.name) :]), path) for path in names if path.is_file())
    return [path for _, path in sorted(((m[1], int(m[2] or 1)), path) for m, path in found if m)]


def _second_names(target: Path, word: str) -> tuple[Path, Path]:
    """Names for a table and its records as they are, never one that is taken: `<name>.<UTC>.<word>`."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for n in range(1, 10_000):
        end = f".{stamp}{f'-{n}' if n > 1 else ''}.{word}"
        names = target.with_name(target.name + end), target.with_name(records_path(target).name + end)
        if not any(name.exists() for name in names):
            return names
    raise TunedDBError(f"{target}: has too many kept copies of this second; move some away")


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
