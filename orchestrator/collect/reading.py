"""The kind and content of a fetched file. Nothing here raises for its content: what cannot be read is noted.

The runbook's files are `fp4_tuned_<shapes>.csv` and `fp4_profile_<shapes>.csv` as AITER's tuner writes them (`Null` for
what is missing, us -1 or inf for a candidate that failed) and `fp4_triton_gluon_bench.csv`.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.collect.fetch import Fetched
from orchestrator.tables.backends import OWNER_COLUMN, owned
from orchestrator.tables.locate import families_by_content, family_in_name
from orchestrator.tables.tuned import NULLS, number_of
from worker.families import Family
from worker.text import plural

Kind = Literal["tuned", "profile", "bench", "log", "other"]
MAX_ROWS = 2_000_000
BENCH_KEY = ("M", "N", "K")
_UNIT = ("_us", "_tflops")


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
    if {"cu_num", "us"} <= names and names & {"kernelName", "kernelName1"}:
        return "profile" if "profile" in name else "tuned"
    if set(BENCH_KEY) <= names and any(n.endswith("_us") for n in header):
        return "bench"
    return "other"


def family_of(content: Content) -> Family | None:
    """The family of a tuned or profile file, None where nothing tells."""
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
            whose = owned(backend, row.get(OWNER_COLUMN, ""))
            yield BenchRow(key, whose, us, number_of(row.get(f"{backend}_tflops", "")), node)
