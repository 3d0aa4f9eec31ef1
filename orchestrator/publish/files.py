"""Texts of the tables of a branch: rows edited in their lines, new ones in AITER's order, LF line ends. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

from orchestrator.tables.tuned import Key, Table, file_order, key_dict
from worker.families import Family

Cells = Mapping[str, str]


def line_of(header: Sequence[str], cells: Cells) -> str:
    """A row as a line."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow([cells.get(n, "") for n in header])
    return out.getvalue()


def edited(text: str, header: Sequence[str], edits: Mapping[int, Cells]) -> str:
    """A table's text with some lines (from 1) replaced; every other line stays, but for its end."""
    lines = _lines(text)
    for n, cells in edits.items():
        lines[n - 1] = line_of(header, cells)
    return "".join(lines)


def with_rows(
    text: str, table: Table | None, header: Sequence[str], rows: Iterable[tuple[Key, Cells]], family: Family
) -> str:
    """A table's text with further rows, all in AITER's order. `table`: `text` as read, None for a new file, which gets
    `header`."""
    lines = _lines(text) or [_head(family.to_aiter(header))]
    columns, there = (table.header, table.rows) if table else (header, ())
    kept = [(file_order(row.key, family), lines[row.line - 1]) for row in there]
    for key, cells in rows:
        named = {n: str(v) for n, v in key_dict(key, family).items()}
        kept.append((file_order(key, family), line_of(columns, {**cells, **named})))
    numbers = {1, *(row.line for row in there)}
    keyless = [line for n, line in enumerate(lines, 1) if n not in numbers and line.strip()]
    return "".join([lines[0], *(line for _, line in sorted(kept)), *keyless])


def untuned(text: str, header: Sequence[str], keys: Iterable[Key], family: Family) -> str:
    """The list of shapes beside a table: a new one in order (`text` ""), or one with the missing shapes below."""
    names = ("gfx", "cu_num", *family.key_names)
    ordered = sorted(keys, key=lambda key: file_order(key, family))
    shapes = dict.fromkeys(tuple(str(key[names.index(n)]) for n in header) for key in ordered)
    records = list(csv.reader(io.StringIO(text)))
    own = family.from_aiter(c.strip() for c in records[0]) if records else tuple(header)
    listed = (dict(zip(own, (c.strip() for c in r), strict=False)) for r in records[1:])
    have = {tuple(cells.get(n, "") for n in header) for cells in listed}
    new = [dict(zip(header, shape, strict=True)) for shape in shapes if shape not in have]
    return (edited(text, own, {}) or _head(family.to_aiter(header))) + "".join(line_of(own, cells) for cells in new)


def _lines(text: str) -> list[str]:
    return [line.rstrip("\r") + "\n" for line in text.rstrip("\r\n").split("\n")] if text else []


def _head(header: Sequence[str]) -> str:
    return line_of(header, {n: n for n in header})
