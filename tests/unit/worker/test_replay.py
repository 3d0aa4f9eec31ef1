"""The replay tuner by itself: recordings and made-up rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import InputError
from orchestrator.families import check_tuner_options, get_tuner
from worker.agent.attempt import MessageCheck
from worker.protocol import Spec, SpecShape, TableKernel
from worker.tuners.base import Emit, Place
from worker.tuners.replay import ReplayTuner, synthetic

AITER_CSV = """gfx,cu_num,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio
gfx950,256,1,512,4096,21,0,5.4049,_ZN5aiter41f4gemm_32x128E,0.78,194.57,0.0
gfx950,256,1,512,4096,3,1,4.9,a4w4_blockscale_3,0.86,214.0,0.0
gfx950,256,1,512,4096,4,0,,,0.0,0.0,1.0
gfx950,256,2,512,4096,5,0,3.0,a4w4_blockscale_5,2.8,390.0,0.4
"""


def played(options: dict[str, Any], *keys: dict[str, int | str], **spec: Any) -> list[dict[str, Any]]:
    """Messages of the tuner on shapes with these keys, checked as the agent checks them."""
    tuner = ReplayTuner()
    tuner.configure(options, Place())
    tuner.open()
    shapes = tuple(SpecShape(i, k) for i, k in enumerate(keys, 1))
    said: list[dict[str, Any]] = []
    asked = Spec("g-1", "r", 1, shapes=shapes, **spec)
    assert set(tuner.tune(asked, Emit(said.append))) == {"measure"}
    course = MessageCheck(asked)
    for message in said:
        if message["type"] != "alive":
            course.take(message, 1.0)
    return said


def test_rows_of_a_recording_come_back(tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    path.write_text(AITER_CSV)
    options = {"recording": str(path)}
    # a key column that the recording does not have is no reason to miss
    keys: list[dict[str, int | str]] = [{"M": m, "N": 512, "K": 4096, "bias": "False"} for m in (1, 2, 3)]
    said = played(options, *keys)
    assert [(m["type"], m.get("shape")) for m in said] == [
        *[("shape_started", 1), ("row", 1), ("row", 1), ("row", 1), ("shape_tuned", 1)],
        *[("shape_started", 2), ("row", 2), ("shape_failed", 2)],
        *[("shape_started", 3), ("shape_failed", 3)],
    ]
    assert said[4]["row"] == {
        "kernelId": 3, "splitK": 1, "us": 4.9, "kernelName": "a4w4_blockscale_3", "errRatio": 0.0, "status": "ok"
    }  # fmt: skip
    failed_row = said[3]["row"]
    assert (failed_row["us"], failed_row["status"]) == (-1.0, "error")
    assert said[6]["row"]["status"] == "wrong"
    assert said[7]["reason"] == "wrong_result"
    assert (said[9]["reason"], said[9]["detail"]) == ("unsupported", "the recording has no row of this shape")
    # the limit is the spec's
    assert played(options, keys[1], err_ratio=0.5)[-1]["type"] == "shape_tuned"


def test_only_the_kernels_of_a_table_are_measured_by_name_and_split(tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    path.write_text(AITER_CSV)
    key: dict[str, int | str] = {"M": 1, "N": 512, "K": 4096}

    def measured(*kernels: str) -> list[tuple[str, str]]:
        said = played({"recording": str(path)}, key, only={"1": [TableKernel(*kernels)._asdict()]})
        return [(m["type"], m.get("row", {}).get("kernelName", m.get("reason"))) for m in said[1:]]

    other_number, other_split = ["ck", "99", "a4w4_blockscale_3", "1"], ["ck", "3", "a4w4_blockscale_3", "0"]
    assert measured(*other_number) == [("row", "a4w4_blockscale_3"), ("shape_tuned", "a4w4_blockscale_3")]
    assert measured(*other_split) == [("shape_failed", "no_candidate")]


def test_made_up_rows_hang_on_the_key_alone_and_its_options_name_the_device() -> None:
    key: dict[str, int | str] = {"M": 16, "N": 4096, "K": 4096}
    one = synthetic(6)(key)
    assert one == synthetic(6)(dict(reversed(key.items()))) != synthetic(6)({**key, "M": 17})
    assert [c["status"] for c in one] == ["ok"] * 5 + ["unsupported"]
    assert all(c["us"] >= 2.0 and 0 <= c["errRatio"] <= 0.01 for c in one[:-1])
    assert [c["status"] for c in synthetic(1)(key)] == ["ok"]
    winner = played({"candidates": 6, "seconds_per_shape": 0}, key)[-1]["row"]
    assert winner["us"] == min(c["us"] for c in one[:-1])
    tuner = ReplayTuner()
    tuner.configure({"replay": {"gfx": "gfx942", "cu_num": 304}}, Place())
    device = tuner.open()
    assert (device["gfx"], device["cu_num"], device["device"]) == ("gfx942", 304, "replay of synthetic")
    with pytest.raises(InputError, match="bad options for the tuner replay: unknown option 'faults'"):
        check_tuner_options(get_tuner("replay"), {"faults": [{"kind": "kill_worker"}]})
