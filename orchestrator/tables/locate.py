"""The file, folder of tables or run that a user names; the family of a table; the input of a merge.

The family follows from the file's name, the run that the file lies in, its columns, or the names of its kernels.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from orchestrator.command_hints import command
from orchestrator.errors import InputError, TunedDBError
from orchestrator.families import get_family
from orchestrator.paths import RUN_RE, find_run
from orchestrator.tables.kinds import Facts, read_records
from orchestrator.tables.policy import SOURCE, Newcomer, identity
from orchestrator.tables.textfiles import MAX_FAULTS, listed, read_head
from orchestrator.tables.tuned import PROFILE_EXTRA, TAG, KeyFault, TableReader
from worker.families import FAMILIES, Family
from worker.text import plural
from worker.tuners.catalog import recorded_tuner

Kind = Literal["file", "folder", "run"]


def locate(given: str | None, runs: Path) -> tuple[Kind, Path]:
    """(what it is, its path) of `given`: a path first, then an id (or its beginning) of a run in `runs`; None: the
    latest run.

    What looks like a path (a suffix, a folder before it) and is not there is returned as a file: its reader names it.
    Raises InputError where there is no such run.
    """
    path = Path(given) if given is not None else None
    if path is not None and path.is_dir():
        return "run" if (path / "run.yaml").is_file() else "folder", path
    is_id = path is None or (RUN_RE.match(str(given)) and (runs / path).is_dir())
    if path is not None and not is_id and (path.exists() or path.suffix or len(path.parts) > 1):
        return "file", path
    return "run", find_run(runs, given).root


def provenance_of(folder: Path) -> dict[str, Any]:
    """The folder's provenance.json, {} if it cannot be read."""
    try:
        document = json.loads((folder / "provenance.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def shipped_tables(folder: Path, family: Family | None = None) -> list[Path]:
    """AITER's tuned tables in a folder, of all families or of one, found by AITER's rule for their names."""
    stem = Path(family.tuned_csv).stem if family else "tuned"
    return sorted(p for p in folder.glob(f"*{stem}*.csv") if p.is_file() and "untuned" not in p.name)


_STEMS = sorted(((Path(f.tuned_csv).stem, f) for f in FAMILIES.values()), key=lambda pair: -len(pair[0]))
_HEAD = 64 * 1024
_ROWS = 200
# families with the columns M,N,K are distinguished by kernel names
_KERNELS = (
    (re.compile(r"f4gemm_|.*f4gemm_bf16|a4w4_blockscale"), "a4w4_blockscale"),
    (re.compile(r"a8w8_blockscale_bpreshuffle"), "a8w8_blockscale_bpreshuffle"),
    (re.compile(r"a8w8_blockscale"), "a8w8_blockscale"),
)


OTHERS = ("tuned_fhmoe", "tuned_grouped_fmoe", "chunk_gdn_h_opt_tuned", "asm_a8w8_gemm")
"""Tables of AITER's that nothing here tunes."""


def table_of_others(path: Path) -> str:
    """The table of AITER's in a file's name, or its untuned list, that nothing here tunes; "" if it is none."""
    return next((name for name in OTHERS if name in path.name), "")


def family_in_name(name: str) -> Family | None:
    """The family whose table's name is in a file name, as AITER looks for it; that of the FP4 guide's files."""
    found = next((family for stem, family in _STEMS if stem in name), None)
    return found or (FAMILIES["a4w4_blockscale"] if name.startswith("fp4_") else None)


def families_by_content(header: Sequence[str], rows: Iterable[Mapping[str, str]]) -> list[Family]:
    """The families that a table may be of by its columns and, where these fit several, by its kernels."""
    fitting = [f for f in FAMILIES.values() if {*f.to_aiter(f.key_names), f.err_column} <= set(header)]
    most = max((len(f.key_names) for f in fitting), default=0)
    fitting = [f for f in fitting if len(f.key_names) == most]
    if len(fitting) > 1:
        names = {name for row in rows for pattern, name in _KERNELS if pattern.match(row.get("kernelName", ""))}
        fitting = [f for f in fitting if f.name in names] if len(names) == 1 else fitting
    return fitting


def family_of(path: Path, wanted: str | None = None) -> Family:
    """The family of the table at `path`: `wanted` where it is given, else by name, run, columns and kernels.

    Raises TunedDBError where none of them is conclusive, InputError for an unknown `wanted`.
    """
    if wanted is not None:
        return get_family(wanted)
    if "untuned" in path.name:
        raise TunedDBError(f"{path}: by its name a list of shapes, not a tuned table; tune it first")
    known = family_in_name(path.name) or FAMILIES.get(str(provenance_of(path.parent).get("family")))
    if known is not None:
        return known
    records = list(csv.reader(io.StringIO(read_head(path, _HEAD, TunedDBError))))[:_ROWS]
    header = [c.strip() for c in records[0]] if records else []
    fitting = families_by_content(header, (dict(zip(header, r, strict=False)) for r in records[1:]))
    if len(fitting) == 1:
        return fitting[0]
    could = f"; it could be of {', '.join(f.name for f in fitting)}" if fitting else ""
    raise TunedDBError(f"{path}: neither name nor columns show the family of this table{could}: name it with --family")


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
    found: dict[Family, Path] = {}
    untold: list[TunedDBError] = []
    for path in paths:
        try:
            found.setdefault(family_of(path, wanted), path)
        except TunedDBError as e:
            untold.append(e)
    if not found:
        raise untold[0]
    if len(found) > 1:
        several = "; ".join(f"{path} is of {family.name}" for family, path in found.items())
        raise InputError(f"tables of several families do not merge: {several}; merge one after another")
    return next(iter(found))


def read_rows(path: Path, family: Family, notes: list[str], *, fill: bool = False) -> Iterator[dict[str, str]]:
    """The rows of a tuned table or profile by column name, each with the file it is of, one at a time.

    `fill`: a row that lacks its last cells is filled up with nothing, as AITER does, if the file is not cut off in it.
    Adds remarks to `notes`. Raises TunedDBError, at last with every fault of a row, by file and line.
    """
    reader, faults, source = TableReader(path, family, cap=None), list[str](), str(path)
    header, short = reader.header, 0
    if STAGE in header:
        raise TunedDBError(f"{path}:1: times single stages (column {STAGE}), not whole shapes: give the tuned table")
    if foreign := [n for n in header if n not in (*family.tuned_header, *PROFILE_EXTRA, TAG)]:
        notes.append(f"{path}: columns of no meaning here: {', '.join(foreign)[:200]}")
    try:
        for at, text, cells in reader.records:
            if not any(cells):
                continue
            if fill and reader.us_at < len(cells) < len(header) and text.endswith(("\n", "\r")):
                short += 1
                cells = [*cells, *[""] * (len(header) - len(cells))]
            try:
                reader.row(at, 0, cells)
            except KeyFault as e:
                faults.append(f"{path}:{at}: {e}")
                continue
            if not faults:
                yield {**dict(zip(header, cells, strict=True)), SOURCE: source}
    except TunedDBError as e:
        raise TunedDBError([*faults, *e.faults]) from e
    if faults:
        raise TunedDBError(listed(faults, MAX_FAULTS, ""))
    notes += reader.notes()
    if short:
        notes.append(f"{path}: filled up {plural(short, 'row')} short of cells with nothing, as AITER does")


def _facts(table: Path, family: Family) -> Facts:
    """The fields of a newcomer's record, by the record beside its table, or by its name alone."""
    records = read_records(table)

    def facts(new: Newcomer) -> Mapping[str, Any]:
        beside = {n: new.cells[n] for n in ("attempt", "node", "slot", "samples", "margin") if new.cells.get(n)}
        record, kernel = records.get(new.place), (identity(new.cells, family.name) or ("", "", ""))[1:]
        same = record is not None and record.us == new.us and (record.text("kernel"), record.text("split")) == kernel
        of_record = record.document if record is not None and same else {}
        return {"source": str(table), **beside, "spread": new.spread or None, **of_record}

    return facts
