"""The rows of one family that are published: which edit a row of another file, which are new, and the files' new texts.

AITER merges all tables of a family, and a key may be there once. So a newcomer whose key a file has already edits that
row, if it is faster by more than the noise, and is left out otherwise. New rows go into the model's own table.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args

from orchestrator.families import PadLevel, grid_point
from orchestrator.files.write import csv_text
from orchestrator.tables.aiter_build import Build
from orchestrator.tables.decision import Action
from orchestrator.tables.export import time_rank
from orchestrator.tables.keys import CHIP_COLUMNS, TAG, Key, Place, best_by_key, file_order, key_names
from orchestrator.tables.merge import csv_line, newcomer_line
from orchestrator.tables.merge_input import open_sources
from orchestrator.tables.newcomers import Incumbent, Judged, Newcomer, NewcomerPool, make_incumbent
from orchestrator.tables.provenance import Facts
from orchestrator.tables.rules import REBUILD, RowRules
from orchestrator.tables.table import Table, TableRow, read_table
from orchestrator.tables.table_names import model_names
from worker.families import Family

MODELS = "aiter/configs/model_configs"

Owner = tuple[str, TableRow]
"""The file of the tree that has a key, and its row."""


@dataclass(slots=True)
class Part:
    """The rows of one family. `tuned`, `shapes`: its files below the checkout; `texts`: those that change; `misses`:
    lookups without a row before and after; `script`: AITER's own tuner with its flags."""

    family: Family
    rows: list[Judged]
    rejected: list[str]
    tuned: str
    shapes: str
    script: str = ""
    misses: tuple[int, int] = (0, 0)
    texts: dict[str, str] = field(default_factory=dict)
    facts: list[Mapping[str, Any]] = field(default_factory=list)

    def of(self, *actions: Action) -> list[Judged]:
        """The rows with one of these outcomes: added, edited, kept, refused."""
        return [row for row in self.rows if row.action in actions]

    @property
    def written(self) -> list[Judged]:
        """The rows that are published."""
        return self.of("added", "edited")

    @property
    def chips(self) -> list[str]:
        """The chips of the rows that are published, with their compute units."""
        chips = {row.new.key[:2] for row in self.written}
        return sorted(f"{gfx} with CU count {cu_num}" if cu_num else str(gfx) for gfx, cu_num in chips)

    def count_rows(self, file: str) -> dict[str, int]:
        """Number of rows that are written into a file, by outcome."""
        counts: Counter[str] = Counter()
        for row in self.written:
            row_file = row.old.file if row.old else self.tuned
            if row_file == file:
                counts[row.action] += 1
        return dict(counts)


def make_part(
    tree: Path, name: str, family: Family, paths: Sequence[Path], model: str, run_facts: Callable[[Path], Facts]
) -> Part:
    """The part of a family's runs and tables. `name`: of the tree, for messages. Raises InputError for sources that
    cannot be used."""
    build = Build(tree, name)
    sources = open_sources(paths, [], None, family.name, run_facts)
    tables = {str(path.relative_to(tree)): read_table(path, family, lenient=True) for path in build.tables(family)}
    every = [(file, row) for file, table in tables.items() for row in table.rows]
    owners = best_by_key(every, lambda entry: entry[1].place, lambda entry: time_rank(entry[1]))

    def incumbent(place: Place) -> Incumbent | None:
        if place not in owners:
            return None
        file, row = owners[place]
        return make_incumbent(tables[file].cells(row), row.us, family.name, file, row.line)

    pool = NewcomerPool(family, incumbent, family.aiter.err_ratio)
    pool.add_rows(sources.newcomers())
    pool.add_rows(sources.beside(), beside=True)
    header = _header_of_new_table(build, family)
    rows = list(settle(pool, RowRules(family, header, family.aiter.err_ratio, build)))
    tuned, shapes = model_names(model, family, None, (row.new.cells for row in rows))
    rejected = [f"{', '.join(map(str, row.key.values()))}: {row.why}" for row in pool.rejected]
    part = Part(family, rows, rejected, f"{MODELS}/{tuned}", f"{MODELS}/{shapes}")
    if family.name in build.tree.scripts:
        script = build.tree.scripts[family.name].relative_to(tree)
        part.script = " ".join((str(script), *family.aiter.flags))
    part.facts = [sources.facts(row.new) for row in part.written]
    keys = [row.new.key for row in rows]
    keys_before = {row.key for _, row in every}
    keys_after = keys_before | {row.new.key for row in part.of("added")}
    part.misses = (count_misses(keys, keys_before, family), count_misses(keys, keys_after, family))
    lines = {file: _lines_of(table) for file, table in tables.items()}
    _edit_rows(part, tables, lines, owners)
    _add_rows(part, tree, tables.get(part.tuned), lines.get(part.tuned), header, build)
    return part


