"""The rows of one family that `publish` writes into a tree of AITER, and the new texts of the tree's files.

`aiter_publication.py` calls `make_family_part` for each family. A `NewcomerPool` finds the champion of each key and
judges it against the row that the tree has (`settle` says what that means here), as a merge does. But AITER merges all
tables of a family, and a key may be there once. So a newcomer whose key a file has already edits that row in its place,
if it is faster by more than the noise, and is left out otherwise. New rows go into the model's own table, with the list
of the model's shapes beside it.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args

from orchestrator.families import PadLevel, grid_point
from orchestrator.files.write import csv_text
from orchestrator.results.run_facts import RunFacts
from orchestrator.tables.aiter_build import Build
from orchestrator.tables.decision import Action
from orchestrator.tables.export import time_rank
from orchestrator.tables.keys import CHIP_COLUMNS, TAG, Key, Place, best_by_key, file_order, key_names
from orchestrator.tables.merge import csv_line, newcomer_line
from orchestrator.tables.merge_input import open_sources
from orchestrator.tables.newcomers import Incumbent, Judged, Newcomer, NewcomerPool, make_incumbent
from orchestrator.tables.rules import REBUILD, RowRules
from orchestrator.tables.table import Table, TableRow, read_table
from orchestrator.tables.table_names import model_names
from worker.families import Family

MODELS = "aiter/configs/model_configs"
"""The folder of models' tables in a tree."""


@dataclass(slots=True)
class FamilyPart:
    """The rows of one family in a publication. `templates/pull-request.md.j2` shows it."""

    family: Family
    rows: list[Judged]
    """The champion of each key with its outcome: added, edited, kept or refused."""
    rejected: list[str]
    """A sentence on each row that cannot be a newcomer."""
    tuned: str
    """The model's own table, by its path below the checkout."""
    shapes: str
    """The list of the model's shapes beside it."""
    script: str = ""
    """AITER's own tuner for the family with its flags, "" if the tree has none."""
    misses: tuple[int, int] = (0, 0)
    """Number of keys for which AITER's look-up finds no row, before and after."""
    texts: dict[str, str] = field(default_factory=dict)
    """The new texts of the files that change, by path below the checkout."""
    facts: list[Mapping[str, Any]] = field(default_factory=list)
    """The facts of the measurement of each row in `written`."""

    def rows_with(self, *actions: Action) -> list[Judged]:
        """The rows with one of these outcomes."""
        return [row for row in self.rows if row.action in actions]

    @property
    def written(self) -> list[Judged]:
        """The rows that are published."""
        return self.rows_with("added", "edited")

    @property
    def chips(self) -> list[str]:
        """The chips of the rows that are published, with their compute units."""
        chips = {row.new.key[:2] for row in self.written}
        return sorted(f"{gfx} with CU count {cu_num}" if cu_num else str(gfx) for gfx, cu_num in chips)

    def count_rows(self, file: str) -> dict[str, int]:
        """Number of rows that are written into a file, by outcome."""
        files = ((row.old.file if row.old else self.tuned, row.action) for row in self.written)
        return dict(Counter(action for row_file, action in files if row_file == file))


class TreeTables:
    """The tables of a family that a tree merges when it starts. Their lines change as rows are edited."""

    def __init__(self, tree: Path, build: Build, family: Family) -> None:
        self.family = family
        self.tables: dict[str, Table] = {}
        self.lines: dict[str, list[str]] = {}
        rows: list[tuple[str, TableRow]] = []
        for path in build.tables(family):
            file = str(path.relative_to(tree))
            table = read_table(path, family, lenient=True)
            self.tables[file] = table
            self.lines[file] = _lines_of(table)
            rows += [(file, row) for row in table.rows]
        self.keys = {row.key for _, row in rows}
        self._owners = best_by_key(rows, lambda owner: owner[1].place, lambda owner: time_rank(owner[1]))
        """The file and the row of each place, the fastest if several have it."""

    def incumbent(self, place: Place) -> Incumbent | None:
        """The row that a newcomer has to beat, None if no table has its place."""
        if place not in self._owners:
            return None
        file, row = self._owners[place]
        return make_incumbent(self.tables[file], row, file)

    def edit(self, old: Incumbent, new: Newcomer) -> None:
        """Give a row the newcomer's results; its key stays as it is spelled."""
        key = {*CHIP_COLUMNS, TAG, *self.family.key_names}
        cells = {name: cell if name in key else new.cells.get(name, cell) for name, cell in old.cells.items()}
        _, row = self._owners[new.place]
        self.lines[old.file][row.part] = csv_line(cells, self.tables[old.file].header)


