"""Read a user's CSV into a ShapeList, or raise a ShapesError that names every fault.

A `CellReader` reads the cells of one key column: their value, what was cleaned (counted for the notes of a list), their
fault.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from pathlib import Path

from orchestrator.errors import ShapesError
from orchestrator.files.faults import Faults, escaped, shown
from orchestrator.files.read import Text, decode, has_content, read_bytes, read_head, split_cells
from orchestrator.shapes.model import Key, Shape, ShapeList
from orchestrator.tables.table_names import family_in_name, table_of_others
from worker.families import BOOLEANS, FAMILIES, Column, Family, Limit
from worker.text import did_you_mean

_SENTENCES = {
    "spaces": ("dropped spaces around 1 cell", "dropped spaces around {n} cells"),
    "quotes": (
        "read 1 line with quoted cells as if it had none",
        "read {n} lines with quoted cells as if they had none",
    ),
    "zeros": ("dropped leading zeros of 1 cell", "dropped leading zeros of {n} cells"),
    "booleans": ("wrote 1 cell as AITER's True or False", "wrote {n} cells as AITER's True or False"),
    "blank": ("dropped 1 blank line", "dropped {n} blank lines"),
    "repeats": ("dropped 1 duplicate row", "dropped {n} duplicate rows"),
}


class Notes:
    """Counts by kind (the keys above), each with the place where it first was."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, str]] = {}

    def count(self, kind: str, line: int, like: int | None = None) -> None:
        """One more of `kind` in `line`; `like` is the line that it repeats."""
        n, first = self._found.get(kind) or (0, f"line {line}" + (f" repeats line {like}" if like else ""))
        self._found[kind] = (n + 1, first)

    def sentences(self) -> list[str]:
        """One sentence a kind, with the count and the first place."""
        found = ((texts, *self._found[kind]) for kind, texts in _SENTENCES.items() if kind in self._found)
        return [f"{texts[n > 1].format(n=n)} (first: {first})" for texts, n, first in found]


MAX_INT = 2**31 - 1
BLANK = " \t"
"""Characters that may stand around a cell and are cleaned away."""

_DIGITS = re.compile(r"[0-9]+\Z")
_FLOAT = r"[+-]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?|nan|inf|infinity)\Z"
_UNSAFE = (
    (re.compile(r".*[\"']", re.DOTALL), "holds a quote: a shapes file is plain, write the bare value"),
    (re.compile(rf"[=@]|(?!{_FLOAT})[+-]", re.IGNORECASE), "looks like a formula: write the value itself"),
    (re.compile(r".*[\udc80-\udcff]", re.DOTALL), "holds bytes that are not UTF-8: save the file as UTF-8"),
)
# why a cell is not a whole number: the first that matches
_NO_INT = (
    (re.compile(r"\Z"), "is empty"),
    (re.compile(_FLOAT, re.IGNORECASE), "{} is not a whole number"),
    (re.compile(""), "{} is not a number"),
)
_RANGE = f"a whole number from 1 to {MAX_INT}"


class CellError(ValueError):
    """The cell is wrong; the text says what it is and what to do."""


_near = lru_cache(maxsize=256)(did_you_mean)
"""A large list repeats its mistakes."""


def default_of(column: Column) -> int | str:
    """The value of a key column that a list does not give."""
    return int(column.default or 0) if column.kind == "int" else column.default or ""


