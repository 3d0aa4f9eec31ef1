"""Makes rows of candidates from AITER's CSV files and the shim's records, and the verdict on a shape from its rows.

After every batch AITER rewrites its files, not atomically, so we may read half a file. A line counts only with its
newline and all its cells, and lines once read are kept (`Tables`). AITER writes `Null` for missing values, -1 for a
candidate that could not run, and inf for one that crashed, hung or (before 2025-12-30) raised an exception.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.families import BACKENDS, Family, backend_of
from worker.protocol import FIELDS, Row
from worker.text import plural
from worker.tuners.aiter.blocklist import CandidateId, is_number

_NULLS = frozenset(("", "null", "nan", "none", "na", "<na>"))
_ALIASES = {"solidx": "kernelId", "err_ratio": "errRatio", "ksplit": "splitK"}
_MEASURED = frozenset(("us", "us1", "us2", "tflops", "bw", "errRatio", "err_ratio", "err", "err1", "err2"))
_KINDS = {f.name: f.kind for f in FIELDS}
_READ_APART = frozenset(("us", "kernelName", "libtype", "errRatio"))
"""Fields of a row that `to_row` does not copy from the column of their name."""

Cells = dict[str, str]
Keys = Mapping[int, Mapping[str, int | str]]


@dataclass(frozen=True, slots=True)
class JournalStep:
    """One record of the shim: a candidate began, ended, or was left out (`blocked`, `skipped`). `shape` is None if the
    key is not one of our shapes. `said`: AITER's output while the candidate ran."""

    event: str
    shape: int | None
    candidate: CandidateId
    pid: int
    us: float = -1.0
    err: float = 1.0
    said: str = ""


def read_cells(path: Path) -> list[Cells]:
    """The whole lines of a CSV by header name, cells stripped."""
    data = path.read_bytes()
    lines = csv.reader(io.StringIO(data[: data.rfind(b"\n") + 1].decode(errors="replace")))
    header = [name.strip() for name in next(lines, [])]
    return [
        {name: cell.strip() for name, cell in zip(header, line, strict=True) if name}
        for line in lines
        if len(line) == len(header)
    ]


def parse_number(cell: str | None) -> float | None:
    """A number, also inf; None for Null and for text. A trailing % counts as hundredths."""
    text = (cell or "").strip()
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value


def to_row(family: Family, cells: Mapping[str, str], limit: float) -> Row:
    """A line of a tuned or profile file as a row of ours. `limit`: the largest errRatio of an `ok`."""
    c = {_ALIASES.get(name, name): cell for name, cell in cells.items()}
    us, err = parse_number(c.get("us")), _error(family, c)
    name = c.get("kernelName") or c.get("kernelName1") or ""
    row: Row = {"us": -1.0, "kernelName": "" if name.lower() in _NULLS else name}
    row["libtype"] = backend_of(family.name, c)
    for column in dict.fromkeys(("kernelId", "splitK", "tflops", "bw", *family.result_columns)):
        if column not in _KINDS or column in _READ_APART:
            continue
        value: Any = c.get(column, "")
        if (kind := _KINDS[column]) is not str:
            number = parse_number(value)
            value = kind(number) if number is not None and math.isfinite(number) else ""
        if str(value).lower() not in _NULLS and (column not in ("tflops", "bw") or value > 0):
            row[column] = value
    if err is not None and math.isfinite(err):
        row["errRatio"] = err
    if us is None or us < 0:
        row["status"], row["detail"] = "unsupported", "AITER could not run it (-1)" if us == -1 else "no time"
    elif us == 0:
        row["status"], row["detail"] = "error", "AITER measured 0 us, which cannot be"
    elif math.isinf(us):
        row["status"], row["detail"] = "error", "no time (inf): it crashed, hung or raised"
    else:
        row["us"], row["status"] = us, "ok" if err is not None and err <= limit else "wrong"
        row["detail"] = "AITER gave no error for it" if err is None else ""
    return row


def _error(family: Family, c: Mapping[str, str]) -> float | None:
    known = [e for name in ("err1", "err2", "err") if (e := parse_number(c.get(name))) is not None]
    return max(known) if known and family.two_stages else parse_number(c.get("errRatio"))


