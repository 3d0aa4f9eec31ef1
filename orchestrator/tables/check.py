"""Check tuned tables against AITER's rules, row by row and together, as AITER merges them at its start; with a build,
against that AITER: its kernels and chips, the keys of all tables that it merges, order and line ends.

Each finding has a way out (`rules.FIXES`). No GPU is needed.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from orchestrator.errors import InputError, TunedDBError
from orchestrator.files.read import read_head, text_lines
from orchestrator.tables.kinds import (
    SHOWN,
    current_records,
    describe_own,
    in_aiter,
    kind_of,
    read_records,
    rows_by_kind,
    stale,
)
from orchestrator.tables.locate import family_of, shipped_tables, table_of_others
from orchestrator.tables.rules import REBUILD, Broken, RowRules, fix_of
from orchestrator.tables.tuned import (
    TAG,
    Key,
    KeyFault,
    Table,
    TableReader,
    TableRow,
    chip_name,
    file_order,
    key_dict,
    read_table,
    twice,
)
from worker.aiter_tree.kernels import KernelAvailability, KernelLists, Standing
from worker.aiter_tree.locate import NotATreeError, read_text, tree_at
from worker.families import NULLS, Family, backend_of
from worker.text import Finding, Level, and_more, plural

_IMPORTED = {"flydsl": "flydsl", "triton": "", "opus": ""}
"""Backends that dispatch imports from aiter/ops/<backend> when a row names them, with the package that they need."""


@dataclass(frozen=True, slots=True)
class StartMerge:
    """AITER's merge of a family's tables at its start, by what a tree's aiter/jit/core.py says of it.

    `folder`: model_configs is merged (since v0.1.7). `stops`: a key that comes twice stops it (since 94a6edda3a,
    2026-04-01); before, AITER silently left out one of the rows. `one_header`: so do tables of different
    columns (until v0.1.12.post2). `names`: the columns of the key, those of the family's untuned list with cu_num
    (since v0.1.9) and gfx (since v0.1.12.post2); `tag`: and `_tag`.
    """

    folder: bool
    stops: bool
    one_header: bool
    names: tuple[str, ...]
    tag: bool

    def place(self, row: TableRow, family: Family) -> tuple[int | str, ...]:
        """The key of a row in this merge."""
        key = key_dict(row.key, family)
        return (*(key[n] for n in self.names), row.tag if self.tag else "")


class Build:
    """One build. `name`: how the user called it; `whole`: its Python packages lie beside it, as in an image."""

    def __init__(self, root: Path, name: str = "", *, whole: bool = False) -> None:
        """Raises InputError where there is no AITER."""
        self.name = name or str(root)
        try:
            self._kernels = KernelLists(tree_at(root))
        except NotATreeError as e:
            raise InputError(f"--build {self.name}: no AITER tree is there: {e}") from e
        self.tree = self._kernels.tree
        self.configs = self.tree.package / "configs"
        self._whole = whole or self.tree.wheel
        self._compiled = cache(self._read_compiled)
        self.start = cache(self._read_start)

    @property
    def problems(self) -> Sequence[str]:
        """Parts of the tree that could not be read."""
        return tuple(self._kernels.problems)

    def answer(self, family: Family, key: Key, cells: Mapping[str, str]) -> KernelAvailability:
        """The outcome of a row, never `compiled`. `key` begins with its gfx and cu_num."""
        if kind_of(cells) == "own":
            return KernelAvailability("cannot", f"{describe_own(cells)}, and AITER has none of that name")
        kernel = self._kernels.kernel(family.name, str(key[0]), cells)
        if kernel.standing in ("loads", "compiled") and (why := self._not_importable(family, cells)):
            return KernelAvailability("cannot", why)
        if kernel.standing != "compiled":
            return kernel
        if self._is_built(family, key, cells.get("kernelName", ""), kernel):
            return replace(kernel, standing="loads")
        return replace(kernel, standing="rebuild", why="is not compiled in")

    def tables(self, family: Family) -> list[Path]:
        """The tables that it merges at its start: the family's own, then those of model_configs."""
        files = [self.configs / family.tuned_csv]
        if self.start(family).folder:
            files += shipped_tables(self.configs / "model_configs", family)
        return [f for f in files if f.is_file()]

    @cached_property
    def chips(self) -> frozenset[str]:
        """The architectures that it knows; none where they are not readable."""
        texts = (_text(self.tree.package / "jit" / "utils" / f) for f in ("build_targets.py", "chip_info.py"))
        return frozenset(re.findall(r"[\"'](gfx[0-9a-f]+)[\"']", "".join(texts)))

    def header(self, family: Family, *, untuned: bool = False) -> tuple[str, ...]:
        """The columns of the family's own table, or of its untuned list, by our names; () if the tree has none."""
        try:
            text = read_head(self.configs / (family.untuned_csv if untuned else family.tuned_csv), 4096, InputError)
        except InputError:
            return ()
        return family.from_aiter(c.strip() for c in next(csv.reader(text.splitlines()[:1]), []))

    def _read_start(self, family: Family) -> StartMerge:
        core = _text(self.tree.package / "jit" / "core.py")
        listed = self.header(family, untuned=True)
        chip = [n for n in ("gfx", "cu_num") if f'keys.append("{n}")' in core and n in family.chip_columns]
        names = (*chip, *(n for n in family.key_names if n in listed))
        return StartMerge(
            "model_configs" in core,
            "duplicate shape" in core and bool(listed),  # without a list AITER compares nothing
            "Column mismatch" in core,
            names if listed else (*family.chip_columns, *family.key_names),
            '"_tag"' in core,
        )

    def _not_importable(self, family: Family, cells: Mapping[str, str]) -> str:
        """The reason for which dispatch cannot import the backend of a row's libtype, "" where it can."""
        backend = backend_of(family.name, cells)
        if backend not in _IMPORTED or cells.get("libtype", "") in NULLS:
            return ""
        if not (self.tree.package / "ops" / backend).is_dir():
            return f"libtype {backend} is not importable: there is no aiter/ops/{backend}"
        package = _IMPORTED[backend]
        if package and self._whole and not (self.tree.root / package).is_dir():
            return f"libtype {backend} is not importable: the package {package} is not installed"
        return ""

    def _is_built(self, family: Family, key: Key, name: str, kernel: KernelAvailability) -> bool:
        if kernel.in_module is not None and (kernel.by_name or not kernel.in_module):
            return kernel.in_module
        return (None if kernel.by_name else key, name) in self._compiled(family)

    def _read_compiled(self, family: Family) -> set[tuple[Key | None, str]]:
        """The shapes with their kernels, and the kernels alone (None), that the modules are compiled from: the rows of
        the family's own table and of those of model_configs. A table that lacks a column of the key names no row: that
        of a8w8 has no q_dtype_w at v0.1.9."""
        tables = []
        for file in self.tables(family):
            with suppress(TunedDBError):
                tables.append(read_table(file, family, lenient=True))
        named = [(r.key, s.cells(r).get("kernelName", "")) for s in tables for r in s.rows]
        return {*named, *((None, name) for _, name in named)}


