"""The replay tuner by itself: recordings and made-up rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import InputError
from orchestrator.families import check_tuner_options, get_tuner
from worker.agent.attempt import MessageCheck
from worker.protocol import Spec, SpecShape
from worker.tuners.base import Emit, Place
from worker.tuners.replay import ReplayTuner, synthetic

AITER_CSV = """gfx,cu_num,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio
gfx950,256,1,512,4096,21,0,5.4049,_ZN5aiter41f4gemm_32x128E,0.78,194.57,0.0
gfx950,256,1,512,4096,3,1,4.9,a4w4_blockscale_3,0.86,214.0,0.0
gfx950,256,1,512,4096,4,0,,,0.0,0.0,1.0
gfx950,256,2,512,4096,5,0,3.0,a4w4_blockscale_5,2.8,390.0,0.4
"""


def played(options: dict[str, Any], *ms: int, **spec: Any) -> list[tuple[str, int, Any]]:
    """Messages of the tuner on shapes with these M, checked as the agent checks them."""
    tuner = ReplayTuner()
    tuner.configure(options, Place())
    tuner.open()
    # a key column that the recording does not have is no reason to miss
    shapes = tuple(SpecShape(m, {"M": m, "N": 512, "K": 4096, "bias": "False"}) for m in ms)
    said: list[dict[str, Any]] = []
    asked = Spec("g-1", "r", 1, shapes=shapes, **spec)
    tuner.tune(asked, Emit(said.append))
    said = [m for m in said if m["type"] != "alive"]
    course = MessageCheck(asked)
    for message in said:
        course.take(message, 1.0)
    return [(m["type"], m["shape"], m["row"].get("us") if "row" in m else m.get("reason")) for m in said]


def test_rows_of_a_recording_come_back(tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    path.write_text(AITER_CSV)
    options = {"recording": str(path)}
    assert played(options, 1, 2, 3) == [
        ("shape_started", 1, None), ("row", 1, 5.4049), ("row", 1, 4.9), ("row", 1, -1.0), ("shape_tuned", 1, 4.9),
        ("shape_started", 2, None), ("row", 2, 3.0), ("shape_failed", 2, "wrong_result"),
        ("shape_started", 3, None), ("shape_failed", 3, "unsupported"),
    ]  # fmt: skip
    assert played(options, 2, err_ratio=0.5)[-1] == ("shape_tuned", 2, 3.0), "the limit is the spec's"
    kernel = {"libtype": "ck", "number": "99", "name": "a4w4_blockscale_3", "split": "1"}
    assert played(options, 1, only={"1": [kernel]})[1:] == [("row", 1, 4.9), ("shape_tuned", 1, 4.9)]
    other_split = {"1": [{**kernel, "split": "0"}]}
    assert played(options, 1, only=other_split)[1:] == [("shape_failed", 1, "no_candidate")]


def test_made_up_rows_hang_on_the_key_alone() -> None:
    key: dict[str, int | str] = {"M": 16, "N": 4096, "K": 4096}
    one = synthetic(6)(key)
    assert one == synthetic(6)(dict(reversed(key.items()))) != synthetic(6)({**key, "M": 17})
    assert [c["status"] for c in one] == ["ok"] * 5 + ["unsupported"]
    with pytest.raises(InputError, match="bad options for the tuner replay: unknown option 'faults'"):
        check_tuner_options(get_tuner("replay"), {"faults": [{"kind": "kill_worker"}]})
