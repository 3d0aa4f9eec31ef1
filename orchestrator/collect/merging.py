"""Collected files read and merged by key: one winner a shape, every candidate kept, shapes without a winner explained.

Pure; nothing here raises for a file's content: what cannot be read is noted. The runbook's files are
`fp4_tuned_<shapes>.csv` and `fp4_profile_<shapes>.csv` as AITER's tuner writes them (`Null` for what is missing, us -1
or inf for a candidate that failed) and `fp4_triton_gluon_bench.csv`.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.collect.node_folder import Fetched
from orchestrator.reasons import Reason
from orchestrator.tables.backends import owned
from orchestrator.tables.locate import families_by_content, family_in_name
from orchestrator.tables.tuned import NULLS, Key, KeyFault, key_dict, key_of, number_of
from orchestrator.tuned_db.merge_policy import Newcomer, champions
from worker.families import FAMILIES, Family
from worker.text import plural

Kind = Literal["tuned", "profile", "bench", "log", "other"]
MAX_ROWS = 2_000_000
BENCH_KEY = ("M", "N", "K")
_WITHOUT_CU_NUM = tuple(f for f in FAMILIES.values() if "cu_num" not in f.chip_columns)


@dataclass(slots=True)
class Content:
    """A file, read. `rows` by column name, stripped, without what is null; `notes` on what was dropped."""

    of: Fetched
    kind: Kind
    header: tuple[str, ...] = ()
    rows: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read(file: Fetched) -> Content:
    """A fetched file as rows."""
    if file.name.endswith(".log"):
        return Content(file, "log")
    text = file.data.decode("utf-8", "replace").removeprefix("\ufeff")
    if "\0" in text or not text.strip():
        return Content(file, "other", notes=["holds nothing to read" if not text.strip() else "is no text"])
    cut = not text.endswith("\n")
    reader = csv.reader(io.StringIO(text, newline=""))
    content = Content(file, "other")
    dropped: Counter[str] = Counter()
    try:
        for record in reader:
            cells = [c.strip() for c in record]
            if not content.header:
                content.header = tuple(cells)
                content.kind = _kind(file.name, content.header)
                if content.kind == "other":
                    return content
            elif not any(cells):
                continue
            elif len(cells) != len(content.header):
                dropped["cut short or too long"] += 1
            elif tuple(cells) == content.header:
                dropped["repeating the header"] += 1
            elif len(content.rows) >= MAX_ROWS:
                dropped["beyond what a file may have"] += 1
            else:
                content.rows.append({n: c for n, c in zip(content.header, cells, strict=True) if c not in NULLS})
    except csv.Error as e:
        content.notes.append(f"line {reader.line_num} is no CSV ({e}); read so far")
    if cut and content.rows and not dropped["cut short or too long"]:
        content.rows.pop()
        dropped["ending where the file was cut"] += 1
    content.notes += [f"dropped {plural(n, 'row')} {why}" for why, n in dropped.items()]
    return content


def _kind(name: str, header: tuple[str, ...]) -> Kind:
    names = set(header)
    chip = "cu_num" in names or any(names.issuperset(f.aiter_header) for f in _WITHOUT_CU_NUM)
    if chip and "us" in names and names & {"kernelName", "kernelName1"}:
        return "profile" if "profile" in name else "tuned"
    if set(BENCH_KEY) <= names and any(n.endswith("_us") for n in header):
        return "bench"
    return "other"


def family_of(content: Content) -> Family | None:
    """The family of a tuned or profile file, None where it is unknown."""
    by_name = family_in_name(content.of.name)
    fitting = [by_name] if by_name else families_by_content(content.header, content.rows)
    return fitting[0] if len(fitting) == 1 else None


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One shape on one backend, of a benchmark."""

    key: tuple[int, int, int]
    backend: str
    us: float
    tflops: float | None
    node: str


def fastest_bench_rows(contents: Iterable[Content]) -> list[BenchRow]:
    """The fastest measurement of each shape and backend over all benchmark files; 0 stands for none there."""
    best: dict[tuple[tuple[int, int, int], str], BenchRow] = {}
    for content in contents:
        if content.kind != "bench":
            continue
        for row in content.rows:
            for m in _of_row(row, content.of.node):
                at = (m.key, m.backend)
                if at not in best or m.us < best[at].us:
                    best[at] = m
    return [best[at] for at in sorted(best)]


def _of_row(row: dict[str, str], node: str) -> Iterable[BenchRow]:
    cells = [row.get(n, "") for n in BENCH_KEY]
    if not all(c.isascii() and c.isdigit() and len(c) < 11 for c in cells):
        return
    key = (int(cells[0]), int(cells[1]), int(cells[2]))
    for name in row:
        us = number_of(row[name]) if name.endswith("_us") else None
        if us is not None and us > 0:
            backend = name.removesuffix("_us")
            whose = owned(backend)
            yield BenchRow(key, whose, us, number_of(row.get(f"{backend}_tflops", "")), node)


