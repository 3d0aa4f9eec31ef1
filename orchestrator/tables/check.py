"""Check tuned tables against AITER's rules, row by row and together, as AITER merges them when it starts; with a build,
against that AITER: its kernels and chips, the keys of all tables that it merges, order and line ends. No GPU is needed.

`db check` and `publish` call `check_tables`, which makes a `TableCheck` of each table. The rules for a single row are
in `rules.py`, and so is the way out of each finding (`rules.FIXES`). A new rule for a whole table is a step of
`TableCheck.run`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from orchestrator.errors import InputError, TunedDBError
from orchestrator.files.read import text_lines
from orchestrator.tables.aiter_build import Build
from orchestrator.tables.keys import TAG, Key, KeyFault, chip_name, file_order, repetitions
from orchestrator.tables.mixing import MAX_EXAMPLES, is_merged_by_aiter, rows_by_kind
from orchestrator.tables.provenance import current_records, describe_stale, read_records
from orchestrator.tables.row_kernels import describe_own
from orchestrator.tables.rules import REBUILD, BrokenRule, RowRules, fix_of
from orchestrator.tables.table import Table, TableReader, TableRow, read_table
from orchestrator.tables.table_names import family_of, shipped_tables, table_of_others
from worker.aiter_tree.kernels import Standing
from worker.families import Family
from worker.text import Finding, Level, and_more, plural

Verdict = Literal["safe", "rebuild", "unsafe"]
VERDICTS: Mapping[Verdict, str] = {
    "safe": "safe in",
    "rebuild": "safe after a rebuild in (AITER_REBUILD=1, once)",
    "unsafe": "not safe in",
}
MAX_ROWS = 5
"""Most rows of one cause that a line names."""

# A kernel's name, a size, FILE:LINE.
_NAME_OR_NUMBER = re.compile(r"\S*\d\S*")

SeenKeys = dict[Any, str]
"""`FILE:LINE` of the first row of each key, over all tables of a family so far."""


@dataclass(slots=True)
class CheckedTable:
    """A table that was checked, with its findings."""

    path: Path
    family: str
    """Empty if it is of no family that is tuned here."""
    rows: int = 0
    chips: Counter[str] = field(default_factory=Counter)
    """Its rows by chip."""
    findings: list[Finding] = field(default_factory=list)
    known: int = 0
    """Its records of provenance that are current."""
    stale: int = 0
    """Its records whose row has changed or gone."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Its rows by the owner of their kernels (`row_kernels.KernelKind`)."""
    build: dict[str, int] | None = None
    """Its rows by their standing in a build (`loads`, `rebuild`, ...), None without a build."""

    @property
    def has_records(self) -> bool:
        """True where a file of records lies beside it that is not empty."""
        return self.known + self.stale > 0

    def add(self, line: int, broken: BrokenRule) -> None:
        """Add a finding on a line."""
        self.findings.append(Finding(broken.level, broken.rule, str(self.path), line, broken.text))

    def count(self, level: Level) -> int:
        """Number of findings of this level."""
        return sum(finding.level == level for finding in self.findings)

    def _sorted_findings(self) -> list[Finding]:
        """Errors first, then by line."""
        return sorted(self.findings, key=lambda f: (f.level, f.line, f.rule, f.text))

    def problems(self) -> list[dict[str, Any]]:
        """Every finding with its place and the way out, errors first, then by line."""
        return [
            {"file": f.path, "level": f.level, "line": f.line, "rule": f.rule, "text": f.text, "fix": fix_of(f)}
            for f in self._sorted_findings()
        ]

    def problem_lines(self) -> list[str]:
        """A line for each cause, with its rows: findings of one rule whose texts differ in names and numbers alone."""
        causes: dict[tuple[str, str, str], list[Finding]] = {}
        for finding in self._sorted_findings():
            cause = (finding.level, finding.rule, _NAME_OR_NUMBER.sub("#", finding.text))
            causes.setdefault(cause, []).append(finding)
        return [_cause_line(findings) for findings in causes.values()]

    def to_json(self) -> dict[str, Any]:
        """The table's part of the document of `--json`."""
        document: dict[str, Any] = {
            "path": str(self.path),
            "family": self.family or None,
            "rows": self.rows,
            "chips": dict(self.chips),
            "errors": self.count("error"),
            "warnings": self.count("warning"),
            "kinds": {kind or "unknown": rows for kind, rows in self.kinds.items()},
        }
        if self.build is not None:
            document["build"] = self.build
        document["findings"] = self._findings_by_rule()
        document["provenance"] = None
        if self.has_records:
            unknown = self.rows - self.known
            document["provenance"] = {"known": self.known, "stale": self.stale, "unknown": unknown}
        return document

    def _findings_by_rule(self) -> list[dict[str, Any]]:
        by_rule: dict[tuple[str, Level], list[Finding]] = {}
        for finding in self.findings:
            by_rule.setdefault((finding.rule, finding.level), []).append(finding)
        groups = []
        for (rule, level), findings in by_rule.items():
            examples = [{"line": finding.line, "text": finding.text} for finding in findings[:MAX_EXAMPLES]]
            groups.append({"rule": rule, "level": level, "count": len(findings), "examples": examples})
        return groups


