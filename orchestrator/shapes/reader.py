"""Reads a user's CSV of shapes into a ShapeList, or raises a ShapesError that names every fault.

    M,N,K,count
    16,1280,8192,7

The header names the key columns of a family in any order. A key column that is missing has its default, and a column
that no family has (here `count`) is kept as an annotation. `tune`, `bench` and `shapes check` call `read_shapes`; for
several lists of one family they join the results by `union`. A `CellReader` reads the cells of one key column; readers
of logs use it too, so that a cell is legal everywhere or nowhere.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections import Counter
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
from worker.text import did_you_mean, plural

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
    """Counts of what was cleaned in a list by kind (the keys above), each with the place where it first was."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._first_places: dict[str, str] = {}

    def count(self, kind: str, line: int, like: int | None = None) -> None:
        """One more of `kind` in `line`; `like` is the line that it repeats."""
        self._counts[kind] += 1
        if kind not in self._first_places:
            self._first_places[kind] = f"line {line}" if like is None else f"line {line} repeats line {like}"

    def sentences(self) -> list[str]:
        """One sentence a kind, with the count and the first place."""
        sentences = []
        for kind, (singular, several) in _SENTENCES.items():
            count = self._counts[kind]
            if count:
                what = singular if count == 1 else several.format(n=count)
                sentences.append(f"{what} (first: {self._first_places[kind]})")
        return sentences


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
        self._limits = [limit for limit in limits if limit.column == column.name]
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
        if not _DIGITS.match(text):
            why = next(words for pattern, words in _NO_INT if pattern.match(text))
            raise CellError(f"{why.format(shown(text))}: write {_RANGE}")
        digits = text.lstrip("0")
        if not digits:
            raise CellError(f"is zero: write {_RANGE}")
        # the length first, because int() refuses texts of thousands of digits
        if len(digits) > len(str(MAX_INT)) or int(digits) > MAX_INT:
            raise CellError(f"{shown(text)} is too large: write {_RANGE}")
        value = int(digits)
        for limit in self._limits:
            if value % limit.multiple_of:
                what = f"{value} is not a multiple of {limit.multiple_of} ({limit.why})"
                raise CellError(f"{what}: drop the shape or pad {limit.column}")
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
IGNORED = {"gfx", "cu_num", "_tag"}.union(*(family.result_columns for family in FAMILIES.values()))

MAX_COLUMNS = 256
COMMENT = "#"
_COMMENT_FAULT = "a comment: a shapes file has none, drop the line"

# an unknown column as like a key column that the file lacks (difflib's ratio) is taken for a misspelling of it, since
# the shapes would silently get that column's default
LIKE_A_KEY = 0.7


def _not_a_header(text: str, names: Sequence[str], family: Family) -> str | None:
    """The fault of a first line that is no header at all."""
    if names[0].startswith(COMMENT):
        return _COMMENT_FAULT
    if len(names) > MAX_COLUMNS:
        return f"the header has {len(names)} columns, and a shapes file has at most {MAX_COLUMNS}"
    if len(names) == 1:
        for separator, word in ((";", "';'"), ("\t", "tabs"), ("|", "'|'"), (" ", "spaces")):
            if separator in text.strip():
                return f"the columns are separated by {word}: separate them by commas"
    if all(_DIGITS.match(name) for name in names):
        required = ",".join(column.name for column in family.columns if column.required)
        return f"there is no header: the first line must name the columns, {required}"
    return None


def _misspelled(name: str, names: Sequence[str], family: Family) -> str | None:
    """The key column that the file lacks and that `name` was meant to be; None where it is like none."""
    present = {name.lower() for name in names}
    missing = {key.lower(): key for key in family.key_names if key.lower() not in present and len(key) > 1}
    nearest = difflib.get_close_matches(name.lower(), missing, n=1, cutoff=LIKE_A_KEY)
    return missing[nearest[0]] if nearest else None


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
    notes = []
    if text.bom:
        notes.append("dropped the byte order mark at the start of the file")
    if text.ends != "LF":
        notes.append(f"read {text.ends} line ends as LF")
    notes += table.notes.sentences() + table.notes_on_columns()
    return ShapeList(_numbered(table.seen), notes, hashlib.sha256(data).hexdigest(), str(path), table.annotations)


def _numbered(keys: Iterable[Key]) -> list[Shape]:
    return [Shape(number, key) for number, key in enumerate(keys, 1)]


