"""Check tuned tables against AITER's rules, row by row and together, as AITER merges them at its start; with a build,
against that AITER: its kernels and chips, the keys of all tables that it merges, order and line ends.

Each finding has a way out (`rules.FIXES`). No GPU is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from orchestrator.errors import InputError, TunedDBError
from orchestrator.tables.build import STANDINGS, Build
from orchestrator.tables.kinds import describe_own, in_aiter, rows_by_kind
from orchestrator.tables.locate import family_of, shipped_tables
from orchestrator.tables.open import csv_records, text_lines
from orchestrator.tables.records import current_records, read_records, stale
from orchestrator.tables.rules import FIX, FIXES, REBUILD, Broken, RowRules
from orchestrator.tables.tuned import (
    TAG,
    Key,
    KeyFault,
    Table,
    TableReader,
    TableRow,
    chip_name,
    file_order,
    number_of,
    read_table,
    twice,
)
from worker.families import Family
from worker.text import Finding, Level

Verdict = Literal["safe", "rebuild", "unsafe"]
VERDICTS: Mapping[Verdict, str] = {
    "safe": "safe in", "rebuild": "safe after a rebuild in (AITER_REBUILD=1, once)", "unsafe": "not safe in",
}  # fmt: skip
OTHERS = ("tuned_fhmoe", "tuned_grouped_fmoe", "chunk_gdn_h_opt_tuned", "asm_a8w8_gemm")
"""Tables of AITER's that nothing here tunes: only their form is looked at."""
SHOWN = 5


@dataclass(slots=True)
class Checked:
    """A table that was checked. `family` is "" where none is known here. `known` and `stale` count its records of
    provenance, `kinds` its rows by whose kernels they have, `build` its rows by what a build makes of them."""

    path: Path
    family: str
    rows: int = 0
    chips: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    known: int = 0
    stale: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    build: dict[str, int] | None = None

    @property
    def has_records(self) -> bool:
        """True where a file of records lies beside it that is not empty."""
        return self.known + self.stale > 0

    def add(self, line: int, broken: Broken) -> None:
        """Add a finding on a line."""
        rule, level, text = broken
        self.findings.append(Finding(level, rule, str(self.path), line, text))

    def count(self, level: Level) -> int:
        """Number of findings of this level."""
        return sum(f.level == level for f in self.findings)

    def by_rule(self) -> dict[tuple[str, Level], list[Finding]]:
        """The findings by rule and level."""
        out: dict[tuple[str, Level], list[Finding]] = {}
        for f in self.findings:
            out.setdefault((f.rule, f.level), []).append(f)
        return out

    def problems(self) -> list[dict[str, Any]]:
        """Every finding with its place and the way out, errors first, then by line."""
        found = sorted(self.findings, key=lambda f: (f.level, f.line, f.rule, f.text))
        return [
            {"file": f.path, "level": f.level, "line": f.line, "rule": f.rule, "text": f.text,
             "fix": FIXES.get(f.rule, FIX)}
            for f in found
        ]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The table's part of the document of `--json`."""
        findings = [
            {"rule": rule, "level": level, "count": len(found),
             "examples": [{"line": f.line, "text": f.text} for f in found[:SHOWN]]}
            for (rule, level), found in self.by_rule().items()
        ]  # fmt: skip
        known = {"known": self.known, "stale": self.stale, "unknown": self.rows - self.known}
        return {
            "path": str(self.path),
            "family": self.family or None,
            "rows": self.rows,
            "chips": dict(self.chips),
            "errors": self.count("error"),
            "warnings": self.count("warning"),
            "kinds": {kind or "unknown": n for kind, n in self.kinds.items()},
            **({"build": self.build} if self.build is not None else {}),
            "findings": findings,
            "provenance": known if self.has_records else None,
        }


