"""Laws of reading shape lists, over generated lists."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import ShapesError
from orchestrator.shapes.model import Key, Shape, ShapeList, render_shapes
from orchestrator.shapes.reader import read_shapes
from tests.support.marks import drawn
from worker.families import FAMILIES, Column, Family


def cells(family: Family, column: Column) -> st.SearchStrategy[int | str]:
    if column.legal:
        legal = st.sampled_from(column.legal)
        return legal.map(int) if column.kind == "int" else legal
    step = next((x.multiple_of for x in family.limits if x.column == column.name), 1)
    return st.integers(1, (2**31 - 1) // step).map(lambda n: n * step)


@st.composite
def lists(draw: st.DrawFn) -> tuple[Family, list[Key]]:
    family = draw(st.sampled_from(list(FAMILIES.values())))
    return family, draw(st.lists(st.tuples(*(cells(family, c) for c in family.columns)), min_size=1, max_size=20))


def read(data: str | bytes, family: Family) -> ShapeList:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.csv"
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return read_shapes(path, family)


@drawn(60)
@given(lists())
def test_written_and_read_is_the_same_without_duplicates(case: tuple[Family, list[Key]]) -> None:
    family, keys = case
    found = read(render_shapes([Shape(i, k) for i, k in enumerate(keys, 1)], family), family)
    assert [s.key for s in found.shapes] == list(dict.fromkeys(keys))
    assert [s.id for s in found.shapes] == list(range(1, len(found.shapes) + 1))


@drawn(60)
@given(lists(), st.data())
def test_dirt_changes_notes_and_nothing_else(case: tuple[Family, list[Key]], data: st.DataObject) -> None:
    family, keys = case
    clean = render_shapes([Shape(i, k) for i, k in enumerate(keys, 1)], family)
    dirt = st.sampled_from(["", "", " ", "\t", "  "])
    lines = [
        ",".join(data.draw(dirt) + cell + data.draw(dirt) for cell in line.split(","))
        + data.draw(st.sampled_from(["\n", "\r\n", "\n\n", "\r\n \r\n"]))
        for line in clean.splitlines()
    ]
    again = data.draw(st.sampled_from(lines[1:]))
    dirty = data.draw(st.sampled_from(["", "\ufeff"])) + "".join(lines) + again
    found = read(dirty, family)
    assert found.shapes == read(clean, family).shapes
    assert any("duplicate row" in n for n in found.notes)


BAD = st.sampled_from(["0", "-1", "1.5", "=1", "x", "", "'1'", "2147483648", "\x1b[0m"])
GOOD = st.integers(1, 99).map(str)


@drawn(60)
@given(st.lists(st.tuples(st.one_of(GOOD, BAD), st.one_of(GOOD, BAD), GOOD), min_size=1, max_size=15))
def test_every_bad_cell_is_a_fault_and_the_list_is_stable(rows: list[tuple[str, str, str]]) -> None:
    family = FAMILIES["a16w16"]
    data = "M,N,K\n" + "".join(",".join(row) + "\n" for row in rows)
    places = [
        f"{line}:{column}"
        for line, row in enumerate(rows, 2)
        for column, cell in zip("MNK", row, strict=True)
        if not (cell.isdigit() and 0 < int(cell) < 2**31)
    ]
    if not places:
        assert len(read(data, family).shapes) == len(set(rows))
        return
    found = [faults_of(data, family) for _ in range(2)]
    assert found[0] == found[1]
    assert [f.split(": ")[0] for f in found[0]] == places


def faults_of(data: str | bytes, family: Family) -> list[str]:
    """The faults, without the folder that changes with every call."""
    try:
        read(data, family)
    except ShapesError as e:
        return [f[f.index("s.csv:") + 6 :] for f in e.faults]
    return []


@drawn(150)
@given(st.binary(max_size=200), st.sampled_from(["a16w16", "a4w4_blockscale", "fmoe"]))
def test_no_bytes_do_more_than_raise_shapes_error(data: bytes, name: str) -> None:
    for prefix in (b"", b"M,N,K\n1,2,32\n"):
        faults = faults_of(prefix + data, FAMILIES[name])
        assert all(f.isprintable() for f in faults)
        assert faults or read(prefix + data, FAMILIES[name]).shapes
