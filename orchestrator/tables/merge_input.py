"""The input of a merge: the tables, profiles and runs that a user names, their rows, and the facts of each row.

`db merge`, `publish` and the recheck of a run call `open_sources`. A run's folder gives its tuned.csv as a table and
its profile.csv as a profile. The rows are read while the merge iterates over them, so that files may be of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import InputError, TunedDBError
from orchestrator.files.faults import MAX_FAULTS, listed
from orchestrator.tables.keys import TAG, KeyFault
from orchestrator.tables.newcomers import SOURCE, Newcomer
from orchestrator.tables.provenance import Facts, read_records
from orchestrator.tables.row_kernels import kernel_identity
from orchestrator.tables.run_folders import fault_of_config_files, table_of
from orchestrator.tables.table import PROFILE_EXTRA, TableReader, fill_up
from orchestrator.tables.table_names import family_of
from worker.families import Family
from worker.text import plural

STAGE = "stage"
"""A column of AITER's fmoe profiles, whose rows time one stage alone."""
BESIDE_A_TIME = ("attempt", "node", "slot", "samples", "margin")
"""Columns of our tables that go into a row's record."""


@dataclass(slots=True)
class MergeInput:
    """The input of a merge, all of one family."""

    family: Family
    tables: list[Path]
    """Their rows are newcomers."""
    profiles: list[Path]
    """Their rows were measured beside the newcomers."""
    facts_of: dict[str, Facts] = field(default_factory=dict)
    """The facts of a table's newcomers, by the table's path."""
    notes: list[str] = field(default_factory=list)
    """Sentences on what was read; complete when the rows were read."""

    def newcomers(self) -> Iterator[dict[str, str]]:
        """The rows of the tables. Raises TunedDBError."""
        for path in self.tables:
            yield from self._read_rows(path, fill=True)

    def beside(self) -> Iterator[dict[str, str]]:
        """The rows of the profiles. Raises TunedDBError."""
        for path in self.profiles:
            yield from self._read_rows(path)

    def facts(self, new: Newcomer) -> Mapping[str, Any]:
        """The fields of a newcomer's record."""
        source = new.cells.get(SOURCE, "")
        return self.facts_of[source](new) if source in self.facts_of else {}

    def _read_rows(self, path: Path, *, fill: bool = False) -> Iterator[dict[str, str]]:
        """The rows of a tuned table or profile by column name, each with the file it is of, one at a time.

        `fill`: a row that lacks its last cells is filled up with nothing, as AITER does, unless the file ends within
        it. Adds remarks to the notes. Raises TunedDBError, at last with every fault of a row, by file and line.
        """
        reader = TableReader(path, self.family, cap=None)
        header = reader.header
        faults: list[str] = []
        filled_up = 0
        if STAGE in header:
            raise TunedDBError(
                f"{path}:1: times single stages (column {STAGE}), not whole shapes: give the tuned table"
            )
        foreign = [name for name in header if name not in (*self.family.tuned_header, *PROFILE_EXTRA, TAG)]
        if foreign:
            self.notes.append(f"{path}: columns of no meaning here: {', '.join(foreign)[:200]}")
        try:
            for line, text, cells in reader.records:
                if not any(cells):
                    continue
                has_line_end = text.endswith(("\n", "\r"))
                if fill and has_line_end and reader.us_index < len(cells) < len(header):
                    filled_up += 1
                    cells = fill_up(cells, len(header))
                try:
                    reader.row(line, 0, cells)
                except KeyFault as e:
                    faults.append(f"{path}:{line}: {e}")
                    continue
                if not faults:
                    yield {**dict(zip(header, cells, strict=True)), SOURCE: str(path)}
        except TunedDBError as e:
            raise TunedDBError([*faults, *e.faults]) from e
        if faults:
            raise TunedDBError(listed(faults, MAX_FAULTS, ""))
        self.notes += reader.notes()
        if filled_up:
            self.notes.append(
                f"{path}: filled up {plural(filled_up, 'row')} short of cells with nothing, as AITER does"
            )


def open_sources(
    sources: Sequence[Path],
    profiles: Sequence[Path],
    into: Path | None,
    wanted: str | None,
    run_facts: Callable[[Path], Facts] | None = None,
) -> MergeInput:
    """The tables and profiles behind the paths. Raises InputError for other files, and for another family.

    A folder is a run's: its tuned.csv, with its profile.csv beside. `run_facts` gives what a run's folder knows of its
    rows (`results.run_facts.RunFacts`); without it, rows are known by the records beside their table.
    """
    runs = [path for path in sources if path.is_dir()]
    ids = [path for path in sources if not path.suffix and not path.exists()]
    faults = [f"{path}: no such folder; a run is named by its folder here, such as runs/{path.name}" for path in ids]
    faults += [fault for fault in map(_fault_of_run, runs) if fault]
    tables = list(map(table_of, dict.fromkeys(sources)))
    faults += [fault for fault in map(fault_of_config_files, tables) if fault]
    if faults:
        raise InputError(faults)
    of_one_family = [into, *tables] if into and into.exists() else tables
    family = one_family(of_one_family, wanted)
    profiles_of_runs = [run / "profile.csv" for run in runs if (run / "profile.csv").is_file()]
    merge_input = MergeInput(family, tables, list(dict.fromkeys((*profiles, *profiles_of_runs))))
    for table in tables:
        is_of_run = table.name == "tuned.csv" and (table.parent / "provenance.json").is_file()
        facts = run_facts(table.parent) if run_facts and is_of_run else _facts_by_records(table, family)
        merge_input.facts_of[str(table)] = facts
    return merge_input


def _fault_of_run(run: Path) -> str:
    if not (run / "tuned.csv").is_file():
        return f"{run}: holds no tuned.csv; is it a run's folder, and did the run end? `resume` writes it again"
    return ""


def one_family(paths: Sequence[Path], wanted: str | None) -> Family:
    """The one family of all of them; a file of unknown family is taken to be of it."""
    paths_by_family: dict[Family, Path] = {}
    unknown: list[TunedDBError] = []
    for path in paths:
        try:
            paths_by_family.setdefault(family_of(path, wanted), path)
        except TunedDBError as e:
            unknown.append(e)
    if not paths_by_family:
        raise unknown[0]
    if len(paths_by_family) > 1:
        several = "; ".join(f"{path} is of {family.name}" for family, path in paths_by_family.items())
        raise InputError(f"tables of several families do not merge: {several}; merge one after another")
    return next(iter(paths_by_family))


def _facts_by_records(table: Path, family: Family) -> Facts:
    """The fields of a newcomer's record, by the record beside its table, or by its name alone."""
    records = read_records(table)

    def facts(new: Newcomer) -> Mapping[str, Any]:
        facts: dict[str, Any] = {"source": str(table)}
        facts |= {name: new.cells[name] for name in BESIDE_A_TIME if new.cells.get(name)}
        facts["spread"] = new.spread or None
        record = records.get(new.place)
        _, kernel, split = kernel_identity(new.cells, family.name) or ("", "", "")
        if record and record.us == new.us and (record.text("kernel"), record.text("split")) == (kernel, split):
            facts |= record.document
        return facts

    return facts
