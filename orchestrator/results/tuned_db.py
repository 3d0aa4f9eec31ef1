"""Merging newcomers into a tuned table: one champion per key, judged once against what is there (law 9)."""

from __future__ import annotations

import csv
import fcntl
import io
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from orchestrator.errors import TunedDBError
from orchestrator.families import Family
from orchestrator.results.atomic import sync_folder, write_atomic
from orchestrator.results.champions import Newcomer, champions, kernel_of, key_dict
from orchestrator.results.table import GFX_OF_CU_NUM, Table, TableRow, read_table

MARGIN = 0.03
"""An incumbent goes only if beaten by more than this share of its time (AITER: --min_improvement_pct 3.0)."""

LOCK_WAIT_S = 30.0

Action = Literal["added", "replaced", "kept", "rejected"]
ACTIONS: tuple[Action, ...] = ("added", "replaced", "kept", "rejected")


@dataclass(frozen=True, slots=True)
class MergeRow:
    """What became of a newcomer. `key` holds gfx, cu_num and the family's columns; times are in microseconds."""

    action: Action
    key: dict[str, int | str]
    old_us: float | None
    new_us: float | None
    old_kernel: str
    new_kernel: str
    why: str


@dataclass(frozen=True, slots=True)
class MergeReport:
    """A merge, row by row. `backup` is the old file where it was changed, `created` whether there was none."""

    path: str
    rows: tuple[MergeRow, ...]
    backup: str | None
    created: bool
    notes: tuple[str, ...]

    def count(self, action: Action) -> int:
        """How many rows ended so."""
        return sum(1 for r in self.rows if r.action == action)

    @property
    def changed(self) -> bool:
        """Whether the file is another one now."""
        return any(r.action in ("added", "replaced") for r in self.rows)

    def to_json(self) -> dict[str, Any]:
        """For merge.json."""
        return {**asdict(self), "counts": {a: self.count(a) for a in ACTIONS}}


def merge(
    newcomers: Iterable[Mapping[str, Any]],
    into: Path,
    family: Family,
    *,
    margin: float = MARGIN,
    err_ratio: float | None = None,
    lock_wait_s: float = LOCK_WAIT_S,
) -> MergeReport:
    """Merge rows (by the names of `family.tuned_header`, and `spread` where known) into the table at `into`.

    Per key (gfx, cu_num, the family's columns) the newcomer with the lowest us challenges the incumbent
    and replaces it if faster by more than the larger of `margin` and its own spread. Header, column order
    and every untouched line of the file stay as they are; a new file gets the family's header. The old
    file is kept as `<name>.<UTC>.bak`. Nothing is written where nothing changes. What cannot be a row (see
    `champions`) is reported as rejected. Raises TunedDBError; the table is then as it was.
    """
    best, bad = champions(newcomers, family, err_ratio)
    rejected = tuple(MergeRow("rejected", r.key, None, r.us, "", r.kernel, r.why) for r in bad)
    report = MergeReport(str(into), rejected, None, False, ())
    if not best:
        return report
    target = Path(os.path.realpath(into))
    if not target.parent.is_dir():
        raise TunedDBError(f"{into}: there is no folder {target.parent}; make it first")
    try:
        with _locked(target, lock_wait_s):
            before = target.stat() if target.exists() else None
            table = read_table(target, family) if before else _empty(target, family)
            parts, judged = _judge(table, best, family, margin)
            report = replace(report, rows=(*judged, *rejected), created=before is None, notes=table.notes)
            if not report.changed:
                return report
            backup = _write(target, parts, before)
            return replace(report, backup=str(backup) if backup else None)
    except OSError as e:
        raise TunedDBError(f"{into}: cannot be written (nothing of it is lost): {e.strerror or e}") from e


def _empty(path: Path, family: Family) -> Table:
    return Table(path, family.tuned_header, (",".join(family.tuned_header) + "\n",), (), ())


