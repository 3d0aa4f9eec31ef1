"""Reading shape lists: what is cleaned, what is taken by default, what the notes say."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.families import get_family
from orchestrator.shapes.model import ShapeList, annotations_csv
from orchestrator.shapes.reader import read_shapes
from tests.paths import ROOT
from tests.unit.worker.test_families import TABLES
from worker.families import FAMILIES, Family

A4W4 = get_family("a4w4_blockscale")
A16W16 = get_family("a16w16")


def read(tmp_path: Path, data: bytes | str, family: str = "a4w4_blockscale") -> ShapeList:
    path = tmp_path / "s.csv"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return read_shapes(path, get_family(family))


def keys(found: ShapeList) -> list[tuple[int | str, ...]]:
    return [s.key for s in found.shapes]


@pytest.mark.parametrize(
    ("data", "note"),
    [
        ("\ufeffM,N,K\n1,2,32\n3,4,64\n", "dropped the byte order mark at the start of the file"),
        ("M,N,K\r\n1,2,32\r\n3,4,64\r\n", "read CRLF line ends as LF"),
        ("M,N,K\r1,2,32\r3,4,64", "read CR line ends as LF"),
        ("M,N,K\n 1,2,32\n3,\t4 ,64\n", "dropped spaces around 2 cells (first: line 2)"),
        ("M,N ,K\n1,2,32\n3,4,64\n", "dropped spaces around 1 cell (first: line 1)"),
        ("M,N,K\n1,2,32\n003,4,64\n", "dropped leading zeros of 1 cell (first: line 3)"),
        ("M,N,K\n1,2,32\n\n \n,,\n3,4,64\n", "dropped 3 blank lines (first: line 3)"),
        ("\nM,N,K\n1,2,32\n3,4,64\n", "dropped 1 blank line (first: line 1)"),
        ("M,N,K\n1,2,32\n3,4,64\n1,2,32\n", "dropped 1 duplicate row (first: line 4 repeats line 2)"),
        ("M,N,K\n\n1,2,32\n3,4,64\n3,4,64\n1,2,32\n", "dropped 2 duplicate rows (first: line 5 repeats line 4)"),
        ("m,n,K\n1,2,32\n3,4,64\n", "read the columns m as M, n as N"),
        ('"M",N,K\n1,2,32\n"3","4",64\n', "read 2 lines with quoted cells as if they had none (first: line 1)"),
        (
            "M,N,K,model,q_dtype_w\n1,2,32,a,b\n3,4,64,c,d\n",
            "columns that a4w4_blockscale does not use, kept as annotations: 'model', 'q_dtype_w'",
        ),
        ("gfx,M,N,K,us\na,1,2,32,-1\nb,3,4,64,1e-5\n", "ignored columns that are no part of a shape: gfx, us"),
    ],
)  # fmt: skip
def test_cleaned_and_reported(tmp_path: Path, data: str, note: str) -> None:
    found = read(tmp_path, data)
    assert keys(found) == [(1, 2, 32), (3, 4, 64)]
    assert note in found.notes


def test_annotations_are_kept_beside_the_shape_that_they_were_given_with(tmp_path: Path) -> None:
    found = read(tmp_path, 'M,layer,N,K\n1,"up, gate",2,32\n1,again,2,32\n3,\x1b[1mq"kv,4,64\n')
    assert keys(found) == [(1, 2, 32), (3, 4, 64)]
    assert found.annotations == {"layer": ["up, gate", '\\x1b[1mq"kv']}
    assert annotations_csv(found, A4W4) == 'M,N,K,layer\n1,2,32,"up, gate"\n3,4,64,"\\x1b[1mq""kv"\n'


def test_booleans_become_aiters(tmp_path: Path) -> None:
    found = read(tmp_path, "M,N,K,bias\n1,2,3,TRUE\n1,2,3,false\n1,2,3,True\n", "a16w16")
    assert [s.key[3] for s in found.shapes] == ["True", "False"]
    assert "wrote 2 cells as AITER's True or False (first: line 2)" in found.notes


def test_defaults_are_taken_and_said(tmp_path: Path) -> None:
    found = read(tmp_path, "M,N,K\n1,2,3\n", "a8w8")
    assert keys(found) == [(1, 2, 3, "torch.int8")]
    assert found.notes == ["default of a8w8 for columns that the file lacks: q_dtype_w = torch.int8"]


def test_overrides_win_over_file_and_default(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text("M,N,K,dtype\n1,2,3,torch.float16\n1,2,3,nonsense\n")
    found = read_shapes(path, A16W16, overrides={"dtype": "torch.float32", "bias": "true"})
    assert keys(found) == [(1, 2, 3, "True", "torch.float32", "torch.bfloat16", "False", "False")]
    assert "set for every shape, as requested: dtype = torch.float32, bias = True" in found.notes


def test_a_tuned_table_is_a_shape_list(tmp_path: Path) -> None:
    for family in FAMILIES.values():
        defaults = ["256" if c.required else str(c.default) for c in family.columns]
        chip = ["gfx950", "256"][: len(family.chip_columns)]
        row = [*chip, *defaults, *("-1.5" for _ in family.result_columns)]
        data = ",".join(family.aiter_header) + "\n" + ",".join(row) + "\n"
        assert len(read(tmp_path, data, family.name).shapes) == 1


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)
def test_aiters_own_lists_are_read(family: Family) -> None:
    there = [p for name in (family.untuned_csv, family.tuned_csv) if (p := TABLES / name).is_file()]
    if not there:
        pytest.skip(f"AITER's lists of {family.name} are not here (GEMMFLEET_AITER_TABLES names the folder)")
    for path in there:
        assert len(read_shapes(path, family).shapes) > 10


def test_the_fp4_suite() -> None:
    found = read_shapes(ROOT / "examples" / "fp4_suite.csv", A4W4)
    assert len(found.shapes) == 15
    assert found.notes == []
    assert found.shapes[0].key == (16384, 16384, 32768)
    assert found.shapes[-1].key == (6528, 7040, 5632)