def check(
    paths: Sequence[Path], wanted: str | None, err_ratio: float, build: Build | None = None, *, alone: bool = False
) -> tuple[list[Checked], list[str]]:
    """(the tables, what could not be read at all). A folder is a run's, or one with AITER's tables.

    `build`: the AITER that is to serve them, to which they are held; `alone`: it reads none of its own beside them.
    """
    out, faults = list[Checked](), list[str]()
    seen: dict[str, dict[Any, str]] = {}
    given = list(expand(paths, faults))
    for path in given:
        try:
            family = _family(path, wanted)
            if family is None:
                out.append(_check_form(path))
                continue
            if family.name not in seen:
                seen[family.name] = _places(build, family, given) if build and not alone else {}
            out.append(_check(path, family, err_ratio, seen[family.name], build, alone=alone))
        except InputError as e:
            faults += e.faults
    return out, faults


def verdict_of(tables: Iterable[Checked]) -> Verdict:
    """The verdict on tables that were held to a build."""
    found = {f.level if f.rule != REBUILD else f.rule for c in tables for f in c.findings}
    return "unsafe" if "error" in found else "rebuild" if REBUILD in found else "safe"


def expand(paths: Iterable[Path], faults: list[str]) -> list[Path]:
    """Files as they are; of a folder its tuned.csv, or AITER's tables in it and in its model_configs."""
    out: dict[Path, None] = {}
    for path in paths:
        found = [path]
        if path.is_dir():
            configs = path / "aiter" / "configs" if (path / "aiter" / "configs").is_dir() else path
            own = [path / "tuned.csv"] if (path / "tuned.csv").is_file() else []
            found = own or [*shipped_tables(configs), *shipped_tables(configs / "model_configs")]
            if not found:
                faults.append(f"{path}: holds neither a run's tuned.csv nor tables of AITER's")
        out |= dict.fromkeys(found)
    return list(out)


def _family(path: Path, wanted: str | None) -> Family | None:
    try:
        return family_of(path, wanted)
    except TunedDBError:
        if any(name in path.name for name in OTHERS):
            return None
        raise


def _check(
    path: Path, family: Family, err_ratio: float, seen: dict[Any, str], build: Build | None, *, alone: bool
) -> Checked:
    """Check a table. `seen`: FILE:LINE of each key of the family so far."""
    out, reader = Checked(path, family.name), TableReader(path, family, lenient=True)
    header = reader.header
    if reader.head.startswith("\ufeff"):
        out.add(1, ("bom", "warning", "begins with a byte order mark"))
    if missing := family.to_aiter(n for n in family.tuned_header if n not in header and n not in ("xbf16", "flat")):
        derived = "; AITER takes gfx from cu_num" if "gfx" in missing else ""
        out.add(1, ("columns", "warning", f"has no column {', '.join(missing)}, as tables of an earlier date{derived}"))
    rules, rows = RowRules(family, header, err_ratio, build), list[TableRow]()
    for line, _, cells in reader.records():
        if not any(cells):
            continue
        out.rows += 1
        key: Key | None = None
        try:
            rows.append(reader.row(line, 0, cells))
            key = rows[-1].key
        except KeyFault as e:
            out.add(line, ("key", "error", str(e)))
        for broken in rules(cells, key):
            out.add(line, broken)
    out.chips.update(chip_name(row.key[0], row.key[1]) for row in rows)
    place = build.start(family).place if build else lambda row, family: row.place
    for here, first in twice(((place(row, family), f"{path}:{row.line}") for row in rows), seen):
        out.add(int(here.rpartition(":")[2]), _doubled(path, first, family, build))
    _check_records_and_kinds(Table(path, family, header, (), tuple(rows), ()), out)
    if build is not None:
        standings = Counter(f.rule.removeprefix("build: ") for f in out.findings if f.rule.startswith("build: "))
        standings["loads"] = len(rows) - standings.total()
        out.build = {s: standings[s] for s in STANDINGS if standings[s]}
        for line, broken in _form(path, header, rows, family, build, alone=alone):
            out.add(line, broken)
    return out