def _cause_line(findings: Sequence[Finding]) -> str:
    first = findings[0]
    if len(findings) > 1:
        rows = and_more([str(finding.line) for finding in findings], MAX_ROWS)
        where = f"{first.path}: {first.rule}: {len(findings):,} rows ({rows}): "
        if len({finding.text for finding in findings}) > 1:
            where += "the first: "
    elif first.line:
        where = f"{first.path}:{first.line}: {first.rule}: "
    else:
        where = f"{first.path}: {first.rule}: "
    return f"{first.level}: {where}{first.text}; fix: {fix_of(first)}"


def verdict_of(tables: Iterable[CheckedTable]) -> Verdict:
    """The verdict on tables that were held to a build."""
    findings = [finding for table in tables for finding in table.findings]
    if any(finding.level == "error" and finding.rule != REBUILD for finding in findings):
        return "unsafe"
    return "rebuild" if any(finding.rule == REBUILD for finding in findings) else "safe"


def check_tables(
    paths: Sequence[Path], wanted: str | None, err_ratio: float, build: Build | None = None, *, alone: bool = False
) -> tuple[list[CheckedTable], list[str]]:
    """Check tables: (the checked ones, a sentence on each that could not be read at all).

    A folder is a run's, or one with AITER's tables. `wanted`: the family, None to find it out. `err_ratio`: the largest
    share of wrong elements. `build`: the AITER that is to serve the tables; `alone`: it reads none of its own beside.
    """
    checked: list[CheckedTable] = []
    faults: list[str] = []
    seen: dict[str, SeenKeys] = {}
    files = _expand_folders(paths, faults)
    for path in files:
        try:
            family = _known_family(path, wanted)
            if family is None:
                table = CheckedTable(path, "")
                text = "is of no family that is tuned here: it was not checked"
                table.add(0, BrokenRule("family", "warning", text))
                checked.append(table)
                continue
            if family.name not in seen:
                seen[family.name] = _keys_of_build(build, family, files) if build and not alone else {}
            check = TableCheck(path, family, err_ratio, build, alone=alone)
            checked.append(check.run(seen[family.name]))
        except InputError as e:
            faults += e.faults
    return checked, faults


def _expand_folders(paths: Iterable[Path], faults: list[str]) -> list[Path]:
    """Files as they are; of a folder its tuned.csv, or AITER's tables in it and in its model_configs."""
    files: dict[Path, None] = {}
    for path in paths:
        tables = _tables_in(path) if path.is_dir() else [path]
        if not tables:
            faults.append(f"{path}: holds neither a run's tuned.csv nor tables of AITER's")
        files |= dict.fromkeys(tables)
    return list(files)