def _header_of_new_table(build: Build, family: Family) -> tuple[str, ...]:
    """The columns of the tree's own table; today's if that is older than gfx, as others may stand beside it."""
    header = build.header(family)
    has_chip = set(family.chip_columns) <= set(header)
    is_needed = header and build.merge_rules(family).stops_at_other_columns
    return header if has_chip or is_needed else family.tuned_header


def _edit_rows(
    part: Part, tables: Mapping[str, Table], lines: Mapping[str, list[str]], owners: Mapping[Place, Owner]
) -> None:
    """Put the edited rows into the lines and texts of the files that have them."""
    for row in part.of("edited"):
        if row.old is None:
            continue
        file = row.old.file
        _, owner = owners[row.new.place]
        lines[file][owner.part] = csv_line(_edited_cells(row.old, row.new, part.family), tables[file].header)
        part.texts[file] = "".join(lines[file])


def _edited_cells(old: Incumbent, new: Newcomer, family: Family) -> dict[str, str]:
    """The cells of a row with the newcomer's results; its key stays as it is spelled."""
    key = {*CHIP_COLUMNS, TAG, *family.key_names}
    return {name: cell if name in key else new.cells.get(name, cell) for name, cell in old.cells.items()}


def _add_rows(
    part: Part, tree: Path, table: Table | None, lines: list[str] | None, header: tuple[str, ...], build: Build
) -> None:
    """Put the new rows into the model's own table, and all shapes into the list beside it. `table` and `lines`: that
    table as read and with edited rows, None if AITER does not merge it or it is new."""
    added = [row.new for row in part.of("added")]
    if not added:
        return
    family = part.family
    if table is None and (tree / part.tuned).exists():  # an AITER that does not merge model_configs
        table = read_table(tree / part.tuned, family, lenient=True)
    if not lines:
        lines = _lines_of(table) if table else [csv_text(family.to_aiter(header))]
    part.texts[part.tuned] = with_rows(lines, table, table.header if table else header, added, family)
    shapes_file = tree / part.shapes
    shapes = shapes_file.read_text() if shapes_file.exists() else ""
    columns = build.header(family, untuned=True) or family.key_names
    part.texts[part.shapes] = with_shapes(shapes, columns, [row.new.key for row in part.rows], family)


def settle(pool: NewcomerPool, rules: RowRules) -> Iterator[Judged]:
    """The outcome of every champion, in the order of the keys. `rules` are those of the build that gets the rows."""
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
    with_key = {0, *(row.part for row in old_rows)}
    keyless = [line for number, line in enumerate(lines) if number not in with_key and line.strip()]
    return "".join([lines[0], *(line for _, line in sorted(keyed, key=itemgetter(0))), *keyless])


def with_shapes(text: str, header: Sequence[str], keys: Iterable[Key], family: Family) -> str:
    """The list of shapes beside a table: a new one in order (`text` ""), or one with the missing shapes below."""
    columns = [key_names(family).index(name) for name in header]
    ordered = sorted(keys, key=file_order(family, header))
    shapes = dict.fromkeys(tuple(str(key[i]) for i in columns) for key in ordered)
    records = list(csv.reader(io.StringIO(text)))
    if not records:
        lines = [csv_text(family.to_aiter(header))]
        own_header: Sequence[str] = header
    else:
        lines = [line.rstrip("\r") + "\n" for line in text.rstrip("\r\n").split("\n")]
        own_header = family.from_aiter(name.strip() for name in records[0])
    listed = set()
    for record in records[1:]:
        cells = dict(zip(own_header, (cell.strip() for cell in record), strict=False))
        listed.add(tuple(cells.get(name, "") for name in header))
    new = [dict(zip(header, shape, strict=True)) for shape in shapes if shape not in listed]
    return "".join([*lines, *(csv_line(cells, own_header) for cells in new)])


def _lines_of(table: Table) -> list[str]:
    """The records of a table, with LF line ends."""
    return [part.rstrip("\r\n") + "\n" for part in table.parts]