def _places(build: Build, family: Family, given: Sequence[Path]) -> dict[Any, str]:
    """FILE:LINE of each key of the build's own tables, without those that are given or replaced by name."""
    out: dict[Any, str] = {}
    files, names = {p.resolve() for p in given}, {p.name for p in given}
    for path in build.tables(family):
        if path.resolve() not in files and path.name not in names:
            for row in read_table(path, family, lenient=True).rows:
                place = build.start(family).place(row, family)
                out.setdefault(place, f"{path.relative_to(build.tree.root)}:{row.line}")
    return out


def _doubled(path: Path, first: str, family: Family, build: Build | None) -> Broken:
    """The finding on a row whose key `first` has, too.

    An error where AITER merges both: a table that its rule for names does not find is read by a variable alone.
    """
    merged = not build or Path(family.tuned_csv).stem in path.name or not first.startswith("aiter/configs/")
    stops = not build or build.start(family).stops
    does = "AITER stops at its start" if stops else "AITER silently leaves out one of the two"
    text = f"has the key of {first}: {does if merged else f'in model_configs {does}'}"
    return "duplicate", "error" if merged else "warning", text


def _form(
    path: Path, header: tuple[str, ...], rows: Sequence[TableRow], family: Family, build: Build, *, alone: bool
) -> Iterator[tuple[int, Broken]]:
    """(line, finding) of a table's header, line ends and order, as a build wants them."""
    start = build.start(family)
    mine, own = ([n for n in h if n != TAG or not start.tag] for h in (header, build.header(family)))
    if start.one_header and own and mine != own and not alone:
        yield 1, ("header", "error", f"its columns are not those of {family.tuned_csv}: AITER stops at its start")
    if n := next((n for n, line in enumerate(text_lines(path), 1) if line.endswith("\r\n")), 0):
        yield n, ("line ends", "warning", "ends with CRLF, as others may; .gitattributes of AITER wants LF")
    keys = [file_order(row.key, family) for row in rows]
    unordered = (row for row, before, key in zip(rows[1:], keys, keys[1:], strict=False) if key < before)
    if not family.two_stages and (row := next(unordered, None)):
        yield row.line, ("order", "warning", "comes before the row above it in the order of AITER's tuners")


def _check_form(path: Path) -> Checked:
    """Check a table of no family that is tuned here."""
    out, header = Checked(path, ""), list[str]()
    out.add(1, ("family", "warning", "is of no family that is tuned here: only its form was looked at"))
    for line, _, cells in csv_records(path):
        if not header:
            header = list(cells)
        elif any(cells):
            out.rows += 1
            us = cells[header.index("us")] if "us" in header and len(cells) == len(header) else "1"
            if len(cells) != len(header):
                level: Level = "error" if len(cells) > len(header) else "warning"
                out.add(line, ("cells", level, f"has {len(cells)} cells, the header {len(header)}"))
            elif (number_of(us) or 0) <= 0:
                out.add(line, ("us", "error", f"us is {us[:40] or 'empty'}: not a time"))
    if not header:
        raise TunedDBError(f"{path}: is empty: it has no header and no rows")
    return out


def _check_records_and_kinds(table: Table, out: Checked) -> None:
    """Add findings on records without a row, and on rows of our tuners among AITER's, or in a folder that AITER reads:
    AITER stops at them."""
    records = read_records(table.path)
    known = current_records(table, records)
    out.known, out.stale = len(known), len(records) - len(known)
    if out.stale:
        out.add(1, ("provenance", "warning", stale(table.path, records, known)))
    found = rows_by_kind(table, known)
    out.kinds.update({kind: len(rows) for kind, rows in found.items()})
    if "aiter" in found or in_aiter(table.path.absolute()):
        way_out = "delete the row" if "aiter" in found else "AITER reads this folder"
        for row in found.get("own", ()):
            words = f"{describe_own(table.cells(row))}, at which AITER stops: {way_out}"
            out.add(row.line, ("mixed", "error", words))
