"""Rows from the files that a tuner writes, by column name, and the verdict on a shape from its rows.

The files are rewritten whole and not atomically after every batch, so a read may meet half of one: a line counts only
with its newline and all its cells, and what was read once is kept (`Harvest`). AITER writes `Null` for what is missing,
-1 for a candidate that could not run, inf for one that crashed, hung or (before 2025-12-30) raised.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from worker.families import Family, backend_of
from worker.protocol import Row
from worker.text import plural
from worker.tuners.aiter.progress import ShapeKeys

MAX_FILE_BYTES = 512 * 1024 * 1024
_NULLS = frozenset(("", "null", "nan", "none", "na", "<na>"))
_ALIASES = {"solidx": "kernelId", "err_ratio": "errRatio", "ksplit": "splitK"}
_MEASURED = frozenset(("us", "us1", "us2", "tflops", "bw", "errRatio", "err_ratio", "err", "err1", "err2"))
_FMOE_INT = ("block_m", "run_1stage", "xbf16", "flat")
_FMOE_FLOAT = ("us1", "us2")
_FMOE_TEXT = ("kernelName1", "err1", "kernelName2", "err2")

Cells = dict[str, str]


def read_cells(path: Path) -> list[Cells]:
    """The whole lines of a CSV, cells stripped, by header name. Empty where there is nothing whole to read."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path.name} is larger than {MAX_FILE_BYTES} bytes")
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    whole = data[: data.rfind(b"\n") + 1].decode(errors="replace")
    lines = csv.reader(io.StringIO(whole))
    header = [name.strip() for name in next(lines, [])]
    out: list[Cells] = []
    for line in lines:
        if len(line) == len(header):
            out.append({name: cell.strip() for name, cell in zip(header, line, strict=True) if name})
    return out


def is_null(cell: str | None) -> bool:
    return cell is None or cell.strip().lower() in _NULLS


def parse_number(cell: str | None) -> float | None:
    """A number, also inf; None for Null and what is none. A trailing % counts as hundredths."""
    if cell is None or is_null(cell):
        return None
    text = cell.strip()
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value


def _finite(cell: str | None) -> float | None:
    """A number that is not inf."""
    value = parse_number(cell)
    return value if value is not None and math.isfinite(value) else None


def to_row(family: Family, cells: Mapping[str, str], limit: float) -> Row:
    """A line of a tuned or profile file as a row of ours. `limit`: the largest errRatio of an `ok`."""
    c = {_ALIASES.get(name, name): cell for name, cell in cells.items()}
    us = parse_number(c.get("us"))
    err = _error(family, c)
    name = c.get("kernelName") or c.get("kernelName1") or ""
    row = Row(us=-1.0, kernelName="" if is_null(name) else name, libtype=backend_of(family.name, c))
    for column in ("kernelId", "splitK"):
        if (value := _finite(c.get(column))) is not None:
            row[column] = int(value)
    for column in ("tflops", "bw"):
        if (value := _finite(c.get(column)) or 0.0) > 0:
            row[column] = value
    if err is not None and math.isfinite(err):
        row["errRatio"] = err
    if us is None or us <= 0:
        row["status"], row["detail"] = "unsupported", "AITER could not run it (-1)" if us == -1 else "no time"
        if us == 0:
            row["status"], row["detail"] = "error", "AITER measured 0 us, which cannot be"
    elif math.isinf(us):
        row["status"], row["detail"] = "error", "no time (inf): it crashed, hung or raised"
    else:
        row["us"] = us
        wrong = err is None or err > limit
        row["status"] = "wrong" if wrong else "ok"
        row["detail"] = "AITER gave no error for it" if err is None else ""
    if family.two_stages:
        _add_stages(row, c)
    return row


def _error(family: Family, c: Mapping[str, str]) -> float | None:
    if not family.two_stages:
        return parse_number(c.get("errRatio"))
    stages = [parse_number(c.get(name)) for name in ("err1", "err2", "err")]
    known = [e for e in stages if e is not None]
    return max(known) if known else parse_number(c.get("errRatio"))


def _add_stages(row: Row, c: Mapping[str, str]) -> None:
    """fmoe's own columns, as AITER wrote them."""
    for column in (*_FMOE_INT, *_FMOE_FLOAT):
        if (value := _finite(c.get(column))) is not None:
            row[column] = int(value) if column in _FMOE_INT else value
    for column in _FMOE_TEXT:
        if column in c and not is_null(c[column]):
            row[column] = c[column]


def is_winner(row: Row, limit: float) -> bool:
    """True if the row can settle a shape: a time, an error within the limit, a kernel's name."""
    return row["us"] > 0 and row.get("errRatio", 1.0) <= limit and bool(row["kernelName"])


def best_row(rows: Iterable[Row], limit: float) -> Row | None:
    """The fastest right row, the first of equals."""
    right = (r for r in rows if r.get("status") == "ok" and is_winner(r, limit))
    return min(right, key=lambda r: r["us"], default=None)