def make_family_part(tree: Path, name: str, family: Family, paths: Sequence[Path], model: str) -> FamilyPart:
    """The part of a family's runs and tables. `name`: of the tree, for messages. Raises InputError for sources that
    cannot be used."""
    build = Build(tree, name)
    sources = open_sources(paths, [], None, family.name, RunFacts)
    tables = TreeTables(tree, build, family)
    pool = NewcomerPool(family, tables.incumbent, family.aiter.err_ratio)
    pool.add_rows(sources.newcomers())
    pool.add_rows(sources.beside(), beside=True)
    header = _header_of_new_table(build, family)
    rows = list(settle(pool, RowRules(family, header, family.aiter.err_ratio, build)))
    tuned, shapes = model_names(model, family, None, (row.new.cells for row in rows))
    rejected = [f"{', '.join(map(str, row.key.values()))}: {row.why}" for row in pool.rejected]
    part = FamilyPart(family, rows, rejected, f"{MODELS}/{tuned}", f"{MODELS}/{shapes}")
    if family.name in build.tree.scripts:
        script = build.tree.scripts[family.name].relative_to(tree)
        part.script = " ".join((str(script), *family.aiter.flags))
    part.facts = [sources.facts(row.new) for row in part.written]
    added = [row.new for row in part.rows_with("added")]
    keys = [row.new.key for row in rows]
    keys_after = tables.keys | {new.key for new in added}
    part.misses = (count_misses(keys, tables.keys, family), count_misses(keys, keys_after, family))
    part.texts = _edit_tables(part, tables)
    if added:
        part.texts[part.tuned] = _text_of_model_table(tree, part.tuned, tables, header, added)
        part.texts[part.shapes] = _text_of_shapes(tree / part.shapes, build, family, keys)
    return part


def _edit_tables(part: FamilyPart, tables: TreeTables) -> dict[str, str]:
    """The texts of the tables that have edited rows, by path below the checkout. Changes the lines of `tables`."""
    texts: dict[str, str] = {}
    for row in part.rows_with("edited"):
        if row.old:
            tables.edit(row.old, row.new)
            texts[row.old.file] = "".join(tables.lines[row.old.file])
    return texts


def _header_of_new_table(build: Build, family: Family) -> tuple[str, ...]:
    """The columns of the tree's own table; today's if that is older than gfx, as others may stand beside it."""
    header = build.header(family)
    has_chip = set(family.chip_columns) <= set(header)
    is_needed = header and build.merge_rules(family).stops_at_other_columns
    return header if has_chip or is_needed else family.tuned_header


def _text_of_model_table(
    tree: Path, file: str, tables: TreeTables, header: tuple[str, ...], added: Sequence[Newcomer]
) -> str:
    """The text of the model's own table with new rows. `header`: of a table that does not exist yet."""
    family = tables.family
    table = tables.tables.get(file)
    if table is not None:
        return with_rows(tables.lines[file], table, table.header, added, family)
    if (tree / file).exists():  # in an AITER that does not merge model_configs
        table = read_table(tree / file, family, lenient=True)
        return with_rows(_lines_of(table), table, table.header, added, family)
    return with_rows([csv_text(family.to_aiter(header))], None, header, added, family)