class CellReader:
    """Reader of the cells of one key column. `known` maps cells that needed no cleaning to their value, so that
    the reader of the file looks most cells up instead of checking them again."""

    def __init__(self, column: Column, limits: Iterable[Limit], notes: Notes) -> None:
        self.column = column
        self.known: dict[str, int | str] = {}
        self._limits = tuple(x for x in limits if x.column == column.name)
        self._notes = notes

    def read(self, cell: str, line: int) -> int | str:
        """The value of `cell`; notes what was cleaned. Raises CellError."""
        text = cell.strip(BLANK)
        for unsafe, why in _UNSAFE:
            if unsafe.match(text):
                raise CellError(f"{shown(text)} {why}")
        value = self._int(text) if self.column.kind == "int" else self._text(text, line)
        if text != cell:
            self._notes.count("spaces", line)
        if str(value) == cell:
            self.known[cell] = value
        elif str(value) != text and self.column.kind == "int":
            self._notes.count("zeros", line)
        return value

    def _int(self, text: str) -> int:
        legal = self.column.legal
        if legal:
            if text not in legal:
                raise CellError(f"{shown(text)} is not legal: write {' or '.join(legal)}")
            return int(text)
        digits = text.lstrip("0")
        if not _DIGITS.match(text):
            why = next(words for pattern, words in _NO_INT if pattern.match(text))
            raise CellError(f"{why.format(shown(text))}: write {_RANGE}")
        if not digits or len(digits) > len(str(MAX_INT)) or int(digits) > MAX_INT:
            raise CellError(f"{f'{shown(text)} is too large' if digits else 'is zero'}: write {_RANGE}")
        value = int(digits)
        for limit in self._limits:
            if value % limit.multiple_of:
                name, of = limit.column, limit.multiple_of
                raise CellError(f"{value} is not a multiple of {of} ({limit.why}): drop the shape or pad {name}")
        return value

    def _text(self, text: str, line: int) -> str:
        legal = self.column.legal
        if not text and text not in legal:
            raise CellError(f"is empty: write {', '.join(legal)}, or drop the column for its default")
        if legal == BOOLEANS and text in ("TRUE", "FALSE", "true", "false"):
            self._notes.count("booleans", line)
            return text.capitalize()
        if text not in legal:
            raise CellError(f"{shown(text)} is not legal{_near(text, legal)} (legal: {', '.join(legal)})")
        return text


# columns of tuned tables that are no part of a shape, so that a tuned table can serve as a shapes list
IGNORED = {"gfx", "cu_num", "_tag", *(c for f in FAMILIES.values() for c in f.result_columns)}

MAX_COLUMNS = 256

# an unknown column as like a key column that the file lacks (difflib's ratio) is taken for a misspelling of it, since
# the shapes would silently get that column's default
LIKE_A_KEY = 0.7


def _not_a_header(text: str, names: Sequence[str], family: Family) -> str | None:
    wanted = ",".join(c.name for c in family.columns if c.required)
    if len(names) > MAX_COLUMNS:
        return f"the header has {len(names)} columns, and a shapes file has at most {MAX_COLUMNS}"
    if len(names) == 1:
        for separator, word in ((";", "';'"), ("\t", "tabs"), ("|", "'|'")):
            if separator in text.strip():
                return f"the columns are separated by {word}: separate them by commas"
    if all(n.isascii() and n.isdigit() for n in names):
        return f"there is no header: the first line must name the columns, {wanted}"
    return None


def _misspelled(name: str, names: Sequence[str], family: Family) -> str | None:
    """The key column that the file lacks and that `name` was meant to be; None where it is like none."""
    given = {n.lower() for n in names}
    lacking = {k.lower(): k for k in family.key_names if k.lower() not in given and len(k) > 1}
    near = difflib.get_close_matches(name.lower(), lacking, n=1, cutoff=LIKE_A_KEY)
    return lacking[near[0]] if near else None


MAX_BYTES = 64 * 2**20  # some three million shapes


def read_shapes(path: str | Path, family: Family) -> ShapeList:
    """The shapes of a CSV file, cleaned (docs/how-to/shape-lists.md says how).

    Raises ShapesError with every fault, `file:line:column: what, and what to do`.
    """
    if Path(path).suffix in (".yaml", ".yml"):
        raise ShapesError(f"{path}: this is YAML and no list of shapes: an inventory is given with -i")
    data = read_bytes(path, MAX_BYTES, ShapesError)
    faults = Faults(path)
    table = _Table(family, faults)
    text = decode(data, faults)
    if text is not None:
        table.read(text)
    faults.raise_as(ShapesError)
    assert text is not None, "there would be a fault"
    shapes = [Shape(i, key) for i, key in enumerate(table.seen, 1)]
    notes = [
        *(["dropped the byte order mark at the start of the file"] if text.bom else []),
        *([f"read {text.ends} line ends as LF"] if text.ends != "LF" else []),
        *table.notes.sentences(),
        *table.notes_on_columns(),
    ]
    return ShapeList(shapes, notes, hashlib.sha256(data).hexdigest(), str(path), table.annotations)