def _judge(table: Table, best: Sequence[Newcomer], family: Family, margin: float) -> tuple[list[str], list[MergeRow]]:
    """(the parts of the new file, what became of each champion)."""
    _refuse_mixing(table, best)
    parts = list(table.parts)
    there = {r.key: r for r in table.rows if not r.tag}
    report: list[MergeRow] = []
    for new in best:
        old = there.get(new.key)
        action, why = _verdict(old, new, margin)
        kernel = kernel_of(dict(zip(table.header, old.cells, strict=True))) if old else ""
        us = old.us if old else None
        report.append(MergeRow(action, key_dict(new.key, family), us, new.us, kernel, new.kernel, why))
        if action == "added":
            if not parts[-1].endswith(("\n", "\r")):
                parts[-1] += table.newline
            parts.append(_line(table, new, family))
        elif action == "replaced" and old is not None:
            parts[old.part] = _line(table, new, family)
    return parts, report


def _verdict(old: TableRow | None, new: Newcomer, margin: float) -> tuple[Action, str]:
    if old is None:
        return "added", "the table had no row of this key"
    if old.us is None:
        return "replaced", "the old row had no time"
    gain, needed = (old.us - new.us) / old.us, max(margin, new.spread)
    if gain > needed:
        return "replaced", f"faster by {gain:.1%}"
    if gain > 0:
        why = "its own spread" if needed > margin else "the margin"
        return "kept", f"faster by {gain:.1%}, which is not more than {why} of {needed:.1%}"
    return "kept", f"slower by {-gain:.1%}" if gain < 0 else "as fast as the old row"


def _refuse_mixing(table: Table, best: Sequence[Newcomer]) -> None:
    """In a table without a gfx column a row means the gfx that follows from its cu_num, and no other may go in."""
    if "gfx" in table.header:
        return
    odd = sorted({(str(n.key[0]), int(n.key[1])) for n in best if GFX_OF_CU_NUM.get(int(n.key[1])) != n.key[0]})
    if odd:
        which = ", ".join(f"{gfx} with cu_num {cu}" for gfx, cu in odd)
        raise TunedDBError(
            f"{table.path}:1: has no gfx column, so rows of {which} cannot be told from others in it;"
            " give the table a gfx column, or merge into another file"
        )


def _line(table: Table, new: Newcomer, family: Family) -> str:
    cells = {**new.cells, **{k: str(v) for k, v in key_dict(new.key, family).items()}}
    out = io.StringIO()
    csv.writer(out, lineterminator=table.newline).writerow([cells.get(n, "") for n in table.header])
    return out.getvalue()


def _write(target: Path, parts: Sequence[str], before: os.stat_result | None) -> Path | None:
    """Replace the file; the path of the kept old one."""
    backup = _keep(target) if before else None
    try:
        sync_folder(target.parent)
        now = target.stat() if before else None
        if before and now and (now.st_mtime_ns, now.st_size, now.st_ino) != (
            before.st_mtime_ns, before.st_size, before.st_ino,
        ):  # fmt: skip
            raise TunedDBError(
                f"{target}: was changed by somebody else during the merge and is as they left it; merge again"
            )
        write_atomic(target, lambda f: f.writelines(parts), like=before)
    except BaseException:
        if backup and before and os.path.samestat(target.stat(), before):
            backup.unlink(missing_ok=True)
        raise
    return backup


def _keep(target: Path) -> Path:
    """A second name for the file as it is, never one that is taken: `<name>.<UTC>.bak`."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for n in range(1, 10_000):
        backup = target.with_name(f"{target.name}.{stamp}{f'-{n}' if n > 1 else ''}.bak")
        try:
            os.link(target, backup)
        except FileExistsError:
            continue
        except OSError:  # no hard links here
            if backup.exists():
                continue
            with target.open("rb") as source, backup.open("xb") as copy:
                shutil.copyfileobj(source, copy)
                os.fsync(copy.fileno())
            shutil.copystat(target, backup)
        return backup
    raise TunedDBError(f"{target}: has too many kept copies of this second; move some away")


@contextmanager
def _locked(target: Path, wait_s: float) -> Iterator[None]:
    """One merge at a time into a table: an flock on a file beside it, which stays."""
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