class KernelNames:
    """Kernel names as tables have them, by backend and number: each backend of a family counts from 0."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], str] = {}

    def learn(self, row: Row) -> None:
        """Keep the name that a row of a table has."""
        if row["kernelName"] and "kernelId" in row:
            self._known[row.get("libtype", ""), row["kernelId"]] = row["kernelName"]

    def find(self, libtype: str, number: int) -> str:
        """The kernel's name; "" if it is not known, or if it is not known which backend's number it is."""
        found = {name for (of, known), name in self._known.items() if known == number and libtype in ("", of)}
        return found.pop() if len(found) == 1 else ""


def step_row(family: Family, step: JournalStep, limit: float, names: KernelNames, detail: str = "") -> Row:
    """A candidate of the shim's records as a row; `names`: kernel names, because many records have none."""
    stage, numbers = step.candidate.stage, [v for v in step.candidate.ident if is_number(v)]
    words = [v for v in step.candidate.ident if v and not is_number(v) and v not in ("True", "False", "None", stage)]
    cells = {"us": repr(step.us), "errRatio": repr(step.err), "err": repr(step.err)}
    cells["libtype"] = next((w for w in words if w in BACKENDS), "")
    cells["kernelName"] = next((w for w in words if w not in BACKENDS), "")
    if not family.two_stages:
        cells |= dict(zip(("kernelId", "splitK"), numbers, strict=False))
        if numbers and not cells["kernelName"]:
            libtype = cells["libtype"] or backend_of(family.name, cells)
            cells["kernelName"] = names.find(libtype, int(numbers[0]))
    row = to_row(family, cells, limit)
    if step.event != "end":
        row["status"], row["detail"] = "error", detail or step.event
    return _stage_row(row, stage, numbers) if stage else row


def _stage_row(row: Row, stage: str, numbers: Sequence[str]) -> Row:
    """The row of one stage of fmoe. A stage's time is not the shape's time, so `us` is -1, as if it had not run."""
    n = "2" if stage == "stage2" else "1"
    more: Row = {"kernelName1": "", f"kernelName{n}": row["kernelName"]}
    if numbers:
        more["block_m"] = int(numbers[0])
    if row["us"] > 0:
        more |= {f"us{n}": row["us"], f"err{n}": f"{row.get('errRatio', 1.0):.1%}"}
    more |= {"us": -1.0} if stage.startswith("stage") else {"run_1stage": 1}
    return {**row, **more}


class ShapeKeys:
    """Finds the shape for a key that AITER prints or has in a table."""

    def __init__(self, columns: tuple[str, ...], keys: Keys) -> None:
        self._cells = {i: {c: str(k[c]).strip() for c in columns if c in k} for i, k in keys.items()}

    def of_cells(self, printed: Mapping[str, str]) -> int | None:
        """The id of the shape in a line of a table; None if it is not ours, or could be two of ours."""
        return _only(
            i
            for i, ours in self._cells.items()
            if any(c in printed for c in ours) and all(_same(printed[c], v) for c, v in ours.items() if c in printed)
        )

    def of_values(self, key: tuple[str, ...]) -> int | None:
        """The same for the values of a key in order; they may begin with gfx and cu_num."""
        return _only(i for i, ours in self._cells.items() if key and _ends_with(key, tuple(ours.values())))


def _only(found: Iterable[int]) -> int | None:
    ids = list(found)
    return ids[0] if len(ids) == 1 else None


def _ends_with(key: tuple[str, ...], ours: tuple[str, ...]) -> bool:
    """True if `key` is `ours` behind gfx and cu_num, or without columns (of text) that are younger than the image."""
    sizes = sum(1 for _ in itertools.takewhile(str.isdigit, ours))
    return any(
        len(key) - skip >= max(1, sizes) and all(_same(a, b) for a, b in zip(key[skip:], ours, strict=False))
        for skip in (2, 1, 0)
    )


def _same(theirs: str, ours: str) -> bool:
    a = theirs.strip()
    if a.lower() == ours.lower() or (a.endswith(".0") and a[:-2] == ours):  # some tables turn numbers into floats
        return True
    # enums print in several ways (<QuantType.per_Token: 2>, QuantType.per_Token), and 1x128 stands for 128x128
    return not ours.isdigit() and (ours in a or (ours.endswith("per_128x128") and "per_1x128" in a))


