"""The first line of a shapes file: its key columns, those that are missing, ignored or mere annotations."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.shapes.cells import BLANK
from orchestrator.shapes.notes import Notes
from orchestrator.tables.faults import Faults, escaped, shown
from orchestrator.tables.open import split_cells
from worker.families import FAMILIES, Family

IGNORED = {"gfx", "cu_num", "_tag", *(c for f in FAMILIES.values() for c in f.result_columns)}
"""Columns of tuned tables that are no part of a shape, so that a tuned table can serve as a shapes list."""

MAX_COLUMNS = 256

LIKE_A_KEY = 0.7
"""An unknown column as like a key column that the file lacks (difflib's ratio) is taken for a misspelling of it, since
the shapes would silently get that column's default."""


@dataclass(slots=True)
class Header:
    """`names` are the cells of the header, `position` says where the file has each key column.

    `respelled` are (as written, as read) of key columns in another case; `annotations` maps columns that gemmfleet does
    not know to their place.
    """

    line: int
    names: list[str]
    position: dict[str, int] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    respelled: list[tuple[str, str]] = field(default_factory=list)
    annotations: dict[str, int] = field(default_factory=dict)


def read_header(text: str, line: int, family: Family, faults: Faults, notes: Notes) -> Header | None:
    """Read the header and add its faults; None where the line is no header at all."""
    cells = split_cells(text)
    names = [c.strip(BLANK) for c in cells]
    wrong = _not_a_header(text, names, family)
    if wrong:
        faults.add(wrong, line=line)
        return None
    for cell, name in zip(cells, names, strict=True):
        if cell != name:
            notes.count("spaces", line)
    if '"' in text and '"' not in "".join(cells):
        notes.count("quotes", line)
    header = Header(line, names)
    keys = {k.lower(): k for k in family.key_names}
    seen: dict[str, int] = {}
    for at, name in enumerate(names):
        first = seen.setdefault(name, at)
        if first != at:
            faults.add(f"is in the header twice (columns {first + 1} and {at + 1}): drop one",
                       line=line, column=_label(name, at))  # fmt: skip
        elif name in family.key_names:
            header.position[name] = at
        elif '"' in name or "'" in name:
            faults.add(f"{shown(name)} holds a quote: a shapes file is plain, write the bare name",
                       line=line, column=_label(name, at))  # fmt: skip
            names[at] = name.strip("'\"")
            header.position.setdefault(names[at], at)
        elif name in IGNORED:
            header.ignored.append(name)
        elif name.lower() in keys:
            right = keys[name.lower()]
            other = header.position.get(right, names.index(right) if right in names else at)
            if other != at:
                faults.add(f"is column {right} once more (columns {other + 1} and {at + 1}): drop one",
                           line=line, column=_label(name, at))  # fmt: skip
            else:
                header.position[right] = at
                header.respelled.append((name, right))
        elif meant := _misspelled(name, names, family):
            faults.add(f"unknown column {shown(name)} for family {family.name}; did you mean {meant}?",
                       line=line, column=_label(name, at))  # fmt: skip
        elif not name:
            faults.add("a column without a name: name it or drop it, with any comma too many",
                       line=line, column=_label(name, at))  # fmt: skip
        else:
            header.annotations[escaped(name)] = at
    _add_missing(header, family, faults)
    return header


def _not_a_header(text: str, names: Sequence[str], family: Family) -> str | None:
    wanted = ",".join(c.name for c in family.columns if c.required)
    if len(names) > MAX_COLUMNS:
        return f"the header has {len(names)} columns, which is no shapes file"
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


def _add_missing(header: Header, family: Family, faults: Faults) -> None:
    for column in family.columns:
        if column.required and column.name not in header.position:
            others = ", ".join(shown(n) for n in list(header.annotations)[:6])
            has = f" (other columns here: {others})" if others else ""
            faults.add(f"column {column.name} is missing: family {family.name} needs it{has}",
                       line=header.line, column=column.name)  # fmt: skip


def _label(name: str, at: int) -> str:
    plain = name.isascii() and name.isidentifier() and len(name) <= 40
    return name if plain else f"column {at + 1}"


def column_label(header: Header, at: int) -> str:
    """How a message names the column at position `at`."""
    return _label(header.names[at], at) if at < len(header.names) else f"column {at + 1}"
