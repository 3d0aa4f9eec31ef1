"""The canary: nothing is claimed before it passed; a sick slot takes only a canary spec that names it. The timed one:
between attempts, for one percent of the slot's time at most, on record, and never in the way.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kits.worker import fault, node
from tests.waiting import wait_until


def test_a_failed_canary_keeps_the_slot_from_work(tmp_path: Path) -> None:
    with node(tmp_path, ("0", "1"), options=fault("sick_canary", match={"slot": "0"}, times=2)) as n:
        work = n.put("g-1")
        n.put("h-1", slot="0")
        n.put("c-1", kind="canary", slot="any", shapes=0)
        n.start("0")
        first = n.wait_record("canary")
        assert (first["ok"], first["attempt"], first["detail"]) == (False, None, "sum 52273, known 52272")
        time.sleep(0.2)
        assert len(os.listdir(n.paths.inbox)) == 3
        assert n.tuner_pids("0") == []
        # asked again, it fails again; asked a third time it passes and works
        n.put("c-2", kind="canary", slot="0", shapes=0)
        second = n.wait_record("canary", count=2)
        assert (second["ok"], second["attempt"], work.exists()) == (False, "c-2", True)
        n.put("c-3", kind="canary", slot="0", shapes=0)
        third = n.wait_record("canary", count=3)
        assert (third["ok"], third["attempt"], third["us"] > 0) == (True, "c-3", True)
        for attempt in ("g-1", "h-1", "c-1"):
            assert n.wait_ended(attempt)["outcome"] == "done"
        assert n.records("0", "canary")[-1]["attempt"] == "c-1"
        assert len(n.records("0", "tuner_ready")) == 3, "a healthy slot answers on the process that it has"


def test_a_tuner_whose_module_is_missing_says_so_with_the_way_out_and_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interpreter without triton (where ours has it, a module that raises the same hides it)."""
    for name in ("triton", "torch"):
        text = f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')\n"
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with node(tmp_path, tuner="aiter-triton", options={"family": "a16w16"}) as n:
        n.start()
        said = n.wait_record("canary")
        assert (said["ok"], said.get("final")) == (False, True), said["detail"]
        assert said["detail"].startswith("the tuner aiter-triton cannot start here: it needs the Python module t"), said
        assert sys.executable in said["detail"]
        assert "name another interpreter (python:) or image in the inventory" in said["detail"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"options": {"recording": "/no/such/recording.csv"}}, "the tuner did not start: FileNotFoundError"),
        ({"canary_timeout_s": 0.5, "options": fault("sick_canary", how="stop")}, "the canary did not end: no answer"),
    ],
)
def test_a_tuner_that_does_not_start_or_answer_is_a_failed_canary(
    tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    with node(tmp_path, **config) as n:
        n.start()
        said = n.wait_record("canary")
        assert (said["ok"], said["detail"].startswith(says)) == (False, True), said["detail"]
        wait_until(lambda: n.tuner_pids() == [], "its process is gone")
        waiting = n.put("g-1")
        n.put("c-1", kind="canary", slot="0", shapes=0, watchdog_s=0.5)
        assert n.wait_ended("c-1")["outcome"] in ("error", "hang", "fault")
        assert n.records("0", "canary")[-1]["attempt"] == "c-1"
        assert waiting.exists()


@pytest.mark.parametrize("times", [[100.0, 50.0], "no product here", [-1.0, -1.0]])
def test_a_timed_canary_is_on_record_and_one_that_fails_costs_nothing(tmp_path: Path, times: Any) -> None:
    with node(tmp_path, options={"times": {"0": times}}) as n:
        for attempt in ("g-1", "h-1"):
            n.put(attempt)
        n.start()
        for attempt in ("g-1", "h-1"):
            assert n.wait_ended(attempt)["outcome"] == "done"
        assert len(n.records("0", "tuner_ready")) == 1, "the process lives on"
        if times == [100.0, 50.0]:
            timed = n.wait_record("canary_timed")
            assert (timed["compute_us"], timed["memory_us"], timed["seconds"] > 0) == (100.0, 50.0, True)
            order = [r["type"] for r in n.records("0", "attempt_ended", "canary_timed")]
            assert order[:2] == ["attempt_ended", "canary_timed"]
        else:
            assert n.records("0", "canary_timed") == []