class Tables:
    """Rows of one process's files so far, by shape; a file that shrinks or breaks takes nothing back.

    `devices`: (gfx, cu_num) as AITER wrote them; gfx is "" if its tables have no such column.
    """

    def __init__(self, family: Family, columns: tuple[str, ...], shapes: Keys, limit: float) -> None:
        self._family, self._limit = family, limit
        self._keys = ShapeKeys(columns, shapes)
        self._theirs = dict(zip(family.to_aiter(columns), columns, strict=True))
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._profile: dict[int, dict[tuple[str, ...], Row]] = {}
        self.tuned: dict[int, Row] = {}
        self.devices: set[tuple[str, str]] = set()

    def read(self, tuned: Path, profile: Path) -> bool:
        """Take in what is new in the files; True if there was anything."""
        new = False
        for shape, cells in self._lines(tuned):
            row = to_row(self._family, cells, self._limit)
            new |= self.tuned.get(shape) != row
            self.tuned[shape] = row
            self.devices.add((cells.get("gfx", ""), cells.get("cu_num", "")))
        for shape, cells in self._lines(profile):
            known = self._profile.setdefault(shape, {})
            ident = tuple(cell for name, cell in cells.items() if name not in _MEASURED)
            if ident not in known:
                known[ident], new = to_row(self._family, cells, self._limit), True
        return new

    def candidates(self, shape: int) -> list[Row]:
        """The rows of the profile file, in its order."""
        return list(self._profile.get(shape, {}).values())

    def _lines(self, path: Path) -> Iterable[tuple[int, Cells]]:
        """The lines of our shapes in a file that changed."""
        info = path.stat() if path.exists() else None
        stamp = (info.st_mtime_ns, info.st_size) if info else None
        if stamp is None or self._stamps.get(path) == stamp:
            return
        self._stamps[path] = stamp
        for cells in read_cells(path):
            shape = self._keys.of_cells(
                {ours: cells[theirs] for theirs, ours in self._theirs.items() if theirs in cells}
            )
            if shape is not None:
                yield shape, cells


@dataclass(frozen=True, slots=True)
class ShapeVerdict:
    """A winner, or a reason (one of SHAPE_VERDICTS) and a detail."""

    winner: Row | None
    reason: str = ""
    detail: str = ""


def shape_verdict(
    family: Family, tuned: Row | None, candidates: Sequence[Row], limit: float, *, chip: str = "", left_out: int = 0
) -> ShapeVerdict:
    """AITER's own winner if it is valid, else the best of its candidates, else the reason why there is no winner.

    `chip`: AITER's message that the family is not for this chip, if any. `left_out`: how many candidates were not
    tried because they had faulted before.
    """
    if tuned is not None and not _fault(tuned, limit):
        return ShapeVerdict(tuned)
    why = f"cannot be ({_fault(tuned, limit)})" if tuned is not None else ""
    # the fastest correct row, the first of equals; a winner of fmoe is a pair of stages, and no profile row is a pair
    right = [r for r in candidates if r.get("status") == "ok" and not _fault(r, limit) and not family.two_stages]
    if right:
        made = min(right, key=lambda r: r["us"])
        why = f"AITER's own winner {why}" if why else "AITER named no winner"
        return ShapeVerdict({**made, "detail": f"chosen among AITER's measured candidates: {why}"})
    if chip:
        return ShapeVerdict(None, "unsupported", chip)
    if not candidates:
        nothing = f"AITER's winner {why}" if why else "AITER found no kernel that takes the shape"
        return ShapeVerdict(None, "no_candidate", nothing)
    if family.two_stages:  # a stage that has a right kernel is not why there is no winner: the other one is
        works = {_stage(r) for r in candidates if r.get("status") == "ok"} - {0}
        candidates = [r for r in candidates if _stage(r) not in works]
        if not candidates:
            return ShapeVerdict(None, "no_candidate", "each stage has right kernels, but no two of one block_m")
    measured = [r for r in candidates if any(r.get(n, -1) > 0 for n in ("us", "us1", "us2"))]
    of = plural(len(candidates), "candidate")
    if measured:
        least = min(r.get("errRatio", math.inf) for r in measured)
        shown = f"{least:.3g}" if math.isfinite(least) else "unknown"
        words = f"{len(measured)} of {of} ran, none is right: the least error is {shown}, the limit {limit:g}"
        return ShapeVerdict(None, "wrong_result", words)
    errors = sum(r.get("status") == "error" for r in candidates)
    left_out = min(left_out, errors)
    words = f"{len(candidates) - errors} cannot take the shape, {errors - left_out} crashed, hung or raised"
    words += f", {left_out} were left out, for they had faulted before" if left_out else ""
    return ShapeVerdict(None, "no_candidate", f"none of {of} ran: {words}")


def _stage(row: Mapping[str, object]) -> int:
    """1 or 2 for a stage measured alone, 0 for a pair or for one kernel that does both."""
    names = bool(row.get("kernelName1")), bool(row.get("kernelName2"))
    return 0 if row.get("run_1stage") else {(True, False): 1, (False, True): 2}.get(names, 0)


def _fault(row: Row, limit: float) -> str:
    """The reason why a row cannot settle a shape, "" if it can."""
    if row["us"] <= 0:
        return "it has no time"
    if row.get("errRatio", 1.0) > limit:
        return f"its error is {row.get('errRatio', math.nan):g}, the limit {limit:g}"
    return "" if row["kernelName"] else "it names no kernel"