Chip = tuple[str, int]


@dataclass(slots=True)
class Merged:
    """`winners` by key with where each came from; `candidates` in the order read; `failed`: (key, reason, why,
    node)."""

    winners: dict[Key, tuple[Newcomer, str]] = field(default_factory=dict)
    candidates: list[tuple[Key, dict[str, str], str, str, str]] = field(default_factory=list)
    """(key, cells, node, file, status)"""
    failed: list[tuple[Key, Reason, str, str]] = field(default_factory=list)
    rebuilt: int = 0
    """Winners that no tuned table had: taken from a profile."""
    notes: list[str] = field(default_factory=list)


def merge(contents: Iterable[Content], family: Family, err_ratio: float, chips: Mapping[str, Chip]) -> Merged:
    """Merge the tuned and profile files of a family. `chips`: the (gfx, cu_num) of nodes where they are known, for
    tables from before AITER wrote gfx.

    The fastest valid row of a tuned table wins its key; a key that no tuned table has goes to the fastest valid
    candidate of the profiles. Rows of different gfx or cu_num have different keys.
    """
    out = Merged()
    tuned: list[dict[str, str]] = []
    profile: list[dict[str, str]] = []
    for content in contents:
        if content.kind not in ("tuned", "profile"):
            continue
        bad = 0
        ours = dict(zip(content.header, family.from_aiter(content.header), strict=True))
        for row in content.rows:
            cells = {**_gfx(row, chips.get(content.of.node)), **{ours[n]: c for n, c in row.items()}}
            where = f"{content.of.node}:{content.of.name}"
            try:
                key = key_of(cells, family)
            except KeyFault:
                bad += 1
                continue
            (tuned if content.kind == "tuned" else profile).append({**cells, "_from": where})
            if content.kind == "profile":
                status = _status(cells, family, err_ratio)
                out.candidates.append((key, cells, content.of.node, content.of.name, status))
        if bad:
            content.notes.append(f"dropped {plural(bad, 'row')} without a whole key")
    for rows in (tuned, profile):
        best, _ = champions(rows, family, err_ratio)
        for new in best:
            if new.key not in out.winners:
                out.rebuilt += rows is profile
                out.winners[new.key] = (new, new.cells.pop("_from"))
    _explain(out, tuned, family, err_ratio)
    chips_met = {(str(k[0]), int(k[1])) for k in out.winners}
    if len(chips_met) > 1:
        met = ", ".join(f"{g} with {c}" if c else g for g, c in sorted(chips_met))
        out.notes.append(f"rows of several chips, which are different keys: {met}")
    return out


def _gfx(row: Mapping[str, str], chip: Chip | None) -> dict[str, str]:
    return {"gfx": chip[0]} if chip and row.get("cu_num") == str(chip[1]) else {}


def _status(cells: Mapping[str, str], family: Family, err_ratio: float) -> str:
    """Status as in profile.csv: a candidate without a time was unsupported (-1) or ended its process (inf)."""
    us = number_of(cells.get("us", ""))
    if us is None:
        return "error"
    if us <= 0:
        return "unsupported"
    err = number_of(cells.get(family.err_column, ""))
    wrong = family.err_column != "err1" and (err is None or not 0 <= err <= err_ratio)
    return "wrong" if wrong else "ok"


def _explain(out: Merged, tuned: list[dict[str, str]], family: Family, err_ratio: float) -> None:
    """Shapes that were tried and have no winner."""
    import pandas as pd

    tried = pd.DataFrame(
        [(key, node, status) for key, _, node, _, status in out.candidates if key not in out.winners],
        columns=pd.Index(["key", "node", "status"]),
    )
    key: Key
    for _, rows in tried.groupby("key", sort=False):
        key = rows["key"].iloc[0]
        counts = rows["status"].value_counts().sort_index()
        words = ", ".join(f"{n} {status}" for status, n in counts.items())
        why = f"{plural(len(rows), 'candidate')}: {words}" if key[0] else "its gfx is not known"
        reason = Reason.WRONG_RESULT if "wrong" in counts else Reason.NO_CANDIDATE
        out.failed.append((key, reason, why, rows["node"].iloc[-1]))
    known = {c[0] for c in out.candidates} | out.winners.keys()
    for row in tuned:
        key = key_of(row, family)
        if key not in known:
            known.add(key)
            limit = f"the row of the tuned table is not valid (us, error above {err_ratio:g}, or no gfx)"
            out.failed.append((key, Reason.WRONG_RESULT, limit, row["_from"].partition(":")[0]))


def row_of(key: Key, cells: Mapping[str, str], family: Family) -> list[str]:
    """A row in the columns of the family's tuned table."""
    named = {**cells, **{n: str(v) for n, v in key_dict(key, family).items()}}
    return [named.get(n, "") for n in family.tuned_header]
