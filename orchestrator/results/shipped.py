"""Tuned tables as files: a user's, and AITER's own, which are read as pandas reads them."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from orchestrator.results.table import (
    NULLS,
    TAG,
    KeyFault,
    Table,
    TableRow,
    key_of,
    number_of,
    place_of,
    read_table,
)
from worker.families import Family


@dataclass(frozen=True, slots=True)
class Source:
    """A table as a file, read."""

    path: Path
    family: Family
    table: Table

    def cells(self, row: TableRow) -> dict[str, str]:
        return dict(zip(self.table.header, row.cells, strict=True))


def read_source(path: Path, family: Family) -> Source:
    """A table whose keys may come more than once. Raises TunedDBError."""
    return Source(path, family, read_table(path, family, doubled=True))


def read_shipped(path: Path, family: Family) -> Source:
    """A table of AITER's own, read as pandas does: short rows are filled up, rows without a key passed over.

    At e4048607a5 one of its fmoe tables has such rows.
    """
    rows: list[TableRow] = []
    with path.open(encoding="utf-8", errors="replace", newline="") as f:
        reader = csv.reader(f)
        header = tuple(c.strip() for c in next(reader, []))
        for record in reader:
            cells = tuple(c.strip() for c in [*record, *[""] * (len(header) - len(record))][: len(header)])
            named = dict(zip(header, cells, strict=True))
            try:
                key = key_of(named, family)
            except KeyFault:
                continue
            tag = named.get(TAG, "")
            us = number_of(named.get("us", ""))
            tag = "" if tag in NULLS else tag
            rows.append(TableRow(reader.line_num, 0, cells, key, tag, us, place_of(key, tag)))
    return Source(path, family, Table(path, header, (), tuple(rows), ()))


def model_tables(folder: Path, family: Family) -> list[Path]:
    """The tables of a family in a model_configs folder, by AITER's own rule."""
    stem = Path(family.tuned_csv).stem
    return sorted(p for p in folder.glob(f"*{stem}*.csv") if p.is_file() and "untuned" not in p.name)
