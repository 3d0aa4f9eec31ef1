"""Rows out of tuned and profile files and of the shim's records, the shape of a key, winners, verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.families import FAMILIES
from worker.protocol import Row
from worker.tuners.aiter.blocklist import CandidateId
from worker.tuners.aiter.rows import (
    JournalStep,
    KernelNames,
    ShapeKeys,
    Tables,
    best_row,
    shape_verdict,
    step_row,
    to_row,
)

A4W4, FMOE, A16 = FAMILIES["a4w4_blockscale"], FAMILIES["fmoe"], FAMILIES["a16w16"]
HEADER = "gfx,cu_num,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio\n"
GOOD = "gfx950,256,16,512,1024,3,0,12.5,a4w4_blockscale_x,1.34,95.2,0.01\n"
SHAPES: dict[int, dict[str, int | str]] = {1: {"M": 16, "N": 512, "K": 1024}, 2: {"M": 32, "N": 512, "K": 1024}}


def cells(line: str) -> dict[str, str]:
    return dict(zip(HEADER.strip().split(","), line.strip().split(","), strict=True))


def row(us: float, err: float = 0.0, name: str = "k", libtype: str = "ck", status: str = "ok") -> Row:
    return Row(us=us, errRatio=err, kernelName=name, libtype=libtype, status=status)


@pytest.mark.parametrize(
    ("us", "err", "status"),
    [
        ("-1", "1.0", "unsupported"),
        ("inf", "1.0", "error"),
        ("Null", "Null", "unsupported"),
        ("nan", "", "unsupported"),
        ("0", "0.0", "error"),
        ("3.5", "0.37", "wrong"),
        ("3.5", "0.05", "ok"),
    ],
)
def test_what_aiter_writes_for_a_failed_candidate(us: str, err: str, status: str) -> None:
    made = to_row(A4W4, {**cells(GOOD), "us": us, "errRatio": err, "kernelName": "Null"}, 0.05)
    assert made["status"] == status
    assert (made["us"] > 0) == (status in ("ok", "wrong"))
    assert made["kernelName"] == ""


def test_half_a_file_counts_for_its_whole_lines(tmp_path: Path) -> None:
    tuned, profile = tmp_path / "tuned.csv", tmp_path / "profile.csv"
    tables = Tables(A4W4, ("M", "N", "K"), SHAPES, 0.05)
    assert not tables.read(tuned, profile)
    tuned.write_text(HEADER + GOOD + GOOD.replace(",16,", ",32,")[:40])
    assert tables.read(tuned, profile)
    assert 1 in tables.tuned
    assert 2 not in tables.tuned
    assert tables.devices == {("gfx950", "256")}
    tuned.write_text(HEADER[:10])  # cut off by a kill in the middle of the next write
    tables.read(tuned, profile)
    assert 1 in tables.tuned


def test_a_profile_that_is_overwritten_loses_nothing(tmp_path: Path) -> None:
    tuned, profile = tmp_path / "tuned.csv", tmp_path / "profile.csv"
    tables = Tables(A4W4, ("M", "N", "K"), SHAPES, 0.05)
    first = GOOD + GOOD.replace(",3,0,12.5", ",4,0,-1") + GOOD.replace(",3,0,12.5", ",4,1,inf")
    profile.write_text(HEADER + first)
    tables.read(tuned, profile)
    profile.write_text(HEADER + GOOD.replace(",16,", ",32,") * 2)
    tables.read(tuned, profile)
    assert [r["us"] for r in tables.candidates(1)] == [12.5, -1, -1]
    assert len(tables.candidates(2)) == 1  # the same candidate twice is one


def test_the_best_is_the_fastest_right_one() -> None:
    chosen = best_row([row(10), row(9.96, libtype="asm"), row(9, 0.2, status="wrong"), row(-1, status="error")], 0.05)
    assert chosen is not None
    assert chosen["us"] == 9.96
    assert best_row([row(0), row(3, name="")], 0.05) is None


@pytest.mark.parametrize("tuned", [None, row(0), row(-1), row(5, 0.3), row(5, name="")])
def test_a_winner_is_made_of_the_profile_where_aiters_is_not(tuned: Row | None) -> None:
    verdict = shape_verdict(A4W4, tuned, [row(10), row(8), row(7, 0.3, status="wrong")], 0.05)
    assert verdict.winner is not None
    assert verdict.winner["us"] == 8
    assert "chosen among AITER's measured candidates" in verdict.winner["detail"]


def test_fmoe_has_no_winner_where_a_stage_has_no_right_kernel() -> None:
    def stage(number: int, us: float, status: str, err: float = 0.0) -> Row:
        made = Row(us=-1.0, kernelName="k", status=status, errRatio=err)
        made["kernelName1" if number == 1 else "kernelName2"] = "k"
        if us > 0:
            made["us1" if number == 1 else "us2"] = us
        return made

    assert shape_verdict(FMOE, None, [row(5)], 0.1).winner is None, "AITER named none"
    right, refused = stage(1, 5.0, "ok"), stage(2, -1.0, "unsupported")
    wrong = shape_verdict(FMOE, None, [right, stage(2, 6.0, "wrong", 0.4), refused], 0.1)
    assert (wrong.reason, wrong.detail[:69]) == (
        "wrong_result", "1 of 2 candidates ran, none is right: the least error is 0.4, the lim"
    )  # fmt: skip
    none = shape_verdict(FMOE, None, [right, refused], 0.1)
    assert (none.reason, none.detail.partition(",")[0]) == (
        "no_candidate",
        "none of 1 candidate ran: 1 cannot take the shape",
    )
    apart = shape_verdict(FMOE, None, [right, stage(2, 5.0, "ok")], 0.1)
    assert (apart.reason, "no two of one block_m" in apart.detail) == ("no_candidate", True)


# --- keys and records -----------------------------------------------------------------------------------------------

KEYS = ShapeKeys(("M", "N", "K"), {7: {"M": 64, "N": 576, "K": 7168}, 8: {"M": 128, "N": 576, "K": 7168}})


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("gfx950 256 64 576 7168", 7), ("256 64 576 7168", 7), ("64 576 7168", 7), ("64.0 576.0 7168.0", 7),
        ("64 576 7168 False torch.bfloat16", 7), ("256 65 576 7168", None), ("256 64", None), ("", None),
    ],
)  # fmt: skip
def test_the_shape_of_a_record(key: str, shape: int | None) -> None:
    assert KEYS.of_values(tuple(key.split())) == shape


def test_a_key_without_cu_num_is_no_other_shape_s() -> None:
    """Behind gfx alone: what follows M may be the M of another shape."""
    keys = ShapeKeys(("B", "M", "N", "K"), {1: dict(zip("BMNK", (16, 2, 1024, 4096), strict=True)),
                                            2: dict(zip("BMNK", (2, 1024, 4096, 128), strict=True))})  # fmt: skip
    assert keys.of_values(("gfx950", "16", "2", "1024", "4096")) == 1
    assert keys.of_values(("gfx950", "2", "1024", "4096", "128")) == 2


def test_a_kernels_name_is_that_of_its_backend() -> None:
    """ck, cktile and asm each count from 0."""
    names = KernelNames()
    for libtype, number, name in (("ck", 0, "ck_zero"), ("cktile", 0, "cktile_zero"), ("asm", 7, "_ZN_seven")):
        names.learn(Row(us=1.0, kernelName=name, libtype=libtype, kernelId=number))
    key = ("gfx950", "256", "16", "512", "512")

    def named(family: str, *ident: str) -> tuple[str, str]:
        row = step_row(FAMILIES[family], JournalStep("end", 0, CandidateId(key, ident), 1, 2.0, 0.0), 0.05, names)
        return row["libtype"], row["kernelName"]

    for libtype, name in (("ck", "ck_zero"), ("cktile", "cktile_zero"), ("opus", "")):
        assert named("a8w8_blockscale", "0", "0", "", libtype, "False") == (libtype, name)
    assert named("a8w8_blockscale", "0", "0", "") == ("", ""), "a date without libtype: two backends have a number 0"
    assert named("a8w8_blockscale", "7", "0", "") == ("asm", "_ZN_seven")


def test_a_stage_of_fmoe_is_a_candidate_and_no_time_of_its_shape() -> None:
    def made(*ident: str, us: float = 2.0) -> tuple[Row, str]:
        candidate = CandidateId(("gfx950", "256", "16"), ident)
        row = step_row(FAMILIES["fmoe"], JournalStep("end", 0, candidate, 1, us, 0.05), 0.1, KernelNames())
        return row, candidate.describe()

    first, named = made("stage1", "_ZN_one", "32")
    assert named == "block_m=32 stage1 _ZN_one"
    assert (first["us"], first["us1"], first["kernelName1"], first["block_m"]) == (-1.0, 2.0, "_ZN_one", 32)
    assert "kernelId" not in first
    second, _ = made("stage2", "moe_ck2stages_two", "64")
    assert (second["us"], second["us2"], second["kernelName1"], second["kernelName2"]) == (
        -1.0, 2.0, "", "moe_ck2stages_two"
    )  # fmt: skip
    both, named = made("asm_1stage", "_ZN_both", "32", "0")
    assert (both["us"], both["us1"], both["run_1stage"], both["status"]) == (2.0, 2.0, 1, "ok")
    assert named == "block_m=32 flat=0 asm_1stage _ZN_both"
    none, _ = made("stage1", "_ZN_one", "32", us=-1.0)
    assert ("us1" in none, none["status"]) == (False, "unsupported")