class Harvest:
    """Rows of one process's files so far, by shape; a file that shrinks or breaks takes nothing back."""

    def __init__(
        self, family: Family, columns: tuple[str, ...], shapes: Mapping[int, Mapping[str, int | str]], limit: float
    ) -> None:
        self._family = family
        self._theirs = tuple(zip(columns, family.to_aiter(columns), strict=True))
        self._limit = limit
        self._keys = ShapeKeys(columns, shapes)
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._tuned: dict[int, Row] = {}
        self._profile: dict[int, dict[tuple[str, ...], Row]] = {}
        self.devices: set[tuple[str, str]] = set()
        """(gfx, cu_num) as AITER wrote them; gfx "" where its tables have none."""

    def read(self, tuned: Path, profile: Path | None) -> bool:
        """Take in what is new in the files; True if there was anything."""
        new = False
        if self._changed(tuned):
            for shape, cells in self._of_shapes(read_cells(tuned)):
                row = to_row(self._family, cells, self._limit)
                new |= self._tuned.get(shape) != row
                self.devices.add((cells.get("gfx", ""), cells.get("cu_num", "")))
                self._tuned[shape] = row
        if profile is not None and self._changed(profile):
            for shape, cells in self._of_shapes(read_cells(profile)):
                known = self._profile.setdefault(shape, {})
                ident = _ident(cells)
                if ident not in known:
                    known[ident] = to_row(self._family, cells, self._limit)
                    new = True
        return new

    def tuned(self, shape: int) -> Row | None:
        """The row of the tuned file, sound or not."""
        return self._tuned.get(shape)

    def candidates(self, shape: int) -> list[Row]:
        """The rows of the profile file, in its order."""
        return list(self._profile.get(shape, {}).values())

    def _of_shapes(self, lines: Sequence[Cells]) -> Iterable[tuple[int, Cells]]:
        for cells in lines:
            named = tuple(f"{c}={cells[t]}" for c, t in self._theirs if t in cells)
            shape = self._keys.find(named, named=True)
            if shape is not None:
                yield shape, cells

    def _changed(self, path: Path) -> bool:
        try:
            info = path.stat()
        except OSError:
            return False
        stamp = (info.st_mtime_ns, info.st_size)
        if self._stamps.get(path) == stamp:
            return False
        self._stamps[path] = stamp
        return True


def _ident(cells: Mapping[str, str]) -> tuple[str, ...]:
    """Identity of a candidate within its shape: all cells that were not measured."""
    return tuple(cell for name, cell in cells.items() if name not in _MEASURED)


@dataclass(frozen=True, slots=True)
class ShapeVerdict:
    """A winner, or a reason (of SHAPE_VERDICTS) and a detail."""

    winner: Row | None
    reason: str = ""
    detail: str = ""


def shape_verdict(
    family: Family,
    tuned: Row | None,
    candidates: Sequence[Row],
    limit: float,
    *,
    chip: str = "",
    left_out: int = 0,
) -> ShapeVerdict:
    """AITER's own winner where it is sound, else the best of its candidates, else why there is none.

    `chip`: AITER's message that the family is not for this chip, if any. `left_out`: how many candidates were not
    tried, as they had faulted before.
    """
    if tuned is not None and is_winner(tuned, limit):
        return ShapeVerdict(tuned)
    if not family.two_stages:  # its winner is a pair of stages, which a profile row is not
        made = best_row(candidates, limit)
        if made is not None:
            why = "AITER named no winner" if tuned is None else f"AITER's own winner cannot be ({_fault(tuned, limit)})"
            return ShapeVerdict({**made, "detail": f"chosen among AITER's measured candidates: {why}"})
    if chip:
        return ShapeVerdict(None, "unsupported", chip)
    if tuned is not None and not candidates:
        return ShapeVerdict(None, "no_candidate", f"AITER's winner cannot be ({_fault(tuned, limit)})")
    if not candidates:
        return ShapeVerdict(None, "no_candidate", "AITER found no kernel that takes the shape")
    if family.two_stages and not (candidates := _of_stages_without_a_right_kernel(candidates)):
        return ShapeVerdict(None, "no_candidate", "each stage has right kernels, but no two of one block_m")
    measured = [r for r in candidates if _ran(r)]
    if measured:
        least = min((r.get("errRatio", math.inf) for r in measured), default=math.inf)
        shown = f"{least:.3g}" if math.isfinite(least) else "unknown"
        words = (
            f"{len(measured)} of {plural(len(candidates), 'candidate')} ran, none is right: the least error is {shown}"
        )
        return ShapeVerdict(None, "wrong_result", f"{words}, the limit {limit:g}")
    errors = sum(1 for r in candidates if r.get("status") == "error")
    left_out = min(left_out, errors)
    lost = errors - left_out
    cannot = len(candidates) - lost - left_out
    parts = [f"{cannot} cannot take the shape", f"{lost} crashed, hung or raised"]
    parts += [f"{left_out} were left out, for they had faulted before"] if left_out else []
    return ShapeVerdict(None, "no_candidate", f"none of {plural(len(candidates), 'candidate')} ran: {', '.join(parts)}")


def _ran(row: Mapping[str, object]) -> bool:
    """True if it has a time, be it of a stage alone."""
    return any(isinstance(us := row.get(name), (int, float)) and us > 0 for name in ("us", "us1", "us2"))


def _of_stages_without_a_right_kernel(candidates: Sequence[Row]) -> list[Row]:
    """Without the candidates of a stage that has a right one: the other stage is why there is no winner."""
    right = {_stage(r) for r in candidates if r.get("status") == "ok"} - {0}
    return [r for r in candidates if _stage(r) not in right]


def _stage(row: Mapping[str, object]) -> int:
    """1 or 2 of a stage measured alone, 0 of a pair or of one kernel for both."""
    names = bool(row.get("kernelName1")), bool(row.get("kernelName2"))
    return 0 if row.get("run_1stage") else {(True, False): 1, (False, True): 2}.get(names, 0)


def _fault(row: Row, limit: float) -> str:
    if row["us"] <= 0:
        return "it has no time"
    if row.get("errRatio", 1.0) > limit:
        return f"its error is {row.get('errRatio', math.nan):g}, the limit {limit:g}"
    return "it names no kernel"
