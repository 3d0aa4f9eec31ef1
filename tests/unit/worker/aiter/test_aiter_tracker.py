"""Shapes of one process by the two sources of progress: the shim's records and the files that the script writes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from worker.families import FAMILIES
from worker.protocol import SpecShape
from worker.tuners.aiter.blocklist import LeftOut
from worker.tuners.aiter.findings import TunerScript
from worker.tuners.aiter.rows import KernelNames
from worker.tuners.aiter.session import AiterImage, Job, Limits
from worker.tuners.aiter.spec import Options
from worker.tuners.aiter.tracker import ShapeTracker
from worker.tuners.base import Emit

SIZES = (16, 32, 64)


class Rig:
    """A tracker of three shapes, one a batch, and what it reported (`said`)."""

    def __init__(self, folder: Path) -> None:
        image = cast(AiterImage, SimpleNamespace(findings=SimpleNamespace(k256_sound=True)))
        script = TunerScript(Path("/t/tune.py"), {}, ("M", "N", "K"))
        job = Job(image, folder, FAMILIES["a8w8"], script, Options(), Limits(0.05), 1, KernelNames())
        shapes = [SpecShape(i, {"M": m, "N": 512, "K": 512}) for i, m in enumerate(SIZES)]
        self.said: list[dict[str, Any]] = []
        self.folder = folder
        self.tracker = ShapeTracker(job, shapes, folder, LeftOut(), Emit(self.said.append))

    def record(self, event: str, shape: int, **fields: Any) -> None:
        key = ["gfx950", "256", str(SIZES[shape]), "512", "512"]
        line = {"event": event, "key": key, "candidate": ["3", "0", ""], "pid": 1, **fields}
        with open(self.folder / "candidates.jsonl", "a") as f:
            f.write(json.dumps(line) + "\n")

    def types(self, shape: int) -> list[str]:
        return [m["type"] for m in self.said if m.get("shape") == shape]


def test_a_shape_without_a_row_is_over_once_a_later_batch_begins(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.record("begin", 0)
    rig.record("end", 0, us="-1", err="1.0", said="This GEMM is not supported!")
    assert rig.tracker.read()
    assert rig.types(0) == ["shape_started"], "its batch may go on"
    rig.record("begin", 1)
    rig.tracker.read()
    assert rig.types(0) == ["shape_started", "shape_parked", "row", "shape_failed"]
    assert (rig.tracker.current, rig.tracker.left) == (1, [1, 2])
    assert rig.tracker.unknown() == [1, 2]


def test_the_candidate_at_work_is_the_one_that_began_and_did_not_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.record("begin", 1)
    rig.tracker.read()
    assert [s.shape for s in rig.tracker.at_work()] == [1]
    rig.record("end", 1, us="5.0", err="0.0")
    rig.tracker.read()
    assert rig.tracker.at_work() == []
    assert (rig.tracker.current, rig.types(0)[-1]) == (1, "shape_failed"), "AITER had no candidate for the one before"
    assert [r["us"] for r in rig.tracker.partial()] == [5.0]


def test_what_aiter_said_of_a_candidate_ends_the_process_or_asks_for_more_memory(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.record("begin", 0)
    rig.record("end", 0, us="-1", said="run gpu func warning: HIP out of memory")
    rig.tracker.read()
    assert rig.tracker.settle_all(whole=True) == "oom"
    assert (rig.tracker.current, rig.types(0)) == (0, ["shape_started"]), "no verdict: there may be room elsewhere"
    rig.record("begin", 1)
    rig.record("end", 1, us="-1", said="HIP error: an illegal memory access was encountered")
    rig.tracker.read()
    assert rig.tracker.fatal == ("fault", "HIP error: an illegal memory access was encountered")
    assert [s.shape for s in rig.tracker.at_work()] == [1], "the candidate that spoilt the process"
    rig.tracker.settle_all(whole=False)
    assert "shape_failed" not in rig.types(1)