def family_of_list(path: Path, known: Iterable[str] = tuple(FAMILIES)) -> str | None:
    """The family in the name of a list (`shapes-fmoe.csv`, or AITER's), else the only one of `known` whose required
    columns it has; None if neither tells. Raises ShapesError."""
    if table := table_of_others(path):
        raise ShapesError(
            f"{path}: is the list of AITER's {table}.csv, which nothing here tunes; give a list of yours another name"
        )
    names = [name for name in FAMILIES if f"-{path.stem}".endswith(f"-{name}")]
    aiters_family = family_in_name(path.name.replace("untuned", "tuned"))
    if aiters_family:
        names.append(aiters_family.name)
    header = {cell.strip(BLANK).lower() for cell in read_head(path, 4096, ShapesError).partition("\n")[0].split(",")}
    if not names:
        names = [name for name in known if _required_columns(FAMILIES[name]) <= header]
    return names[0] if len(names) == 1 else None


def _required_columns(family: Family) -> set[str]:
    return {column.name.lower() for column in family.columns if column.required}


def union(lists: Sequence[ShapeList]) -> ShapeList:
    """One list of several of a family. A shape counts where it is first, like a repeated row of a file."""
    cells_by_key: dict[Key, dict[str, str]] = {}
    for shape_list in lists:
        for index, shape in enumerate(shape_list.shapes):
            cells = {name: column[index] for name, column in shape_list.annotations.items()}
            cells_by_key.setdefault(shape.key, cells)
    columns = dict.fromkeys(name for cells in cells_by_key.values() for name in cells)
    return ShapeList(
        _numbered(cells_by_key),
        [f"{shape_list.source}: {note}" for shape_list in lists for note in shape_list.notes],
        hashlib.sha256("".join(shape_list.sha256 for shape_list in lists).encode()).hexdigest(),
        " ".join(shape_list.source for shape_list in lists),
        {name: [cells.get(name, "") for cells in cells_by_key.values()] for name in columns},
    )


def fixed_columns(family: Family, given: Mapping[str, str], faults: Faults) -> dict[str, int | str]:
    """Values given to key columns for every shape; faults are added."""
    values: dict[str, int | str] = {}
    optional = {column.name: column for column in family.columns if not column.required}
    for name, text in given.items():
        if name not in optional:
            legal = ", ".join(optional) or "none"
            faults.add(f"{shown(name)} cannot be set for all shapes of {family.name} (can be: {legal})")
            continue
        try:
            values[name] = CellReader(optional[name], family.limits, Notes()).read(text, 0)
        except CellError as e:
            faults.add(f"value set for all shapes: {e}", column=name)
    return values


