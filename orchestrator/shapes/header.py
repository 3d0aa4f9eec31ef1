"""The first line of a shapes file: which columns it names, which are missing, ignored or unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.families import FAMILIES, Family
from orchestrator.shapes.cells import BLANK
from orchestrator.shapes.faults import Faults, did_you_mean, shown
from orchestrator.shapes.notes import Notes

IGNORED = {"gfx", "cu_num", "_tag", *(c for f in FAMILIES.values() for c in f.result_columns)}
"""Columns of tuned tables that are no part of a shape, so that a tuned table can serve as a shapes list."""

MAX_COLUMNS = 256


@dataclass(slots=True)
class Header:
    """`names` are the cells of the header, `position` says where the file has each key column."""

    line: int
    names: list[str]
    position: dict[str, int] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)


def read_header(text: str, line: int, family: Family, faults: Faults, notes: Notes) -> Header | None:
    """Reads the header and adds its faults; None where the line is no header at all."""
    cells = text.split(",")
    names = [c.strip(BLANK) for c in cells]
    wrong = _not_a_header(text, names, family)
    if wrong:
        faults.add(wrong, line=line)
        return None
    for cell, name in zip(cells, names, strict=True):
        if cell != name:
            notes.count("spaces", line)
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
        elif name.lower() in keys and keys[name.lower()] not in names:
            right = keys[name.lower()]
            faults.add(f"column {shown(name)} must be spelled {right}", line=line, column=right)
            header.position.setdefault(right, at)
        else:
            faults.add(_unknown(name, family), line=line, column=_label(name, at))
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


def _unknown(name: str, family: Family) -> str:
    if not name:
        return "a column without a name: name it or drop it, with any comma too many"
    legal = ", ".join(family.key_names)
    owners = [f.name for f in FAMILIES.values() if name in f.key_names]
    others = " and others" if len(owners) > 2 else ""
    near = did_you_mean(name, [*family.key_names, *sorted(IGNORED)])
    of = f"; it belongs to {', '.join(owners[:2])}{others}" if owners else near
    return f"unknown column {shown(name)} for family {family.name}{of} (legal: {legal})"


def _add_missing(header: Header, family: Family, faults: Faults) -> None:
    for column in family.columns:
        if column.required and column.name not in header.position:
            faults.add(f"column {column.name} is missing: family {family.name} needs it",
                       line=header.line, column=column.name)  # fmt: skip


def _label(name: str, at: int) -> str:
    plain = name.isascii() and name.isidentifier() and len(name) <= 40
    return name if plain else f"column {at + 1}"


def column_label(header: Header, at: int) -> str:
    """How a message names the column at position `at`."""
    return _label(header.names[at], at) if at < len(header.names) else f"column {at + 1}"
