"""The input of a merge: tuned tables, profiles and runs' folders as one stream of rows with their provenance."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.command_hints import command
from orchestrator.errors import InputError, TunedDBError
from orchestrator.tables.locate import family_of, provenance_of
from orchestrator.tables.policy import SOURCE, Newcomer, identity
from orchestrator.tables.records import Facts, read_records
from orchestrator.tables.rules import written_in_tb
from orchestrator.tables.tuned import MAX_FAULTS, PROFILE_EXTRA, TAG, KeyFault, TableReader
from worker.families import Family
from worker.text import plural
from worker.tuners.catalog import recorded_tuner

STAGE = "stage"
"""A column of AITER's fmoe profiles, whose rows time one stage alone."""


@dataclass(slots=True)
class MergeInput:
    """`tables` give newcomers, `profiles` what was measured beside them; both are read when they are iterated."""

    family: Family
    tables: list[Path]
    profiles: list[Path]
    facts_of: dict[str, Facts] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def newcomers(self) -> Iterator[dict[str, str]]:
        """The rows of the tables. Raises TunedDBError."""
        for path in self.tables:
            yield from read_rows(path, self.family, self.notes, fill=True)

    def beside(self) -> Iterator[dict[str, str]]:
        """The rows of the profiles. Raises TunedDBError."""
        for path in self.profiles:
            yield from read_rows(path, self.family, self.notes)

    def facts(self, new: Newcomer) -> Mapping[str, Any]:
        """The fields of a newcomer's record."""
        source = new.cells.get(SOURCE, "")
        return self.facts_of[source](new) if source in self.facts_of else {}


def open_sources(
    given: Sequence[Path],
    profiles: Sequence[Path],
    into: Path | None,
    wanted: str | None,
    run_facts: Callable[[Path], Facts] | None = None,
) -> MergeInput:
    """The tables and profiles behind the paths. Raises InputError for other files, and for another family.

    A folder is a run's: its tuned.csv, with its profile.csv beside. `run_facts` gives what a run's folder knows of its
    rows (`results.run_facts.RunFacts`); without it, rows are known by the records beside their table.
    """
    runs = [p for p in given if p.is_dir()]
    tables, faults = [p / "tuned.csv" if p.is_dir() else p for p in dict.fromkeys(given)], list[str]()
    for run in runs:
        if not (run / "tuned.csv").is_file():
            faults.append(f"{run}: holds no tuned.csv; is it a run's folder, and did the run end?")
        elif recorded_tuner(str(provenance_of(run).get("tuner") or "")).produces == "configs":
            merge = command(f"configs merge {shlex.quote(str(run))} --into TREE")
            faults.append(f"{run}: its winners are config files, which no table names; merge them so: {merge}")
    if faults:
        raise InputError(faults)
    family = one_family([*([into] if into and into.exists() else []), *tables], wanted)
    beside = [*profiles, *(p / "profile.csv" for p in runs if (p / "profile.csv").is_file())]
    out = MergeInput(family, tables, list(dict.fromkeys(beside)))
    for table in tables:
        of_run = run_facts and table.name == "tuned.csv" and (table.parent / "provenance.json").is_file()
        out.facts_of[str(table)] = run_facts(table.parent) if run_facts and of_run else _facts(table, family)
    return out


def one_family(paths: Sequence[Path], wanted: str | None) -> Family:
    """The one family of all of them; a file of unknown family is taken to be of it."""
    found: dict[str, tuple[Family, Path]] = {}
    untold: TunedDBError | None = None
    for path in paths:
        try:
            of = family_of(path, wanted)
            found.setdefault(of.name, (of, path))
        except TunedDBError as e:
            untold = untold or e
    if not found and untold:
        raise untold
    if len(found) > 1:
        several = "; ".join(f"{path} is of {name}" for name, (_, path) in found.items())
        raise InputError(f"tables of several families do not merge: {several}; merge one after another")
    return next(iter(found.values()))[0]


def read_rows(path: Path, family: Family, notes: list[str], *, fill: bool = False) -> Iterator[dict[str, str]]:
    """The rows of a tuned table or profile by column name, each with the file it is of, one at a time.

    `fill`: a row that lacks its last cells is filled up with nothing, as AITER does, if the file is not cut off in it.
    Adds remarks to `notes`. Raises TunedDBError, at last with every fault of a row, by file and line.
    """
    reader, faults, source = TableReader(path, family, cap=None), list[str](), str(path)
    header, short, in_tb = reader.header, 0, 0
    if STAGE in header:
        raise TunedDBError(f"{path}:1: times single stages (column {STAGE}), not whole shapes: give the tuned table")
    if foreign := [n for n in header if n not in (*family.tuned_header, *PROFILE_EXTRA, TAG)]:
        notes.append(f"{path}: columns of no meaning here: {', '.join(foreign)[:200]}")
    try:
        for at, text, cells in reader.records():
            if not any(cells):
                continue
            if fill and reader.us_at < len(cells) < len(header) and text.endswith(("\n", "\r")):
                short += 1
                cells = [*cells, *[""] * (len(header) - len(cells))]
            try:
                reader.row(at, 0, cells)
            except KeyFault as e:
                if len(faults) <= MAX_FAULTS:
                    faults.append(f"{path}:{at}: {e}")
                continue
            if not faults:
                row = {**dict(zip(header, cells, strict=True)), SOURCE: source}
                in_tb += written_in_tb(row)
                yield row
    except TunedDBError as e:
        raise TunedDBError([*faults, *e.faults]) from e
    if faults:
        raise TunedDBError([*faults[:MAX_FAULTS], *(["... and more"] if len(faults) > MAX_FAULTS else [])])
    notes += reader.notes()
    if in_tb:
        what = f"{path}: bw of {plural(in_tb, 'row')} is in TB/s, as in two of AITER's tables since 45ef6f313f;"
        notes.append(f"{what} its tuners write GB/s, and the cells stay as they are")
    if short:
        notes.append(f"{path}: filled up {plural(short, 'row')} short of cells with nothing, as AITER does")


def _facts(table: Path, family: Family) -> Facts:
    """The fields of a newcomer's record, by the record beside its table, or by its name alone."""
    records = read_records(table)

    def facts(new: Newcomer) -> Mapping[str, Any]:
        beside = {n: new.cells[n] for n in ("attempt", "node", "slot", "samples", "margin") if new.cells.get(n)}
        record, kernel = records.get(new.place), (identity(new.cells, family.name) or ("", "", ""))[1:]
        same = record is not None and record.us == new.us and (record.kernel, record.split) == kernel
        of_record = record.document() if record is not None and same else {}
        return {"source": str(table), **beside, "spread": new.spread or None, **of_record}

    return facts
