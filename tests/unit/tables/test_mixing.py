"""A tuned table is AITER's or ours: nothing puts rows of both into one, and `db check` finds such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.controller.prepare import prepare
from orchestrator.controller.request import RunRequest
from orchestrator.errors import InputError, TunedDBError
from orchestrator.families import get_family
from orchestrator.tables.merge import merge
from orchestrator.tables.mixing import check_db, table_beside
from orchestrator.tables.provenance import read_records
from tests.kits.fleet import Done, command
from tests.standins.aiter.kernel_lists import ASM, CK
from tests.support.tuned_tables import A4W4, line, write_table

TORCH, TRITON = "torch_lut256_t2", "triton_64x64x64_g8_k1_w4_s3"


def table(path: Path, *kernels: str) -> Path:
    """A table with a row a kernel, of M 1, 2, ..."""
    return write_table(path, A4W4, *(line(A4W4, M=m, kernelName=k) for m, k in enumerate(kernels, 1)))


def row(m: int, kernel: str) -> dict[str, Any]:
    return dict(zip(A4W4.tuned_header, line(A4W4, M=m, kernelName=kernel).split(","), strict=True))


def check(path: Path) -> Done:
    return command("db", "check", path, "--family", A4W4.name)


def test_a_merge_takes_no_rows_of_the_other_kind(tmp_path: Path) -> None:
    path, own = table(tmp_path / "t.csv", ASM), tmp_path / "own.csv"
    before = path.read_bytes()
    with pytest.raises(TunedDBError) as e:
        merge([row(2, TORCH), row(3, TORCH)], path, A4W4)
    assert "is a table of AITER's kernels, and 2 newcomers are of gemmfleet's own kernels" in str(e.value)
    assert f"  gfx950,256,2,64,128: {TORCH}" in e.value.faults
    assert "t_own.csv" in e.value.faults[-1]
    assert path.read_bytes() == before
    assert merge([row(2, TORCH), row(3, "unknown")], own, A4W4).created
    with pytest.raises(TunedDBError, match="a table of gemmfleet's own kernels, and 1 newcomer is of AITER's"):
        merge([row(2, CK)], own, A4W4)
    with pytest.raises(TunedDBError, match="is given rows of AITER's and of gemmfleet's own"):
        merge([row(2, CK), row(3, TRITON)], tmp_path / "new.csv", A4W4)
    assert not (tmp_path / "new.csv").exists()


def test_a_name_of_no_known_pattern_is_whose_its_record_says(tmp_path: Path) -> None:
    own, aiter = tmp_path / "t.csv", tmp_path / "a.csv"
    merge([row(1, "some_kernel")], own, A4W4, facts=lambda new: {"tuner": "torch 2.13"})
    assert [r.document["kind"] for r in read_records(own).values()] == ["own"]
    with pytest.raises(TunedDBError):
        merge([row(2, CK)], own, A4W4)
    merge([row(1, "some_kernel")], aiter, A4W4, facts=lambda new: {"kind": "aiter"})
    assert merge([row(2, CK)], aiter, A4W4).count("added") == 1


def test_check_lists_the_rows_of_a_mixed_table(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", ASM, TORCH)
    line = {"key": "gfx950,256,2,64,128", "us": 10.0, "kernel": TORCH}  # as 0.1.0 made it: not whose it is
    (tmp_path / "t.csv.provenance.jsonl").write_text(json.dumps(line) + "\n")
    found = check(path)
    assert found.code == 1
    assert (
        f"t.csv:3: mixed: {TORCH} is a kernel of gemmfleet's tuner torch, at which AITER stops; fix: delete"
        in found.out
    )
    with pytest.raises(TunedDBError, match="delete these rows"):
        merge([row(9, CK)], path, A4W4)
    ours = table(tmp_path / "aiter" / "configs" / A4W4.tuned_csv, TORCH)
    assert check(ours).code == 1, "AITER reads the tables of this folder"
    assert check(table(tmp_path / "ours.csv", TORCH)).code == 0
    assert table_beside(ours, "torch").parent == Path()


def test_tune_refuses_before_the_start(tmp_path: Path) -> None:
    (shapes := tmp_path / "s.csv").write_text("M,N,K\n1,64,64\n")
    theirs, ours = table(tmp_path / "a.csv", ASM), table(tmp_path / "o.csv", TORCH)
    for db, tuner, says in (
        (theirs, "torch", f"use a table of their own: --db {tmp_path / 'a_torch.csv'}"),
        (ours, "aiter", "gemmfleet's own kernels"),
        (table(tmp_path / "mixed.csv", ASM, TORCH), "torch", "delete these rows"),
        (tmp_path / "no" / "t.csv", "torch", "make it first"),
        (tmp_path, "torch", "is not a file"),
    ):
        with pytest.raises(InputError) as e:
            prepare(RunRequest(shapes=shapes, runs=tmp_path / "runs", family=A4W4.name, tuner=tuner, db=db))
        assert says in str(e.value)
    assert not (tmp_path / "runs").exists()
    for db, tuner in ((ours, "torch"), (tmp_path / "new.csv", "torch"), (theirs, "aiter")):
        check_db(db, get_family(A4W4.name), tuner)