def _text_of_shapes(file: Path, build: Build, family: Family, keys: Sequence[Key]) -> str:
    """The text of the list of the model's shapes, all of them, whether or not they are published."""
    columns = build.header(family, untuned=True) or family.key_names
    return with_shapes(file.read_text() if file.exists() else "", columns, keys, family)


def settle(pool: NewcomerPool, rules: RowRules) -> Iterator[Judged]:
    """The outcome of every champion, in the order of the keys. `rules` are those of the build that gets the rows.

    A row that breaks one of them is refused. A row that another file has is edited only if its kernel is another one,
    it has a time to compare with, and the pool lets it be replaced.
    """
    for new in pool.champions():
        judged = pool.judge(new)
        broken = list(rules.broken([new.cells.get(name, "") for name in rules.header], new.key))
        errors = "; ".join(rule.text for rule in broken if rule.level == "error")
        action: Action = "edited" if judged.action == "replaced" else judged.action
        why = judged.why
        if errors:
            action = "refused"
            why = errors
        elif pool.is_incumbent(new):
            action = "kept"
            why = "its kernel is the row's already"
        elif judged.old and judged.basis == "no old time":
            action = "kept"
            why = f"{judged.old.file}:{judged.old.line} has the key, and no time to compare with"
        needs_rebuild = any(rule.rule == REBUILD for rule in broken)
        yield replace(judged, action=action, why=why, rebuild=needs_rebuild)


def count_misses(keys: Iterable[Key], known: set[Key], family: Family) -> int:
    """Number of keys for which AITER's lookup finds no row: neither the exact M nor its two paddings."""
    misses = 0
    for key in keys:
        padded = [(*key[:2], *grid_point(key[2:], family, level)) for level in get_args(PadLevel)]
        if known.isdisjoint((key, *padded)):
            misses += 1
    return misses


def with_rows(
    lines: Sequence[str], table: Table | None, header: Sequence[str], rows: Iterable[Newcomer], family: Family
) -> str:
    """A table's text with further rows, all in AITER's order. `lines`: its records, the header first; `table`: as read,
    None for a new file. Records without a key come last."""
    order = file_order(family, header)
    old_rows = table.rows if table else ()
    keyed = [(order(row.key), lines[row.part]) for row in old_rows]
    keyed += [(order(new.key), newcomer_line(header, new, family)) for new in rows]
    keyed.sort(key=itemgetter(0))
    parts_with_key = {0, *(row.part for row in old_rows)}
    keyless = [line for part, line in enumerate(lines) if part not in parts_with_key and line.strip()]
    return "".join([lines[0], *(line for _, line in keyed), *keyless])


def with_shapes(text: str, header: Sequence[str], keys: Iterable[Key], family: Family) -> str:
    """The list of shapes beside a table: a new one in order (`text` ""), or one with the missing shapes below."""
    records = list(csv.reader(io.StringIO(text)))
    lines = [csv_text(family.to_aiter(header))]
    columns: Sequence[str] = header
    if records:
        lines = [line.rstrip("\r") + "\n" for line in text.rstrip("\r\n").split("\n")]
        columns = family.from_aiter(name.strip() for name in records[0])
    listed: set[tuple[str, ...]] = set()
    for record in records[1:]:
        cells = dict(zip(columns, (cell.strip() for cell in record), strict=False))
        listed.add(tuple(cells.get(name, "") for name in header))
    places = [key_names(family).index(name) for name in header]
    for key in sorted(keys, key=file_order(family, header)):
        shape = tuple(str(key[place]) for place in places)
        if shape not in listed:
            listed.add(shape)
            lines.append(csv_line(dict(zip(header, shape, strict=True)), columns))
    return "".join(lines)


def _lines_of(table: Table) -> list[str]:
    """The records of a table, with LF line ends."""
    return [part.rstrip("\r\n") + "\n" for part in table.parts]
