"""read_shapes: a user's CSV into a ShapeList, or a ShapesError that names every fault."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path

from orchestrator.errors import ShapesError
from orchestrator.shapes.cells import BLANK, CellError, CellReader
from orchestrator.shapes.header import Header, column_label, read_header
from orchestrator.shapes.model import Key, Shape, ShapeList
from orchestrator.shapes.notes import Notes
from orchestrator.tables.faults import Faults, escaped, shown
from orchestrator.tables.open import Text, decode, has_content, read_bytes, split_cells
from worker.families import Column, Family

MAX_BYTES = 64 * 2**20
"""Some three million shapes; what is larger is no shapes file."""


def read_shapes(path: str | Path, family: Family, *, overrides: Mapping[str, str] | None = None) -> ShapeList:
    """The shapes of a CSV file, cleaned (docs/how-to/shape-lists.md says how).

    `overrides` gives a value to key columns that have a default, for every shape, whatever the file says.
    Raises ShapesError with every fault, `file:line:column: what, and what to do`.
    """
    data = read_bytes(path, MAX_BYTES, ShapesError)
    faults = Faults(path)
    table = _Table(family, _fixed(family, overrides or {}, faults), faults)
    text = decode(data, faults)
    if text is not None:
        table.read(text)
    faults.raise_as(ShapesError)
    shapes = [Shape(i, key) for i, key in enumerate(table.seen, 1)]
    notes = [*_notes_on_text(text), *table.notes.sentences(), *table.notes_on_columns()]
    return ShapeList(shapes, notes, hashlib.sha256(data).hexdigest(), str(path), table.annotations)


def _fixed(family: Family, overrides: Mapping[str, str], faults: Faults) -> dict[str, int | str]:
    """The values that `overrides` gives to key columns; its faults are added."""
    values: dict[str, int | str] = {}
    for name, text in overrides.items():
        if name not in family.key_names or family.column(name).required:
            free = ", ".join(c.name for c in family.columns if not c.required) or "none"
            faults.add(f"{shown(name)} cannot be set for all shapes of {family.name} (can be: {free})")
            continue
        try:
            values[name] = CellReader(family.column(name), family.limits, Notes()).read(text, 0)
        except CellError as e:
            faults.add(f"value set for all shapes: {e}", column=name)
    return values


def _default(column: Column) -> int | str:
    return int(column.default or 0) if column.kind == "int" else column.default or ""


class _Table:
    """The rows of one file. `seen` maps each key to the line that first had it, in file order; `fixed` holds
    the key columns that the file does not decide."""

    def __init__(self, family: Family, fixed: dict[str, int | str], faults: Faults) -> None:
        self.family, self.fixed, self.faults, self.notes = family, fixed, faults, Notes()
        self.seen: dict[Key, int] = {}
        self.header: Header | None = None
        self.annotations: dict[str, list[str]] = {}

    def read(self, text: Text) -> None:
        """Reads header and rows; faults and notes are added, nothing is raised."""
        lines = text.lines
        top = next(i for i, line in enumerate(lines) if has_content(line))
        end = next(i for i in range(len(lines), 0, -1) if has_content(lines[i - 1]))
        for number in range(1, top + 1):
            self.notes.count("blank", number)
        self.header = read_header(lines[top], top + 1, self.family, self.faults, self.notes)
        if self.header is None:
            return
        self.annotations = {name: [] for name in self.header.annotations}
        if end == top + 1:
            self.faults.add("no shapes: no row follows the header")
        self._rows(lines[top + 1 : end], top + 2, self.header)

    def _rows(self, lines: list[str], start: int, header: Header) -> None:
        columns = [c for c in self.family.columns if c.name in header.position and c.name not in self.fixed]
        rest = [c for c in self.family.columns if c not in columns]
        order = [c.name for c in (*columns, *rest)]
        in_order = itemgetter(*(order.index(name) for name in self.family.key_names))
        constants = [self.fixed[c.name] if c.name in self.fixed else _default(c) for c in rest]
        readers = [(header.position[c.name], CellReader(c, self.family.limits, self.notes)) for c in columns]
        known = [(at, reader.known) for at, reader in readers]
        width, seen = len(header.names), self.seen
        kept = [(header.annotations[name], cells) for name, cells in self.annotations.items()]
        for number, line in enumerate(lines, start):
            cells = split_cells(line)
            values: list[int | str] | None
            try:  # most cells were seen before
                if len(cells) != width or '"' in line:
                    raise KeyError
                values = [values_of[cells[at]] for at, values_of in known]
            except KeyError:
                values = self._row(line, cells, number, header, readers)
                if values is None:
                    continue
            first = seen.setdefault(in_order(values + constants), number)
            if first != number:
                self.notes.count("repeats", number, first)
                continue
            for at, texts in kept:
                texts.append(escaped(cells[at]))

    def _row(
        self, line: str, cells: list[str], number: int, header: Header, readers: list[tuple[int, CellReader]]
    ) -> list[int | str] | None:
        """The values of a row, checked cell by cell; None where it is blank or faulty."""
        if not has_content(line):
            self.notes.count("blank", number)
            return None
        if line.lstrip(BLANK).startswith("#"):
            self.faults.add("a comment: a shapes file has none, drop the line", line=number)
            return None
        free = set(header.annotations.values())
        quoted = [at for at, cell in enumerate(cells) if '"' in cell and at not in free]
        for at in quoted:  # before the length: a comma within stray quotes makes the row look too long
            what = f"{shown(cells[at].strip(BLANK))} holds a quote: a shapes file is plain, write the bare value"
            self.faults.add(what, line=number, column=column_label(header, at))
        if quoted:
            return None
        if '"' in line:
            self.notes.count("quotes", number)
        has, wants = len(cells), len(header.names)
        if has != wants:
            what = f"the row is too {'short' if has < wants else 'long'}: it has {has} cells, the header {wants}"
            self.faults.add(what, line=number, column=column_label(header, min(has, wants)))
            return None
        values: list[int | str] = []
        for at, reader in readers:
            try:
                values.append(reader.read(cells[at], number))
            except CellError as e:
                self.faults.add(e, line=number, column=reader.column.name)
        return values if len(values) == len(readers) else None

    def notes_on_columns(self) -> list[str]:
        """Sentences on columns: respelled, not used, ignored, and taken by default."""
        position = self.header.position if self.header else {}
        ignored = self.header.ignored if self.header else []
        respelled = [f"{theirs} as {ours}" for theirs, ours in (self.header.respelled if self.header else [])]
        annotations = ", ".join(shown(name) for name in self.annotations)
        given = [f"{name} = {value}" for name, value in self.fixed.items()]
        lacking = [c for c in self.family.columns if c.name not in position and c.name not in self.fixed]
        taken = [f"{c.name} = {c.default}" for c in lacking]
        of = f"default of {self.family.name} for columns that the file lacks"
        return [
            *([f"read the columns {', '.join(respelled)}"] if respelled else []),
            *(
                [f"columns that {self.family.name} does not use, kept as annotations: {annotations}"]
                if annotations
                else []
            ),
            *([f"ignored columns that are no part of a shape: {', '.join(ignored)}"] if ignored else []),
            *([f"set for every shape, as asked: {', '.join(given)}"] if given else []),
            *([f"{of}: {', '.join(taken)}"] if taken else []),
        ]


def _notes_on_text(text: Text | None) -> list[str]:
    if text is None:
        return []
    return [
        *(["dropped the byte order mark at the start of the file"] if text.bom else []),
        *([f"read {text.ends} line ends as LF"] if text.ends != "LF" else []),
    ]
