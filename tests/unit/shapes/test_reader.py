"""Reading shape lists: what is cleaned and noted, and every fault with its place; nothing of a file is echoed raw."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from orchestrator.errors import ShapesError
from orchestrator.families import get_family
from orchestrator.files.faults import MAX_FAULTS
from orchestrator.shapes.model import Shape, ShapeList, annotations_csv, render_shapes
from orchestrator.shapes.reader import MAX_BYTES, family_of_list, read_shapes, union
from tests.paths import ROOT
from tests.support.marks import drawn
from tests.unit.worker.test_families import TABLES
from worker.families import BATCHED, FAMILIES, Column, Family
from worker.tuners.common.case import case_of

A4W4 = get_family("a4w4_blockscale")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.csv"


def read(path: Path, data: bytes | str, family: str = "a4w4_blockscale") -> ShapeList:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return read_shapes(path, get_family(family))


def faults(path: Path, data: bytes | str, family: str = "a16w16") -> list[str]:
    """The faults without the file's name, which each must begin with."""
    with pytest.raises(ShapesError) as e:
        read(path, data, family)
    assert e.value.exit_code == 2
    assert all(f.startswith((f"{path}:", "... and ")) and f.isprintable() and len(f) < 400 for f in e.value.faults)
    return [f.removeprefix(f"{path}:").strip() for f in e.value.faults]


@pytest.mark.parametrize(
    ("data", "note"),
    [
        ("\ufeffM,N,K\n1,2,32\n3,4,64\n", "dropped the byte order mark at the start of the file"),
        ("M,N,K\r\n1,2,32\r\n3,4,64\r\n", "read CRLF line ends as LF"),
        ("M,N,K\n 1,2,32\n3,\t4 ,64\n", "dropped spaces around 2 cells (first: line 2)"),
        ("M,N,K\n1,2,32\n003,4,64\n", "dropped leading zeros of 1 cell (first: line 3)"),
        ("\nM,N,K\n1,2,32\n\n \n,,\n3,4,64\n", "dropped 4 blank lines (first: line 1)"),
        ("M,N,K\n\n1,2,32\n3,4,64\n3,4,64\n1,2,32\n", "dropped 2 duplicate rows (first: line 5 repeats line 4)"),
        ("m,n,K\n1,2,32\n3,4,64\n", "read the columns m as M, n as N"),
        ('"M",N,K\n1,2,32\n"3","4",64\n', "read 2 lines with quoted cells as if they had none (first: line 1)"),
        ("M,N,K,model,q_dtype_w\n1,2,32,a,b\n3,4,64,c,d\n",
         "columns that a4w4_blockscale does not use, kept as annotations: 'model', 'q_dtype_w'"),
        ("gfx,M,N,K,us\na,1,2,32,-1\nb,3,4,64,1e-5\n", "ignored columns that are no part of a shape: gfx, us"),
    ],
)  # fmt: skip
def test_cleaned_and_reported(path: Path, data: str, note: str) -> None:
    found = read(path, data)
    assert [s.key for s in found.shapes] == [(1, 2, 32), (3, 4, 64)]
    assert note in found.notes


def test_annotations_are_kept_beside_the_shape_that_they_were_given_with(path: Path) -> None:
    found = read(path, 'M,layer,N,K\n1,"up, gate",2,32\n1,again,2,32\n3,\x1b[1mq"kv,4,64\n')
    assert found.annotations == {"layer": ["up, gate", '\\x1b[1mq"kv']}
    assert annotations_csv(found, A4W4) == 'M,N,K,layer\n1,2,32,"up, gate"\n3,4,64,"\\x1b[1mq""kv"\n'


def test_booleans_and_defaults(path: Path) -> None:
    found = read(path, "M,N,K,bias\n1,2,3,TRUE\n1,2,3,false\n1,2,3,True\n", "a16w16")
    assert [s.key[3] for s in found.shapes] == ["True", "False"]
    assert "wrote 2 cells as AITER's True or False (first: line 2)" in found.notes
    found = read(path, "M,N,K\n1,2,3\n", "a8w8")
    assert [s.key for s in found.shapes] == [(1, 2, 3, "torch.int8")]
    assert found.notes == ["default of a8w8 for columns that the file lacks: q_dtype_w = torch.int8"]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)
def test_a_tuned_table_and_aiters_own_lists_are_shape_lists(path: Path, family: Family) -> None:
    defaults = ["256" if c.required else str(c.default) for c in family.columns]
    row = [*["gfx950", "256"][: len(family.chip_columns)], *defaults, *("-1.5" for _ in family.result_columns)]
    assert len(read(path, ",".join(family.aiter_header) + "\n" + ",".join(row) + "\n", family.name).shapes) == 1
    for there in (p for name in (family.untuned_csv, family.tuned_csv) if (p := TABLES / name).is_file()):
        assert len(read_shapes(there, family).shapes) > 10