def _text(path: Path) -> str:
    """The text of a file of the tree, "" where it is not readable."""
    try:
        return read_text(path)
    except (OSError, ValueError):
        return ""


Verdict = Literal["safe", "rebuild", "unsafe"]
VERDICTS: Mapping[Verdict, str] = {
    "safe": "safe in", "rebuild": "safe after a rebuild in (AITER_REBUILD=1, once)", "unsafe": "not safe in",
}  # fmt: skip


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
            {"file": f.path, "level": f.level, "line": f.line, "rule": f.rule, "text": f.text, "fix": fix_of(f)}
            for f in found
        ]

    def problem_lines(self) -> list[str]:
        """A line for each cause, with its rows: findings of one rule whose texts differ in names and numbers alone."""
        causes: dict[tuple[str, str, str], list[Finding]] = {}
        for f in sorted(self.findings, key=lambda f: (f.level, f.line, f.rule, f.text)):
            causes.setdefault((f.level, f.rule, _NAME_OR_NUMBER.sub("#", f.text)), []).append(f)
        return [_cause_line(findings) for findings in causes.values()]

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


# A kernel's name, a size, FILE:LINE.
_NAME_OR_NUMBER = re.compile(r"\S*\d\S*")
ROWS_NAMED = 5


def _cause_line(findings: Sequence[Finding]) -> str:
    first = findings[0]
    if len(findings) > 1:
        rows = and_more([str(f.line) for f in findings], ROWS_NAMED)
        example = "" if len({f.text for f in findings}) == 1 else "the first: "
        where = f"{first.path}: {first.rule}: {len(findings):,} rows ({rows}): {example}"
    elif first.line:
        where = f"{first.path}:{first.line}: {first.rule}: "
    else:
        where = f"{first.path}: {first.rule}: "
    return f"{first.level}: {where}{first.text}; fix: {fix_of(first)}"


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
                out.append(Checked(path, ""))
                out[-1].add(0, ("family", "warning", "is of no family that is tuned here: it was not checked"))
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
        if table_of_others(path):
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
    for line, _, cells in reader.records:
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
    doubled = list(twice(((place(row, family), f"{path}:{row.line}") for row in rows), seen))
    owners = {first.rpartition(":")[0] for _, first in doubled}
    if len(doubled) == len(rows) > 1 and len(owners) == 1:  # a copy of the build's own table
        rule, level, text = _doubled(path, owners.pop(), family, build)
        out.add(1, (rule, level, f"each of its {plural(len(rows), 'row')} {text}"))
        doubled = []
    for here, first in doubled:
        out.add(int(here.rpartition(":")[2]), _doubled(path, first, family, build))
    _check_records_and_kinds(Table(path, family, header, (), tuple(rows), ()), out)
    if build is not None:
        standings = Counter(f.rule.removeprefix("build: ") for f in out.findings if f.rule.startswith("build: "))
        standings["loads"] = len(rows) - standings.total()
        out.build = {s: standings[s] for s in get_args(Standing) if standings[s]}
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
    order = file_order(family, header)
    keys = [order(row.key) for row in rows]
    unordered = (row for row, before, key in zip(rows[1:], keys, keys[1:], strict=False) if key < before)
    if row := next(unordered, None):
        yield row.line, ("order", "warning", "comes before the row above it in the order of AITER's tuners")


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
        for row in found.get("own", ()):
            out.add(row.line, ("mixed", "error", f"{describe_own(table.cells(row))}, at which AITER stops"))