class _Table:
    """Reads the lines of one file. Call `read`; then `seen`, `annotations` and both kinds of notes are complete."""

    def __init__(self, family: Family, faults: Faults) -> None:
        self.family = family
        self.faults = faults
        self.notes = Notes()
        self.seen: dict[Key, int] = {}
        """The key of each shape -> the line that first had it, in file order."""
        self.annotations: dict[str, list[str]] = {}
        """Columns that gemmfleet does not know: their cells, one a shape."""
        self._header: list[str] = []
        """The cells of the header."""
        self._positions: dict[str, int] = {}
        """The position of each column in a line; key columns are spelled as the family has them."""
        self._annotation_positions: dict[str, int] = {}
        self._ignored: list[str] = []
        self._respelled: list[str] = []
        """Key columns in another case, in words."""

    def read(self, text: Text) -> None:
        """Read header and rows; faults and notes are added, nothing is raised."""
        filled = [index for index, line in enumerate(text.lines) if has_content(line)]
        top = filled[0]
        last = filled[-1]
        for number in range(1, top + 1):
            self.notes.count("blank", number)
        if not self._read_header(text.lines[top], top + 1):
            return
        if top == last:
            self.faults.add("no shapes: no row follows the header")
        self._read_rows(text.lines[top + 1 : last + 1], top + 2)

    def _read_header(self, text: str, line: int) -> bool:
        """Read the header and add its faults; False where the line is no header at all."""
        cells = split_cells(text)
        self._header = [cell.strip(BLANK) for cell in cells]
        fault = _not_a_header(text, self._header, self.family)
        if fault:
            self.faults.add(fault, line=line)
            return False
        for cell, name in zip(cells, self._header, strict=True):
            if cell != name:
                self.notes.count("spaces", line)
        if '"' in text and '"' not in "".join(cells):
            self.notes.count("quotes", line)
        for index in range(len(cells)):
            fault = self._place_column(index)
            if fault:
                self.faults.add(fault, line=line, column=self._label(index))
        others = ", ".join(shown(name) for name in list(self.annotations)[:6])
        present = f" (other columns here: {others})" if others else ""
        for column in self.family.columns:
            if column.required and column.name not in self._positions:
                what = f"column {column.name} is missing: family {self.family.name} needs it{present}"
                self.faults.add(what, line=line, column=column.name)
        return True

    def _place_column(self, index: int) -> str | None:
        """Decide what a column of the header is; return its fault, if it has one."""
        written = self._header[index]
        key_names = {name.lower(): name for name in self.family.key_names}
        name = key_names.get(written.lower(), written)
        first = self._positions.setdefault(name, index)
        if first != index:
            return f"is in the header twice (columns {first + 1} and {index + 1}): drop one"
        if name in self.family.key_names:
            if written != name:
                self._respelled.append(f"{written} as {name}")
            return None
        if name in IGNORED:
            self._ignored.append(name)
            return None
        meant = _misspelled(name, self._header, self.family)
        if meant:
            return f"unknown column {shown(name)} for family {self.family.name}; did you mean {meant}?"
        if not name:
            return "a column without a name: name it or drop it, with any comma too many"
        self.annotations[escaped(name)] = []
        self._annotation_positions[escaped(name)] = index
        return None

    def _label(self, index: int) -> str:
        """The name of a column for a message."""
        name = self._header[index] if index < len(self._header) else ""
        return name if name.isascii() and name.isidentifier() and len(name) <= 40 else f"column {index + 1}"

    def _read_rows(self, lines: list[str], start: int) -> None:
        """Read the rows; `start` is the number of their first line. A line whose cells were all seen before is only
        looked up, which makes a list of 100,000 shapes a matter of a second."""
        columns = [column for column in self.family.columns if column.name in self._positions]
        missing = [column for column in self.family.columns if column.name not in self._positions]
        order = [column.name for column in (*columns, *missing)]
        in_order = itemgetter(*(order.index(name) for name in self.family.key_names))
        defaults = [default_of(column) for column in missing]
        readers = [(self._positions[c.name], CellReader(c, self.family.limits, self.notes)) for c in columns]
        known = [(position, reader.known) for position, reader in readers]
        annotations = [(self._annotation_positions[name], cells) for name, cells in self.annotations.items()]
        for number, line in enumerate(lines, start):
            cells = split_cells(line)
            values: list[int | str] | None
            try:
                if len(cells) != len(self._header) or '"' in line:
                    raise KeyError
                values = [values_of[cells[position]] for position, values_of in known]
            except KeyError:
                values = self._read_row(line, cells, number, readers)
                if values is None:
                    continue
            first = self.seen.setdefault(in_order(values + defaults), number)
            if first != number:
                self.notes.count("repeats", number, first)
                continue
            for position, texts in annotations:
                texts.append(escaped(cells[position]))

    def _read_row(
        self, line: str, cells: list[str], number: int, readers: list[tuple[int, CellReader]]
    ) -> list[int | str] | None:
        """The values of a row, checked cell by cell; None where it is blank or faulty."""
        if not has_content(line):
            self.notes.count("blank", number)
            return None
        if line.lstrip(BLANK).startswith(COMMENT):
            self.faults.add(_COMMENT_FAULT, line=number)
            return None
        if '"' in line:
            self.notes.count("quotes", number)
        width = len(self._header)
        if len(cells) != width:
            size = "short" if len(cells) < width else "long"
            what = f"the row is too {size}: it has {plural(len(cells), 'cell')}, the header {width}"
            self.faults.add(what, line=number, column=self._label(min(len(cells), width)))
            return None
        values: list[int | str] = []
        for position, reader in readers:
            try:
                values.append(reader.read(cells[position], number))
            except CellError as e:
                self.faults.add(e, line=number, column=reader.column.name)
        return values if len(values) == len(readers) else None

    def notes_on_columns(self) -> list[str]:
        """Sentences on columns: respelled, not used, ignored, and taken by default."""
        name = self.family.name
        missing = [column for column in self.family.columns if column.name not in self._positions]
        sentences = {
            "read the columns": self._respelled,
            f"columns that {name} does not use, kept as annotations:": [shown(column) for column in self.annotations],
            "ignored columns that are no part of a shape:": self._ignored,
            f"default of {name} for columns that the file lacks:": [f"{c.name} = {c.default}" for c in missing],
        }
        return [f"{words} {', '.join(columns)}" for words, columns in sentences.items() if columns]