def _tables_in(folder: Path) -> list[Path]:
    if (folder / "tuned.csv").is_file():
        return [folder / "tuned.csv"]
    configs = folder
    if (folder / "aiter" / "configs").is_dir():
        configs = folder / "aiter" / "configs"
    return [*shipped_tables(configs), *shipped_tables(configs / "model_configs")]


def _known_family(path: Path, wanted: str | None) -> Family | None:
    """The family of a table; None for a table of AITER's that nothing here tunes."""
    try:
        return family_of(path, wanted)
    except TunedDBError:
        if table_of_others(path):
            return None
        raise


def _keys_of_build(build: Build, family: Family, files: Sequence[Path]) -> SeenKeys:
    """The keys of the build's own tables, without those that are checked or replaced by name."""
    seen: SeenKeys = {}
    checked = {path.resolve() for path in files}
    replaced = {path.name for path in files}
    rules = build.merge_rules(family)
    for path in build.tables(family):
        if path.resolve() in checked or path.name in replaced:
            continue
        for row in read_table(path, family, lenient=True).rows:
            seen.setdefault(rules.key_of(row, family), f"{path.relative_to(build.tree.root)}:{row.line}")
    return seen


class TableCheck:
    """The check of one table; `run` once."""

    def __init__(self, path: Path, family: Family, err_ratio: float, build: Build | None, *, alone: bool) -> None:
        self.path = path
        self.family = family
        self.build = build
        self.alone = alone
        self.checked = CheckedTable(path, family.name)
        self._reader = TableReader(path, family, lenient=True)
        self.header = self._reader.header
        self._rules = RowRules(family, self.header, err_ratio, build)

    def run(self, seen: SeenKeys) -> CheckedTable:
        """Check header and rows, then the keys over all tables so far (`seen`, to which it adds its own), records and
        kinds, and last what a build wants of the file."""
        self._check_header()
        rows = self._check_rows()
        self.checked.chips.update(chip_name(row.key[0], row.key[1]) for row in rows)
        self._check_keys(rows, seen)
        self._check_records_and_kinds(Table(self.path, self.family, self.header, (), tuple(rows), ()))
        if self.build is not None:
            self.checked.build = self._count_standings(rows)
            for line, broken in self._check_form(rows, self.build):
                self.checked.add(line, broken)
        return self.checked

    def _check_header(self) -> None:
        if self._reader.head.startswith("\ufeff"):
            self.checked.add(1, BrokenRule("bom", "warning", "begins with a byte order mark"))
        needed = [name for name in self.family.tuned_header if name not in self.family.late_columns]
        missing = self.family.to_aiter(name for name in needed if name not in self.header)
        if missing:
            text = f"has no column {', '.join(missing)}, as tables of an earlier date"
            if "gfx" in missing:
                text += "; AITER takes gfx from cu_num"
            self.checked.add(1, BrokenRule("columns", "warning", text))

    def _check_rows(self) -> list[TableRow]:
        """The rows that have a key."""
        rows: list[TableRow] = []
        for line, _, cells in self._reader.records:
            if not any(cells):
                continue
            self.checked.rows += 1
            key: Key | None = None
            try:
                row = self._reader.row(line, 0, cells)
            except KeyFault as e:
                self.checked.add(line, BrokenRule("key", "error", str(e)))
            else:
                rows.append(row)
                key = row.key
            for broken in self._rules.broken(cells, key):
                self.checked.add(line, broken)
        return rows

    def _check_keys(self, rows: Sequence[TableRow], seen: SeenKeys) -> None:
        doubled = list(repetitions(((self._merge_key(row), f"{self.path}:{row.line}") for row in rows), seen))
        owners = {first.rpartition(":")[0] for _, first in doubled}
        is_copy = len(doubled) == len(rows) > 1 and len(owners) == 1
        if is_copy:  # of the build's own table
            broken = self._doubled(owners.pop())
            self.checked.add(1, broken._replace(text=f"each of its {plural(len(rows), 'row')} {broken.text}"))
            return
        for second, first in doubled:
            self.checked.add(int(second.rpartition(":")[2]), self._doubled(first))

    def _merge_key(self, row: TableRow) -> Any:
        """The key of a row as the build, or today's AITER, compares it."""
        return row.place if self.build is None else self.build.merge_rules(self.family).key_of(row, self.family)

    def _doubled(self, first: str) -> BrokenRule:
        """The finding on a row whose key `first` has, too.

        An error where AITER merges both: a table that its rule for names does not find is read by a variable alone.
        """
        does = "AITER stops at its start"
        if self.build is not None and not self.build.merge_rules(self.family).stops_at_repeated_key:
            does = "AITER silently leaves out one of the two"
        is_found = Path(self.family.tuned_csv).stem in self.path.name
        if self.build is None or is_found or not first.startswith("aiter/configs/"):
            return BrokenRule("duplicate", "error", f"has the key of {first}: {does}")
        return BrokenRule("duplicate", "warning", f"has the key of {first}: in model_configs {does}")

    def _check_records_and_kinds(self, table: Table) -> None:
        """Add findings on records without a row, and on rows of our tuners among AITER's, or in a folder that AITER
        reads: AITER stops at them."""
        records = read_records(table.path)
        known = current_records(table, records)
        self.checked.known = len(known)
        self.checked.stale = len(records) - len(known)
        if stale := describe_stale(table.path, records, known):
            self.checked.add(1, BrokenRule("provenance", "warning", stale))
        by_kind = rows_by_kind(table, known)
        self.checked.kinds.update({kind: len(rows) for kind, rows in by_kind.items()})
        if "aiter" not in by_kind and not is_merged_by_aiter(table.path.absolute()):
            return
        for row in by_kind.get("own", ()):
            text = f"{describe_own(table.cells(row))}, at which AITER stops"
            self.checked.add(row.line, BrokenRule("mixed", "error", text))

    def _count_standings(self, rows: Sequence[TableRow]) -> dict[str, int]:
        """The number of rows by what the build makes of them; a row without a finding loads."""
        rules = [finding.rule for finding in self.checked.findings]
        standings = Counter(rule.removeprefix("build: ") for rule in rules if rule.startswith("build: "))
        standings["loads"] = len(rows) - standings.total()
        return {standing: standings[standing] for standing in get_args(Standing) if standings[standing]}

    def _check_form(self, rows: Sequence[TableRow], build: Build) -> Iterator[tuple[int, BrokenRule]]:
        """(line, finding) of a table's header, line ends and order, as a build wants them."""
        if build.merge_rules(self.family).stops_at_other_columns and not self.alone and not self._has_header_of(build):
            text = f"its columns are not those of {self.family.tuned_csv}: AITER stops at its start"
            yield 1, BrokenRule("header", "error", text)
        for number, line in enumerate(text_lines(self.path), 1):
            if line.endswith("\r\n"):
                text = "ends with CRLF, as others may; .gitattributes of AITER wants LF"
                yield number, BrokenRule("line ends", "warning", text)
                break
        order = file_order(self.family, self.header)
        keys = [order(row.key) for row in rows]
        for row, key_above, key in zip(rows[1:], keys, keys[1:], strict=False):
            if key < key_above:
                text = "comes before the row above it in the order of AITER's tuners"
                yield row.line, BrokenRule("order", "warning", text)
                break

    def _has_header_of(self, build: Build) -> bool:
        """True where the columns are those of the build's own table, or it has none; a merge that knows tags ignores
        that column."""
        columns = list(self.header)
        own_columns = list(build.header(self.family))
        if build.merge_rules(self.family).key_has_tag:
            columns = [name for name in columns if name != TAG]
            own_columns = [name for name in own_columns if name != TAG]
        return not own_columns or columns == own_columns
