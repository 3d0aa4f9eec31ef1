"""Rows out of tuned and profile files, winners, verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.families import FAMILIES
from worker.protocol import Row
from worker.tuners.aiter.harvest import Harvest, best_row, read_cells, shape_verdict, to_row

A4W4, FMOE, A16 = FAMILIES["a4w4_blockscale"], FAMILIES["fmoe"], FAMILIES["a16w16"]
HEADER = "gfx,cu_num,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio\n"
GOOD = "gfx950,256,16,512,1024,3,0,12.5,a4w4_blockscale_x,1.34,95.2,0.01\n"
SHAPES: dict[int, dict[str, int | str]] = {1: {"M": 16, "N": 512, "K": 1024}, 2: {"M": 32, "N": 512, "K": 1024}}


def cells(line: str) -> dict[str, str]:
    return dict(zip(HEADER.strip().split(","), line.strip().split(","), strict=True))


def row(us: float, err: float = 0.0, name: str = "k", libtype: str = "ck", status: str = "ok") -> Row:
    return Row(us=us, errRatio=err, kernelName=name, libtype=libtype, status=status)


def test_a_row() -> None:
    assert to_row(A4W4, cells(GOOD), 0.05) == {
        "us": 12.5, "kernelName": "a4w4_blockscale_x", "libtype": "ck", "kernelId": 3, "splitK": 0, "tflops": 1.34,
        "bw": 95.2, "errRatio": 0.01, "status": "ok", "detail": "",
    }  # fmt: skip


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


def test_columns_by_name_whatever_their_order_and_spaces(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("B, M,N,K,kernelId,splitK,us,kernelName,errRatio,tflops,bw\n16, 1, 2,3,4,0,5.5, name ,0.01,7,8\n")
    (read,) = read_cells(path)
    made = to_row(FAMILIES["batched_bf16"], read, 0.05)
    assert (read["M"], made["us"], made["errRatio"], made["tflops"], made["kernelName"]) == ("1", 5.5, 0.01, 7, "name")


def test_fmoe_keeps_its_stages() -> None:
    raw = {"block_m": "64", "ksplit": "0", "us1": "3.1", "kernelName1": "moe_ck2stages_a", "err1": "0.3%", "us2": "2",
           "kernelName2": "moe_ck2stages_b", "err2": "4.0%", "us": "5.1", "run_1stage": "0", "flat": "0"}  # fmt: skip
    made = to_row(FMOE, raw, 0.1)
    assert (made["us"], made["errRatio"], made["block_m"], made["kernelName2"]) == (5.1, 0.04, 64, "moe_ck2stages_b")
    assert (made["err1"], made["status"], made["libtype"]) == ("0.3%", "ok", "ck")


def test_half_a_file_counts_for_its_whole_lines(tmp_path: Path) -> None:
    tuned, profile = tmp_path / "tuned.csv", tmp_path / "profile.csv"
    harvest = Harvest(A4W4, ("M", "N", "K"), SHAPES, 0.05)
    assert not harvest.read(tuned, profile)
    tuned.write_text(HEADER + GOOD + GOOD.replace(",16,", ",32,")[:40])
    assert harvest.read(tuned, profile)
    assert harvest.tuned(1) is not None
    assert harvest.tuned(2) is None
    assert harvest.devices == {("gfx950", "256")}
    tuned.write_text(HEADER[:10])  # cut off by a kill in the middle of the next write
    harvest.read(tuned, profile)
    assert harvest.tuned(1) is not None


def test_a_profile_that_is_overwritten_loses_nothing(tmp_path: Path) -> None:
    tuned, profile = tmp_path / "tuned.csv", tmp_path / "profile.csv"
    harvest = Harvest(A4W4, ("M", "N", "K"), SHAPES, 0.05)
    first = GOOD + GOOD.replace(",3,0,12.5", ",4,0,-1") + GOOD.replace(",3,0,12.5", ",4,1,inf")
    profile.write_text(HEADER + first)
    harvest.read(tuned, profile)
    profile.write_text(HEADER + GOOD.replace(",16,", ",32,") * 2)
    harvest.read(tuned, profile)
    assert [r["us"] for r in harvest.candidates(1)] == [12.5, -1, -1]
    assert len(harvest.candidates(2)) == 1  # the same candidate twice is one


def test_the_best_is_the_fastest_right_one() -> None:
    chosen = best_row([row(10), row(9.96, libtype="asm"), row(9, 0.2, status="wrong"), row(-1, status="error")], 0.05)
    assert chosen is not None
    assert chosen["us"] == 9.96
    assert best_row([row(0), row(3, name="")], 0.05) is None


def test_aiters_own_winner_stands_where_it_is_sound() -> None:
    tuned = row(11)
    assert shape_verdict(A4W4, tuned, [row(10), row(11)], 0.05).winner is tuned


@pytest.mark.parametrize("tuned", [None, row(0), row(-1), row(5, 0.3), row(5, name="")])
def test_a_winner_is_made_of_the_profile_where_aiters_is_not(tuned: Row | None) -> None:
    verdict = shape_verdict(A4W4, tuned, [row(10), row(8), row(7, 0.3, status="wrong")], 0.05)
    assert verdict.winner is not None
    assert verdict.winner["us"] == 8
    assert "chosen among AITER's measured candidates" in verdict.winner["detail"]


def test_why_there_is_none() -> None:
    wrong = shape_verdict(A4W4, None, [row(5, 0.3, status="wrong"), row(6, 0.2, status="wrong"), row(-1)], 0.05)
    assert (wrong.reason, "least error is 0.2, the limit 0.05" in wrong.detail) == ("wrong_result", True)
    none = shape_verdict(A4W4, None, [row(-1, status="unsupported"), row(-1, status="error")], 0.05)
    assert (none.reason, "1 cannot take the shape, 1 crashed" in none.detail) == ("no_candidate", True)
    assert shape_verdict(A4W4, None, [], 0.05).reason == "no_candidate"
    chip = shape_verdict(A4W4, None, [], 0.05, chip="tuning is not supported in this chip gfx942")
    assert chip.reason == "unsupported"


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