def family_of_list(path: Path, known: Iterable[str] = tuple(FAMILIES)) -> str | None:
    """The family in the name of a list (`shapes-fmoe.csv`, or AITER's), else the only one of `known` whose required
    columns it has; None if neither tells. Raises ShapesError."""
    if table := table_of_others(path):
        raise ShapesError(
            f"{path}: is the list of AITER's {table}.csv, which nothing here tunes; give a list of yours another name"
        )
    found = [name for name in FAMILIES if f"-{path.stem}".endswith(f"-{name}")]
    found += [f.name for f in [family_in_name(path.name.replace("untuned", "tuned"))] if f]
    header = {c.strip(BLANK).lower() for c in read_head(path, 4096, ShapesError).partition("\n")[0].split(",")}
    found = found or [n for n in known if {c.name.lower() for c in FAMILIES[n].columns if c.required} <= header]
    return found[0] if len(found) == 1 else None


def union(lists: Sequence[ShapeList]) -> ShapeList:
    """One list of several of a family. A shape counts where it is first, like a repeated row of a file."""
    found: dict[Key, dict[str, str]] = {}
    for of in lists:
        for i, shape in enumerate(of.shapes):
            found.setdefault(shape.key, {name: cells[i] for name, cells in of.annotations.items()})
    names = dict.fromkeys(name for cells in found.values() for name in cells)
    return ShapeList(
        [Shape(i, key) for i, key in enumerate(found, 1)],
        [f"{of.source}: {note}" for of in lists for note in of.notes],
        hashlib.sha256("".join(of.sha256 for of in lists).encode()).hexdigest(),
        " ".join(of.source for of in lists),
        {name: [cells.get(name, "") for cells in found.values()] for name in names},
    )


def fixed_columns(family: Family, given: Mapping[str, str], faults: Faults) -> dict[str, int | str]:
    """Values given to key columns for every shape; faults are added."""
    values: dict[str, int | str] = {}
    free = {c.name: c for c in family.columns if not c.required}
    for name, text in given.items():
        if name not in free:
            can = ", ".join(free) or "none"
            faults.add(f"{shown(name)} cannot be set for all shapes of {family.name} (can be: {can})")
            continue
        try:
            values[name] = CellReader(free[name], family.limits, Notes()).read(text, 0)
        except CellError as e:
            faults.add(f"value set for all shapes: {e}", column=name)
    return values