@pytest.mark.parametrize(
    ("name", "header", "known", "family"),
    [
        ("shapes-a8w8_blockscale.csv", "M,N,K", FAMILIES, "a8w8_blockscale"),
        ("log-2026-batched_a8w8.csv", "B,M,N,K", FAMILIES, "batched_a8w8"),
        ("fmoe.csv", "M,N,K", FAMILIES, "fmoe"),
        ("my_a8w8.csv", "M,N,K", FAMILIES, None),
        *((f.untuned_csv, "M,N,K", FAMILIES, f.name) for f in FAMILIES.values()),
        ("qwen_bf16_tuned_gemm_3.csv", "gfx,M,N,K", FAMILIES, "a16w16"),
        ("list.csv", " Token,model_dim,inter_dim,expert , topk,count", FAMILIES, "fmoe"),
        ("list.csv", "M,N,K", FAMILIES, None),
        ("list.csv", "M,N,K", ("a8w8_blockscale", "fmoe"), "a8w8_blockscale"),
        ("list.csv", "M;N;K", ("a8w8_blockscale", "fmoe"), None),
    ],
)
def test_the_family_of_a_list(tmp_path: Path, name: str, header: str, known: list[str], family: str | None) -> None:
    (tmp_path / name).write_text(f"\ufeff{header}\n1,2,3\n")
    assert family_of_list(tmp_path / name, known) == family


def test_a_list_that_is_not_there_has_no_family(tmp_path: Path) -> None:
    with pytest.raises(ShapesError, match=r"none\.csv"):
        family_of_list(tmp_path / "none.csv")


def test_of_several_lists_a_shape_counts_once_with_its_first_annotations(tmp_path: Path) -> None:
    first = read(tmp_path / "a.csv", "M,N,K,count\n1,2,32,5\n3,4,64,6\n")
    second = read(tmp_path / "b.csv", "M,N,K,layer,count\n3,4,64,up,7\n5,6,96,down,8\n")
    found = union([first, second])
    assert found.shapes == [Shape(1, (1, 2, 32)), Shape(2, (3, 4, 64)), Shape(3, (5, 6, 96))]
    assert found.annotations == {"count": ["5", "6", "8"], "layer": ["", "", "down"]}
    assert found.source == f"{tmp_path}/a.csv {tmp_path}/b.csv"
    assert [n.partition(": ")[0] for n in found.notes] == [f"{tmp_path}/a.csv", f"{tmp_path}/b.csv"]
    assert len({found.sha256, first.sha256, second.sha256, union([second, first]).sha256}) == 4


@pytest.mark.parametrize("family", ["batched_bf16", "batched_a8w8"])
def test_the_examples(family: str) -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    assert len(read_shapes(ROOT / "examples" / "fp4_suite.csv", A4W4).shapes) == 15
    for backend in BATCHED:
        name = f"{backend.removeprefix('aiter-bmm-')}.csv"
        found = read_shapes(ROOT / "examples" / "batched" / name, get_family(family))
        assert not found.notes
        assert re.search(rf"^\| `{re.escape(name)}` \| {len(found.shapes)} \|", page, re.M), name
        for shape in found.shapes:
            assert case_of(family, shape.key_dict(get_family(family)), backend).b > 1


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("", "is empty"), ("16.0", "not a whole number"), ("1e3", "not a whole number"), ("nan", "not a whole number"),
        ("-5", "not a whole number"), ("0", "is zero"), ("2147483648", "too large"), ("9" * 5000, "too large"),
        ("=1+1", "looks like a formula"), ("-A1", "looks like a formula"), ("@SUM(A1)", "looks like a formula"),
        ('5"', "holds a quote"), ("0x10", "is not a number"), ("1 000", "is not a number"),
        ("\uff11\uff12", "is not a number"), ("twelve", "is not a number"),
    ],
)  # fmt: skip
def test_wrong_number(path: Path, cell: str, says: str) -> None:
    (fault,) = faults(path, f"M,N,K\n1,2,3\n4,{cell},6\n")
    assert fault.startswith("3:N: ")
    assert says in fault


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("bf16", "did you mean torch.bfloat16?"), ("TORCH.FLOAT16", "did you mean torch.float16?"),
        ("torch.int8", "legal: torch.bfloat16"), ("", "is empty"), ("__import__(os)", "is not legal"),
        ("__import__('os').system('true')", "holds a quote"), ("=cmd", "looks like a formula"),
    ],
)  # fmt: skip
def test_wrong_text(path: Path, cell: str, says: str) -> None:
    (fault,) = faults(path, f"M,N,K,dtype\n1,2,3,{cell}\n")
    assert fault.startswith("2:dtype: ")
    assert says in fault


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("N", ["1:M: column M is missing", "1:K: column K is missing"]),
        ("m,M,N,K", ["1:M: is in the header twice (columns 1 and 2): drop one"]),
        ("M,N,K,bais", ["1:bais: unknown column 'bais' for family a16w16; did you mean bias?"]),
        ("M,N,K,", ["1:column 4: a column without a name"]),
        ("M;N;K", ["1: the columns are separated by ';'"]),
        ("M N K", ["1: the columns are separated by spaces: separate them by commas"]),
        ("# M,N,K of llama", ["1: a comment: a shapes file has none, drop the line"]),
        ("16,32,64", ["1: there is no header: the first line must name the columns, M,N,K"]),
        (",".join(f"c{i}" for i in range(300)), ["1: the header has 300 columns"]),
    ],
)
def test_wrong_header(path: Path, header: str, expected: list[str]) -> None:
    found = faults(path, f"{header}\n{','.join('1' for _ in header.split(','))}\n")
    assert [f[: len(x)] for f, x in zip(found, expected, strict=True)] == expected


