"""What happens to tuned tables when AITER loads them: what it refuses, what it never selects, what it must rebuild.

Read from ROCm/aiter at e4048607a5: `AITER_CONFIG` in aiter/jit/core.py (merging and duplicates), the dispatch tables of
csrc/ck_gemm_*/*.cu and csrc/ck_batched_gemm_*/*.cu (what is compiled in), aiter/jit/optCompilerConfig.json (from which
tables it is).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from orchestrator.errors import InputError
from orchestrator.families import Family
from orchestrator.results.table import (
    NULLS,
    TAG,
    Key,
    KeyFault,
    Table,
    TableRow,
    key_of,
    number_of,
    place_of,
    read_table,
)
from worker.tuners.aiter.families import backend_of

COMPILED = ("ck", "cktile")
"""Backends whose kernels are compiled from the table that is there when their module is built."""
BY_NAME = ("a4w4_blockscale", "a8w8_blockscale", "a8w8_blockscale_bpreshuffle")
"""Families whose compiled kernels are found by name since 7136b240e1 (2026-05-21); of the others by shape."""
_REGISTRY = b"is not present in the compiled registry"
SHOWN = 5
Level = Literal["fatal", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`fatal`: AITER does not start, or uses nothing of the table."""

    level: Level
    text: str


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


def duplicates(sources: Sequence[Source]) -> list[Finding]:
    """Keys that come more than once over all tables of a family, which AITER merges at its start."""
    seen: dict[tuple[Key, str], str] = {}
    doubled = []
    for source in sources:
        for row in source.table.rows:
            here = f"{source.path}:{row.line}"
            first = seen.setdefault((row.key, row.tag), here)
            if first != here:
                doubled.append(f"{here} has the key of {first}")
    if not doubled:
        return []
    shown = [*doubled[:SHOWN], *([f"... and {len(doubled) - SHOWN} more"] if len(doubled) > SHOWN else [])]
    what = (
        f"{sources[0].family.name}: {len(doubled)} rows have the key of another row: AITER since 2026-04-01 rewrites"
        " the tables and stops with an error at its start; -o DIR writes one table with the fastest row of each key"
    )
    return [Finding("fatal", "\n".join((what, *(f"  {s}" for s in shown))))]


def never_selected(source: Source, chips: Iterable[tuple[str, int]]) -> list[Finding]:
    """Rows of another chip than those in use: (gfx, cu_num) is part of the key."""
    targets = set(chips)
    if not targets:
        return []
    there = {(str(r.key[0]), int(r.key[1])) for r in source.table.rows}
    out = []
    for gfx, cu_num in sorted(targets - there):
        has = ", ".join(f"{g or '?'} with {c}" for g, c in sorted(there)) or "nothing"
        text = (
            f"{source.path}: no row is for {gfx} with {cu_num} compute units (it has {has}): AITER selects none there"
        )
        out.append(Finding("fatal", text))
    other = sum((str(r.key[0]), int(r.key[1])) not in targets for r in source.table.rows)
    if other and not out:
        out.append(Finding("note", f"{source.path}: {other} rows are for other chips and are not selected"))
    return out


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a tree's modules were compiled from: shapes with their kernels, and kernels alone."""

    shapes: frozenset[tuple[Key, str]]
    kernels: frozenset[str]
    by_name: bool


def compiled_in(root: Path, family: Family) -> Compiled:
    """What a build of the AITER tree at `root` holds of a family: its own table and those of model_configs.

    Raises InputError where there is no such tree.
    """
    configs = root / "aiter" / "configs"
    if not configs.is_dir():
        raise InputError(f"--aiter-root {root}: no AITER tree is there (it would hold aiter/configs)")
    files = [configs / family.tuned_csv, *model_tables(configs / "model_configs", family)]
    rows = [(s, r) for f in files if f.is_file() for s in [read_shipped(f, family)] for r in s.table.rows]
    named = [(r.key, s.cells(r).get("kernelName", "")) for s, r in rows]
    return Compiled(frozenset(named), frozenset(k for _, k in named), _found_by_name(root, family))


def model_tables(folder: Path, family: Family) -> list[Path]:
    """The tables of a family in a model_configs folder, by AITER's own rule."""
    stem = Path(family.tuned_csv).stem
    return sorted(p for p in folder.glob(f"*{stem}*.csv") if p.is_file() and "untuned" not in p.name)


def _found_by_name(root: Path, family: Family) -> bool:
    if family.name not in BY_NAME:
        return False
    base = root if (root / "csrc").is_dir() else root / "aiter_meta"
    folder = base / "csrc" / f"ck_gemm_{family.name}"
    return any(_REGISTRY in p.read_bytes() for p in sorted(folder.glob("*.cu")))


def rebuild(source: Source, compiled: Compiled | None) -> list[Finding]:
    """Rows whose kernels AITER has to compile before it can use them. `compiled` None: not known, so all that may."""
    need, opus = [], 0
    for row in source.table.rows:
        cells = source.cells(row)
        backend = backend_of(source.family.name, cells)
        kernel = cells.get("kernelName", "")
        if backend == "opus" and source.family.name == "a16w16":
            opus += compiled is None or kernel not in compiled.kernels
        if backend not in COMPILED or source.family.name == "fmoe":
            continue
        if compiled is not None:
            known = kernel in compiled.kernels if compiled.by_name else (row.key, kernel) in compiled.shapes
            if known:
                continue
        need.append(f"{','.join(map(str, row.key))} {kernel}")
    out = []
    if need:
        known_words = (
            "are outside what the tree was compiled from" if compiled else "may be outside what the image holds"
        )
        text = (
            f"{source.path}: {len(need)} of {len(source.table.rows)} rows are CK winners that {known_words}:"
            " start once with AITER_REBUILD=1 and the line above set, or build the image with this table"
        )
        more = [f"  ... and {len(need) - SHOWN} more"] if len(need) > SHOWN else []
        out.append(Finding("warning", "\n".join((text, *(f"  {n}" for n in need[:SHOWN]), *more))))
    if opus:
        text = (
            f"{source.path}: {opus} rows are opus kernels, which AITER compiles only for tables called"
            " model_configs/*_bf16_tuned_gemm.csv: export with --model and start once with AITER_REBUILD=1"
        )
        out.append(Finding("warning", text))
    return out


def best_rows(sources: Sequence[Source]) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """(header, rows) of one table with the fastest row of each key; gfx is filled in where a table lacks it."""
    header = dict.fromkeys(sources[0].family.tuned_header)
    for s in sources:
        header |= dict.fromkeys(s.table.header)
    best: dict[tuple[Key, str], tuple[float, dict[str, str]]] = {}
    for s in sources:
        for row in s.table.rows:
            cells = {**s.cells(row), "gfx": str(row.key[0])}
            us = row.us if row.us is not None else float("inf")
            at = (row.key, row.tag)
            if at not in best or us < best[at][0]:
                best[at] = (us, cells)
    there = {name for _, cells in best.values() for name in cells}
    names = tuple(n for n in header if n in there)
    return names, [cells for _, cells in best.values()]