class _Table:
    """The rows of one file. `seen` maps each key to the line that first had it, in file order.

    `names` are the cells of the header, `position` says where the file has each key column, `kept` where it has each
    column that gemmfleet does not know. `respelled`: key columns in another case, in words.
    """

    def __init__(self, family: Family, faults: Faults) -> None:
        self.family, self.faults, self.notes = family, faults, Notes()
        self.seen: dict[Key, int] = {}
        self.names: list[str] = []
        self.position: dict[str, int] = {}
        self.kept: dict[str, int] = {}
        self.ignored: list[str] = []
        self.respelled: list[str] = []
        self.annotations: dict[str, list[str]] = {}

    def read(self, text: Text) -> None:
        """Read header and rows; faults and notes are added, nothing is raised."""
        lines = text.lines
        top = next(i for i, line in enumerate(lines) if has_content(line))
        end = next(i for i in range(len(lines), 0, -1) if has_content(lines[i - 1]))
        for number in range(1, top + 1):
            self.notes.count("blank", number)
        if not self._header(lines[top], top + 1):
            return
        if end == top + 1:
            self.faults.add("no shapes: no row follows the header")
        self._rows(lines[top + 1 : end], top + 2)

    def _header(self, text: str, line: int) -> bool:
        """Read the header and add its faults; False where the line is no header at all."""
        cells = split_cells(text)
        self.names = names = [c.strip(BLANK) for c in cells]
        if wrong := _not_a_header(text, names, self.family):
            self.faults.add(wrong, line=line)
            return False
        for cell, name in zip(cells, names, strict=True):
            if cell != name:
                self.notes.count("spaces", line)
        if '"' in text and '"' not in "".join(cells):
            self.notes.count("quotes", line)
        keys = {k.lower(): k for k in self.family.key_names}
        seen: dict[str, int] = {}
        for at, written in enumerate(names):
            name, wrong = keys.get(written.lower(), written), ""
            first = seen.setdefault(name, at)
            if first != at:
                wrong = f"is in the header twice (columns {first + 1} and {at + 1}): drop one"
            elif name in self.family.key_names:
                self.position[name] = at
                self.respelled += [f"{written} as {name}"] if written != name else []
            elif name in IGNORED:
                self.ignored.append(name)
            elif meant := _misspelled(name, names, self.family):
                wrong = f"unknown column {shown(name)} for family {self.family.name}; did you mean {meant}?"
            elif not name:
                wrong = "a column without a name: name it or drop it, with any comma too many"
            else:
                self.kept[escaped(name)] = at
            if wrong:
                self.faults.add(wrong, line=line, column=self._label(at))
        self.annotations = {name: [] for name in self.kept}
        others = ", ".join(shown(n) for n in list(self.kept)[:6])
        has = f" (other columns here: {others})" if others else ""
        for column in self.family.columns:
            if column.required and column.name not in self.position:
                what = f"column {column.name} is missing: family {self.family.name} needs it{has}"
                self.faults.add(what, line=line, column=column.name)
        return True

    def _label(self, at: int) -> str:
        """The name of the column at position `at` for a message."""
        name = self.names[at] if at < len(self.names) else ""
        return name if name.isascii() and name.isidentifier() and len(name) <= 40 else f"column {at + 1}"

    def _rows(self, lines: list[str], start: int) -> None:
        columns = [c for c in self.family.columns if c.name in self.position]
        rest = [c for c in self.family.columns if c not in columns]
        order = [c.name for c in (*columns, *rest)]
        in_order = itemgetter(*(order.index(name) for name in self.family.key_names))
        constants = [default_of(c) for c in rest]
        readers = [(self.position[c.name], CellReader(c, self.family.limits, self.notes)) for c in columns]
        known = [(at, reader.known) for at, reader in readers]
        width, seen = len(self.names), self.seen
        kept = [(self.kept[name], cells) for name, cells in self.annotations.items()]
        for number, line in enumerate(lines, start):
            cells = split_cells(line)
            values: list[int | str] | None
            try:  # most cells were seen before
                if len(cells) != width or '"' in line:
                    raise KeyError
                values = [values_of[cells[at]] for at, values_of in known]
            except KeyError:
                values = self._row(line, cells, number, readers)
                if values is None:
                    continue
            first = seen.setdefault(in_order(values + constants), number)
            if first != number:
                self.notes.count("repeats", number, first)
                continue
            for at, texts in kept:
                texts.append(escaped(cells[at]))

    def _row(
        self, line: str, cells: list[str], number: int, readers: list[tuple[int, CellReader]]
    ) -> list[int | str] | None:
        """The values of a row, checked cell by cell; None where it is blank or faulty."""
        if not has_content(line):
            self.notes.count("blank", number)
            return None
        if line.lstrip(BLANK).startswith("#"):
            self.faults.add("a comment: a shapes file has none, drop the line", line=number)
            return None
        if '"' in line:
            self.notes.count("quotes", number)
        has, wants = len(cells), len(self.names)
        if has != wants:
            what = f"the row is too {'short' if has < wants else 'long'}: it has {has} cells, the header {wants}"
            self.faults.add(what, line=number, column=self._label(min(has, wants)))
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
        taken = [c for c in self.family.columns if c.name not in self.position]
        of = self.family.name
        sentences = {
            "read the columns": self.respelled,
            f"columns that {of} does not use, kept as annotations:": [shown(name) for name in self.annotations],
            "ignored columns that are no part of a shape:": self.ignored,
            f"default of {of} for columns that the file lacks:": [f"{c.name} = {c.default}" for c in taken],
        }
        return [f"{words} {', '.join(columns)}" for words, columns in sentences.items() if columns]