@pytest.mark.parametrize(
    ("data", "places"),
    [
        ("M,N,K\n1,2\n1,2,3,4\n5\n", ["2:K", "3:column 4", "4:N"]),
        ("M,N,K\n# decode\n1,2,3\n", ["2"]),
        ("\r\nM,N,dtype\r\n\r\n0,x,fp32\r\n\r\n1,2\r\n3,4,torch.float16\r\n-1,5,torch.int4\r\n",
         ["2:K", "4:M", "4:N", "4:dtype", "6:dtype", "8:M", "8:dtype"]),
    ],
)  # fmt: skip
def test_all_at_once_and_lines_count_as_in_an_editor(path: Path, data: str, places: list[str]) -> None:
    assert [f.split(": ")[0] for f in faults(path, data)] == places


def test_limits_of_a_family_and_many_faults(path: Path) -> None:
    (fault,) = faults(path, "M,N,K\n1,2,64\n1,2,48\n", "a4w4_blockscale")
    assert fault.startswith("3:K: 48 is not a multiple of 32")
    found = faults(path, "M,N,K\n" + "0,0,1\n" * 100)
    assert (len(found), found[-1]) == (MAX_FAULTS + 1, f"... and {200 - MAX_FAULTS} more")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\n \n,,\n", "is empty"), (b"M,N,K\n\n\n", "no shapes"), (b"M,N,K\n1,2,\x00\n", "2: is a binary file"),
        (b"PK\x03\x04rest", "a zip archive or a workbook"), ("M,N,K\n1,2,3\n".encode("utf-16"), "is UTF-16"),
        (b"\x1f\x8b\x08", "compressed by gzip"),
        (b"M,N,K\n1,2,\xe9\n", r"2:K: '\xe9' holds bytes that are not UTF-8"),
        (b"#" * (MAX_BYTES + 1), "is larger than 64 MiB"),
    ],
    ids=range(8),
)  # fmt: skip
def test_wrong_file(path: Path, data: bytes, says: str) -> None:
    (fault,) = faults(path, data)
    assert says in fault


def test_no_file_directory_and_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, says in (("none", "no such file"), ("", "is a directory"), ("pipe", "not a regular"), ("a\0", "no")):
        with pytest.raises(ShapesError, match=says):
            read_shapes(f"{tmp_path}/{name}", A4W4)


ONE_FOLDER = [HealthCheck.function_scoped_fixture]


def cells(family: Family, column: Column) -> st.SearchStrategy[int | str]:
    if column.legal:
        legal = st.sampled_from(column.legal)
        return legal.map(int) if column.kind == "int" else legal
    step = next((x.multiple_of for x in family.limits if x.column == column.name), 1)
    return st.integers(1, (2**31 - 1) // step).map(lambda n: n * step)


@drawn(60, suppress_health_check=ONE_FOLDER)
@given(st.sampled_from(list(FAMILIES.values())), st.data())
def test_written_and_read_is_the_same_and_dirt_changes_notes_alone(
    path: Path, family: Family, data: st.DataObject
) -> None:
    keys = data.draw(st.lists(st.tuples(*(cells(family, c) for c in family.columns)), min_size=1, max_size=20))
    clean = render_shapes(keys, family)
    found = read(path, clean, family.name).shapes
    assert found == [Shape(i, k) for i, k in enumerate(dict.fromkeys(keys), 1)]
    dirt, ends = st.sampled_from(["", "", " ", "\t"]), st.sampled_from(["\n", "\r\n", "\n\n", "\r\n \r\n"])
    lines = [
        ",".join(data.draw(dirt) + cell + data.draw(dirt) for cell in line.split(",")) + data.draw(ends)
        for line in clean.splitlines()
    ]
    dirty = read(path, "\ufeff" + "".join(lines) + lines[-1], family.name)
    assert dirty.shapes == found
    assert any("duplicate row" in n for n in dirty.notes)


@drawn(150, suppress_health_check=ONE_FOLDER)
@given(st.binary(max_size=200), st.sampled_from(["a16w16", "a4w4_blockscale", "fmoe"]))
def test_no_bytes_do_more_than_raise_shapes_error(path: Path, data: bytes, name: str) -> None:
    for prefix in (b"", b"M,N,K\n1,2,32\n"):
        faults: list[str] = []
        try:
            found = read(path, prefix + data, name).shapes
        except ShapesError as e:
            found, faults = [], e.faults
        assert bool(found) != bool(faults)
        assert all(f.isprintable() for f in faults)
