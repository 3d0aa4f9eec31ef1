"""A tuned table is AITER's or ours: nothing puts rows of both into one, and `db check` finds such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.controller.prepare import RunRequest, prepare
from orchestrator.errors import InputError, TunedDBError
from orchestrator.families import get_family
from orchestrator.tables.kinds import kind_of, other_name, read_records
from orchestrator.tables.merge import check_db, merge, not_for_aiter
from tests.support.aiterbuild import ASM, CK
from tests.unit.tables.test_db_export import table

A4W4 = get_family("a4w4_blockscale")
TORCH, TRITON = "torch_lut256_t2", "triton_64x64x64_g8_k1_w4_s3"


def row(m: int, kernel: str, us: float = 1.0, **more: Any) -> dict[str, Any]:
    return {
        "gfx": "gfx950", "cu_num": 256, "M": m, "N": 64, "K": 64, "us": us, "kernelName": kernel, "errRatio": 0.0,
    } | more  # fmt: skip


def db(*words: object) -> Any:
    return CliRunner().invoke(app, ["db", *map(str, words)])


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        ({"kernelName": ASM}, "aiter"),
        ({"kernelName": CK, "libtype": "ck"}, "aiter"),
        ({"kernelName": "gluon", "libtype": "triton"}, "aiter"),
        ({"kernelName": TRITON, "libtype": "triton"}, "own"),
        ({"kernelName": TORCH, "libtype": "torch"}, "own"),
        ({"kernelName": "native", "libtype": "torch"}, "aiter"),
        ({"kernelName": "k1", "libtype": "replay"}, "own"),
        ({"kernelName1": "moe_ck2stages_gemm1_x", "kernelName2": "Null"}, "aiter"),
        ({"kernelName": "something"}, ""),
        ({}, ""),
    ],
)
def test_whose_kernel(cells: dict[str, str], kind: str) -> None:
    assert kind_of(cells) == kind


def test_a_merge_takes_no_rows_of_the_other_kind(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", {"M": 1})
    before = path.read_bytes()
    with pytest.raises(TunedDBError) as e:
        merge([row(2, TORCH), row(3, TORCH)], path, A4W4)
    assert "is a table of AITER's kernels, and 2 newcomers are of gemmfleet's own kernels" in str(e.value)
    assert f"  gfx950,256,2,64,64: {TORCH}" in e.value.faults
    assert "t_own.csv" in e.value.faults[-1]
    assert path.read_bytes() == before
    own = tmp_path / "own.csv"
    assert merge([row(2, TORCH), row(3, "unknown")], own, A4W4).created
    with pytest.raises(TunedDBError, match="a table of gemmfleet's own kernels, and 1 newcomer is of AITER's"):
        merge([row(2, CK)], own, A4W4)
    with pytest.raises(TunedDBError, match="is given rows of AITER's and of gemmfleet's own"):
        merge([row(2, CK), row(3, TRITON)], tmp_path / "new.csv", A4W4)
    assert not (tmp_path / "new.csv").exists()
    done = db("merge", own, "--into", path)
    assert isinstance(done.exception, InputError)


def test_a_name_of_no_known_pattern_is_whose_its_record_says(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    merge([row(1, "some_kernel")], path, A4W4, facts=lambda new: {"tuner": "torch 2.13"})
    (record,) = read_records(path).values()
    assert record.document()["kind"] == "own"
    with pytest.raises(TunedDBError):
        merge([row(2, CK)], path, A4W4)
    aiter = tmp_path / "a.csv"
    merge([row(1, "some_kernel")], aiter, A4W4, facts=lambda new: {"kind": "aiter"})
    assert merge([row(2, CK)], aiter, A4W4).count("added") == 1


def mixed(tmp_path: Path) -> Path:
    """As 0.1.0 made it: records of all rows, none of which says whose it is."""
    path = table(
        tmp_path / "t.csv", {"M": 1}, {"M": 2, "kernelName": TORCH}, {"M": 3, "kernelName": "k"},
        {"M": 4, "kernelName": TRITON},
    )  # fmt: skip
    lines = [
        {
            "key": f"gfx950,256,{m},64,64", "us": 5.0, "kernel": k, "split": "0/0/0", "image": "", "tuner": "",
            "run": f"r{m}",
        }
        for m, k in ((1, ASM), (2, TORCH), (3, "k"), (4, TRITON))
    ]  # fmt: skip
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    (tmp_path / "t.csv.provenance.jsonl").write_text(text)
    return path


def test_check_lists_the_rows_of_a_mixed_table(tmp_path: Path) -> None:
    path = mixed(tmp_path)
    found = db("check", path, "--family", A4W4.name)
    assert found.exit_code == 1
    assert f"t.csv:3: {TORCH} is a kernel of gemmfleet's tuner torch, at which AITER stops" in found.stdout
    with pytest.raises(TunedDBError, match="delete these rows"):
        merge([row(9, CK)], path, A4W4)


def test_a_table_of_ours_has_no_place_where_aiter_looks(tmp_path: Path) -> None:
    folder = tmp_path / "aiter" / "configs"
    path = table(folder / A4W4.tuned_csv, {"M": 1, "kernelName": TORCH})
    assert db("check", path).exit_code == 1
    assert (
        db("check", table(tmp_path / "ours.csv", {"M": 1, "kernelName": TORCH}), "--family", A4W4.name).exit_code == 0
    )
    assert other_name(path, "torch").parent == Path()
    assert other_name(tmp_path / "x.csv", "torch") == tmp_path / "x_torch.csv"


def test_tune_refuses_before_the_start(tmp_path: Path) -> None:
    shapes = tmp_path / "s.csv"
    shapes.write_text("M,N,K\n1,64,64\n")
    theirs, ours = table(tmp_path / "a.csv", {"M": 1}), table(tmp_path / "o.csv", {"M": 1, "kernelName": TORCH})

    def asked(db: Path, tuner: str) -> RunRequest:
        return RunRequest(shapes=shapes, runs=tmp_path / "runs", family=A4W4.name, tuner=tuner, db=db)

    with pytest.raises(TunedDBError) as e:
        prepare(asked(theirs, "torch"))
    assert e.value.exit_code == 2
    assert "is a table of AITER's kernels (line 2:" in e.value.faults[0]
    assert e.value.faults[1] == f"use a table of their own: --db {tmp_path / 'a_torch.csv'}"
    with pytest.raises(TunedDBError, match="gemmfleet's own kernels"):
        prepare(asked(ours, "aiter"))
    with pytest.raises(TunedDBError, match="delete these rows"):
        prepare(asked(mixed(tmp_path), "torch"))
    with pytest.raises(InputError, match=r"there is no folder .*; make it first"):
        prepare(asked(tmp_path / "no" / "t.csv", "torch"))
    with pytest.raises(InputError, match="is not a file"):
        prepare(asked(tmp_path, "torch"))
    assert not (tmp_path / "runs").exists()
    check_db(ours, A4W4, "torch")
    check_db(tmp_path / "new.csv", A4W4, "torch")
    check_db(theirs, A4W4, "aiter")


def test_a_fleet_of_amd_gpus_and_a_tuner_that_aiter_loads_nothing_of() -> None:
    nodes = [("a", "gfx950"), ("b", "sm_90")]
    (warning,) = not_for_aiter("torch", nodes)
    assert warning.startswith("warning: a: AMD GPUs, and the tuner torch measures kernels of gemmfleet's own")
    assert "--tuner aiter" in warning
    assert not not_for_aiter("aiter", nodes)
    assert not not_for_aiter("torch", nodes[1:])
