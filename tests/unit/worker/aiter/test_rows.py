"""Rows out of tuned and profile files and of the shim's records, winners, verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worker.families import FAMILIES
from worker.protocol import Row, SpecShape
from worker.tuners.aiter import tables as tables_module
from worker.tuners.aiter.blocked import CandidateId
from worker.tuners.aiter.journal import JournalStep, step_row
from worker.tuners.aiter.launch import JOURNAL, PROFILE, TUNED
from worker.tuners.aiter.rows import KernelNames, to_row
from worker.tuners.aiter.tables import Tables
from worker.tuners.aiter.tracker import ShapeTracker
from worker.tuners.aiter.verdict import shape_verdict
from worker.tuners.base import Emit

A4W4, FMOE = FAMILIES["a4w4_blockscale"], FAMILIES["fmoe"]
HEADER = "gfx,cu_num,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio\n"
GOOD = "gfx950,256,16,512,1024,3,0,12.5,a4w4_blockscale_x,1.34,95.2,0.01\n"
SHAPES: dict[int, dict[str, int | str]] = {1: {"M": 16, "N": 512, "K": 1024}, 2: {"M": 32, "N": 512, "K": 1024}}


def row(us: float, err: float = 0.0, name: str = "k", status: str = "ok") -> Row:
    return Row(us=us, errRatio=err, kernelName=name, libtype="ck", status=status)


@pytest.mark.parametrize(
    ("us", "err", "status"),
    [
        ("-1", "1.0", "unsupported"), ("inf", "1.0", "error"), ("Null", "Null", "unsupported"),
        ("nan", "", "unsupported"), ("0", "0.0", "error"), ("3.5", "0.37", "wrong"), ("3.5", "0.05", "ok"),
    ],
)  # fmt: skip
def test_what_aiter_writes_for_a_candidate(us: str, err: str, status: str) -> None:
    cells = dict(zip(HEADER.strip().split(","), GOOD.strip().split(","), strict=True))
    made = to_row(A4W4, {**cells, "us": us, "errRatio": err, "kernelName": "Null"}, 0.05)
    assert (made["status"], made["us"] > 0, made["kernelName"]) == (status, status in ("ok", "wrong"), "")


def test_half_a_file_counts_for_its_whole_lines_and_what_was_read_stays(tmp_path: Path) -> None:
    tuned, profile = tmp_path / "tuned.csv", tmp_path / "profile.csv"
    tables = Tables(A4W4, ("M", "N", "K"), SHAPES, 0.05)
    assert not tables.read(tuned, profile)
    tuned.write_text(HEADER + GOOD + GOOD.replace(",16,", ",32,")[:40])
    profile.write_text(HEADER + GOOD + GOOD.replace(",3,0,12.5", ",4,0,-1") + GOOD.replace(",3,0,12.5", ",4,1,inf"))
    assert tables.read(tuned, profile)
    tuned.write_text(HEADER[:10])  # cut off by a kill in the middle of the next write
    profile.write_text(HEADER + GOOD.replace(",16,", ",32,") * 2)
    tables.read(tuned, profile)
    assert (set(tables.tuned), tables.devices) == ({1}, {("gfx950", "256")})
    assert [r["us"] for r in tables.candidates(1)] == [12.5, -1, -1]
    assert len(tables.candidates(2)) == 1  # the same candidate twice is one


@pytest.mark.parametrize(("whole_after_s", "verdicts"), [(60.0, [("shape_tuned", 1)]), (0.0, [("shape_failed", 1)])])
def test_a_shape_is_not_judged_by_files_that_aiter_writes_anew_just_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_after_s: float, verdicts: list[tuple[str, int]]
) -> None:
    """Two batches are over, and the rows of both are being written when we look for the first time."""
    monkeypatch.setattr(tables_module, "WHOLE_AFTER_S", whole_after_s)
    findings = SimpleNamespace(k256_sound=True)
    job: Any = SimpleNamespace(
        family=A4W4,
        columns=("M", "N", "K"),
        err_ratio=0.05,
        batch=1,
        names=KernelNames(),
        image=SimpleNamespace(findings=findings),
    )
    choice: Any = SimpleNamespace(only=())
    told: list[dict[str, Any]] = []
    tracker = ShapeTracker(job, [SpecShape(*shape) for shape in SHAPES.items()], tmp_path, choice, Emit(told.append))
    for event, m in (("begin", "16"), ("end", "16"), ("begin", "32")):
        record = {"event": event, "key": ["gfx950", "256", m, "512", "1024"], "candidate": ["3", "0", ""], "pid": 7}
        with (tmp_path / JOURNAL).open("a") as f:
            print(json.dumps({**record, "us": "12.5", "err": "0.0"}), file=f)
    for name in (TUNED, PROFILE):
        (tmp_path / name).touch()
    tracker.read()
    for name in (TUNED, PROFILE):
        (tmp_path / name).write_text(HEADER + GOOD)
    tracker.read()
    assert [(m["type"], m["shape"]) for m in told if m["type"] in ("shape_tuned", "shape_failed")] == verdicts


@pytest.mark.parametrize("tuned", [None, row(0), row(-1), row(5, 0.3), row(5, name="")])
def test_a_winner_is_made_of_the_profile_where_aiters_is_not(tuned: Row | None) -> None:
    verdict = shape_verdict(A4W4, tuned, [row(10), row(8), row(7, 0.3, status="wrong"), row(3, name="")], 0.05)
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

    right, refused = stage(1, 5.0, "ok"), stage(2, -1.0, "unsupported")
    for candidates, reason, words in (
        ([row(5)], "wrong_result", ""),  # AITER named none
        ([right, stage(2, 6.0, "wrong", 0.4), refused], "wrong_result", "1 of 2 candidates ran, none is right"),
        ([right, refused], "no_candidate", "none of 1 candidate ran: 1 cannot take the shape"),
        ([right, stage(2, 5.0, "ok")], "no_candidate", "no two of one block_m"),
    ):
        verdict = shape_verdict(FMOE, None, candidates, 0.1)
        assert (verdict.winner, verdict.reason) == (None, reason)
        assert words in verdict.detail


def test_a_kernels_name_is_that_of_its_backend() -> None:
    """ck, cktile and asm each count from 0."""
    names = KernelNames()
    for libtype, number, name in (("ck", 0, "ck_zero"), ("cktile", 0, "cktile_zero"), ("asm", 7, "_ZN_seven")):
        names.learn(Row(us=1.0, kernelName=name, libtype=libtype, kernelId=number))
    for ident, libtype, name in (
        (("0", "0", "", "ck", "False"), "ck", "ck_zero"), (("0", "0", "", "cktile", "False"), "cktile", "cktile_zero"),
        (("0", "0", "", "opus", "False"), "opus", ""), (("7", "0", ""), "asm", "_ZN_seven"),
        (("0", "0", ""), "", ""),  # a date without libtype: two backends have a number 0
    ):  # fmt: skip
        step = JournalStep("end", 0, CandidateId(("gfx950", "256", "16", "512", "512"), ident), 1, 2.0, 0.05)
        made = step_row(FAMILIES["a8w8_blockscale"], step, 0.1, names)
        assert (made["libtype"], made["kernelName"]) == (libtype, name)
