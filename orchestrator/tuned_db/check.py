"""Check tuned tables against AITER's rules, row by row and together, as AITER merges them at its start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import InputError, TunedDBError
from orchestrator.tables.locate import family_of, shipped_tables
from orchestrator.tables.open import csv_records
from orchestrator.tables.tuned import (
    KeyFault,
    Place,
    RowReader,
    Table,
    TableRow,
    chip_name,
    number_of,
    read_header,
)
from orchestrator.tuned_db.check_build import FIX, FIXES, REBUILD, BuildCheck, Verdict
from orchestrator.tuned_db.compatibility import rows_by_kind
from orchestrator.tuned_db.kinds import describe_own, in_aiter
from orchestrator.tuned_db.records import Record, current_records, read_records
from orchestrator.tuned_db.rules import Broken, RowRules, Severity
from worker.families import Family
from worker.text import plural

if TYPE_CHECKING:
    from orchestrator.tuned_db.aiter_build import Build

OTHERS = ("tuned_fhmoe", "tuned_grouped_fmoe", "chunk_gdn_h_opt_tuned", "asm_a8w8_gemm")
"""Tables of AITER's that nothing here tunes: only their form is looked at."""
SHOWN = 5


@dataclass(slots=True)
class BrokenRule:
    """A rule that rows of a table break. `rows`: (line, what is wrong)."""

    rule: str
    level: Severity
    rows: list[tuple[int, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        shown = [{"line": n, "text": t} for n, t in self.rows[:SHOWN]]
        return {"rule": self.rule, "level": self.level, "count": len(self.rows), "examples": shown}


@dataclass(slots=True)
class Checked:
    """A table that was checked. `family` "": none that is known here."""

    path: Path
    family: str
    rows: int = 0
    chips: Counter[str] = field(default_factory=Counter)
    findings: dict[tuple[str, Severity], BrokenRule] = field(default_factory=dict)
    known: int = 0
    stale: int = 0
    """Records of provenance that are of a row as it is now, and stale ones."""
    has_records: bool = False
    kinds: Counter[str] = field(default_factory=Counter)
    """Rows by whose kernels they have: `aiter`, `own`, "" where that is unknown."""
    build: dict[str, int] | None = None
    """Rows by what a build makes of them, where one was named."""

    def add(self, line: int, broken: Broken) -> None:
        rule, level, text = broken
        self.findings.setdefault((rule, level), BrokenRule(rule, level)).rows.append((line, text))

    def count(self, level: Severity) -> int:
        """Number of rows with findings of this level."""
        return sum(len(f.rows) for f in self.findings.values() if f.level == level)

    def problems(self) -> list[dict[str, Any]]:
        """Every finding with its place and the way out, errors first, then by line."""
        found = sorted((f.level, n, f.rule, text) for f in self.findings.values() for n, text in f.rows)
        names = ("file", "level", "line", "rule", "text", "fix")
        return [dict(zip(names, (str(self.path), *p, FIXES.get(p[2], FIX)), strict=True)) for p in found]

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "family": self.family or None,
            "rows": self.rows,
            "chips": dict(self.chips),
            "errors": self.count("error"),
            "warnings": self.count("warning"),
            "kinds": {kind or "unknown": n for kind, n in self.kinds.items()},
            **({"build": self.build} if self.build is not None else {}),
            "findings": [f.to_json() for f in self.findings.values()],
            "provenance": {"known": self.known, "stale": self.stale, "unknown": self.rows - self.known}
            if self.has_records
            else None,
        }


def check(
    paths: Sequence[Path], wanted: str | None, err_ratio: float, build: Build | None = None, *, alone: bool = False
) -> tuple[list[Checked], list[str]]:
    """(the tables, what could not be read at all). A folder is a run's, or one with AITER's tables.

    `build`: the AITER that is to serve them, to which they are held; `alone`: it reads none of its own beside them.
    """
    out: list[Checked] = []
    faults: list[str] = []
    seen: dict[str, dict[Any, str]] = {}
    given = list(expand(paths, faults))
    held = BuildCheck(build, given, alone=alone) if build is not None else None
    for path in given:
        try:
            family = _family(path, wanted)
            mine = held.places(family) if held and family else seen.setdefault(family.name if family else "", {})
            out.append(_check(path, family, err_ratio, mine, held))
        except InputError as e:
            faults += e.faults
    return out, faults


def verdict_of(tables: Iterable[Checked]) -> Verdict:
    """The verdict on tables that were held to a build."""
    rules = {(f.rule, f.level) for c in tables for f in c.findings.values()}
    if any(level == "error" for _, level in rules):
        return "unsafe"
    return "rebuild" if (REBUILD, "warning") in rules else "safe"


def expand(paths: Iterable[Path], faults: list[str]) -> Iterator[Path]:
    """Files as they are; of a folder its tuned.csv, or AITER's tables in it and in its model_configs."""
    seen: set[Path] = set()
    for path in paths:
        found = [path]
        if path.is_dir():
            configs = path / "aiter" / "configs" if (path / "aiter" / "configs").is_dir() else path
            own = [path / "tuned.csv"] if (path / "tuned.csv").is_file() else []
            found = own or [*shipped_tables(configs), *shipped_tables(configs / "model_configs")]
            if not found:
                faults.append(f"{path}: holds neither a run's tuned.csv nor tables of AITER's")
        for p in found:
            if p not in seen:
                seen.add(p)
                yield p


def _family(path: Path, wanted: str | None) -> Family | None:
    try:
        return family_of(path, wanted)
    except TunedDBError:
        if any(name in path.name for name in OTHERS):
            return None
        raise


def _check(
    path: Path, family: Family | None, err_ratio: float, seen: dict[Any, str], held: BuildCheck | None
) -> Checked:
    out = Checked(path, family.name if family else "")
    header, rows = _rows(path, family, out)
    if family is None:
        out.add(1, ("family", "warning", "is of no family that is tuned here: only its form was looked at"))
        _check_form(header, rows, out)
        return out
    missing = family.to_aiter(n for n in family.tuned_header if n not in header and n not in ("xbf16", "flat"))
    if missing:
        text = f"has no column {', '.join(missing)}, as tables of an earlier date" + (
            "; AITER takes gfx from cu_num" if "gfx" in missing else ""
        )
        out.add(1, ("columns", "warning", text))
    rules, reader = RowRules(family, header, err_ratio), RowReader(header, family)
    kept, found = dict[Place, TableRow](), list[TableRow]()
    for line, cells in rows:
        out.rows += 1
        for broken in rules(cells):
            out.add(line, held.held(broken) if held else broken)
        full = [*cells, *[""] * (len(header) - len(cells))][: len(header)]
        try:
            key = reader.key(full)
        except KeyFault:
            continue
        us = number_of(full[reader.us_at])
        row = reader.row(line, 0, full, key, us if us and us > 0 else None)
        out.chips[chip_name(key[0], key[1])] += 1
        here = f"{path}:{line}"
        first = seen.setdefault(held.place(row, family) if held else row.place, here)
        if first != here:
            alone: Broken = ("duplicate", "error", f"has the key of {first}: AITER stops at its start")
            out.add(line, held.doubled(path, first, family) if held else alone)
        kept.setdefault(row.place, row)
        found.append(row)
    known = _check_records(path, header, kept, out)
    _check_kinds(Table(path, family, header, (), tuple(found), ()), known, out)
    if held is not None:
        counts, broken_rows = held.rows(header, found, family)
        out.build = {str(s): n for s, n in counts.items()}
        for line, broken in (*held.table(path, header, found, family), *broken_rows):
            out.add(line, broken)
    return out


def _rows(
    path: Path, family: Family | None, out: Checked
) -> tuple[tuple[str, ...], Iterator[tuple[int, Sequence[str]]]]:
    """(header, rows with their lines)."""
    records = csv_records(path)
    _, _, first = next(records, (0, "", None))
    if first is None:
        raise TunedDBError(f"{path}: is empty: it has no header and no rows")
    header = tuple(first)
    if family is not None:
        header = read_header(path, first, family)
        if first[0].startswith("\ufeff"):
            out.add(1, ("bom", "warning", "begins with a byte order mark"))
    return header, ((line, cells) for line, _, cells in records if any(cells))


def _check_form(header: Sequence[str], rows: Iterable[tuple[int, Sequence[str]]], out: Checked) -> None:
    us_at = header.index("us") if "us" in header else None
    for line, cells in rows:
        out.rows += 1
        if len(cells) != len(header):
            level: Severity = "error" if len(cells) > len(header) else "warning"
            out.add(line, ("cells", level, f"has {len(cells)} cells, the header {len(header)}"))
        elif us_at is not None and (number_of(cells[us_at]) or 0) <= 0:
            out.add(line, ("us", "error", f"us is {cells[us_at][:40] or 'empty'}: not a time"))


def _check_kinds(table: Table, known: Mapping[Place, Record], out: Checked) -> None:
    """Add a finding for each row of our tuners among AITER's, or in a folder that AITER reads: they stop AITER."""
    found = rows_by_kind(table, known)
    out.kinds.update({kind: len(rows) for kind, rows in found.items()})
    if "aiter" not in found and not in_aiter(table.path.absolute()):
        return
    way_out = "delete the row" if "aiter" in found else "AITER reads this folder"
    for row in found.get("own", ()):
        words = describe_own(table.cells(row))
        out.add(row.line, ("mixed", "error", f"{words}, at which AITER stops: {way_out}"))


def _check_records(
    path: Path, header: Sequence[str], rows: Mapping[Place, TableRow], out: Checked
) -> dict[Place, Record]:
    records = read_records(path)
    out.has_records = bool(records.by_place)
    known = current_records(header, rows, records)
    out.known = len(known)
    out.stale = len(records.by_place) - out.known
    if out.stale:
        text = f"{plural(out.stale, 'record')} of {records.path.name} without a row: it is gone or was changed by hand"
        out.add(1, ("provenance", "warning", text))
    return known
