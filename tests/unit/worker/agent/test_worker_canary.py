"""The canary: nothing is claimed before it passed; a sick slot takes only a canary spec that names it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.support.workernode import fault, node
from tests.waiting import PATIENCE_S, wait_until


def test_a_failed_canary_keeps_the_slot_from_work(tmp_path: Path) -> None:
    with node(tmp_path, ("0", "1"), options=fault("sick_canary", match={"slot": "0"}, times=2)) as n:
        work = n.put("g-1")
        aimed = n.put("h-1", slot="0")
        n.put("c-1", kind="canary", slot="any", shapes=0)
        n.start("0")
        first = n.wait_record("canary")
        assert (first["ok"], first["us"], first["attempt"]) == (False, -1.0, None)
        assert first["detail"] == "sum 52273, known 52272"
        time.sleep(0.2)
        assert len(os.listdir(n.paths.inbox)) == 3
        assert n.tuner_pids("0") == []
        # asked again, it fails again; asked a third time it passes and works
        n.put("c-2", kind="canary", slot="0", shapes=0)
        second = n.wait_record("canary", count=2)
        assert (second["ok"], second["attempt"]) == (False, "c-2")
        assert n.wait_ended("c-2")["outcome"] == "done"
        assert work.exists()
        n.put("c-3", kind="canary", slot="0", shapes=0)
        third = n.wait_record("canary", count=3)
        assert (third["ok"], third["attempt"]) == (True, "c-3")
        assert third["us"] > 0
        for attempt in ("g-1", "h-1", "c-1"):
            assert n.wait_ended(attempt)["outcome"] == "done"
        assert not aimed.exists()


def test_a_healthy_slot_answers_a_canary_on_the_process_it_has(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.start()
        n.wait_record("canary")
        pids = n.tuner_pids()
        n.put("c-1", kind="canary", slot="0", shapes=0)
        assert n.wait_ended("c-1")["outcome"] == "done"
        assert n.records("0", "canary")[1]["attempt"] == "c-1"
        assert n.tuner_pids() == pids


def test_a_tuner_that_does_not_start_is_a_failed_canary(tmp_path: Path) -> None:
    with node(tmp_path, options={"recording": "/no/such/recording.csv"}) as n:
        n.start()
        said = n.wait_record("canary")
        assert said["ok"] is False
        assert said["detail"].startswith("the tuner did not start: FileNotFoundError")
        assert n.records("0", "tuner_ready") == []
        waiting = n.put("g-1")
        n.put("c-1", kind="canary", slot="0", shapes=0)
        ended = n.wait_ended("c-1")
        assert ended["outcome"] == "error"
        assert n.records("0", "canary")[-1]["attempt"] == "c-1"
        assert waiting.exists()


def test_a_tuner_whose_module_is_missing_says_so_with_the_way_out_and_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interpreter without triton (where ours has it, a module that raises the same hides it)."""
    (tmp_path / "hiding").mkdir()
    (tmp_path / "hiding/triton.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'triton'\", name='triton')\n"
    )
    (tmp_path / "hiding/torch.py").write_text((tmp_path / "hiding/triton.py").read_text().replace("triton", "torch"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hiding"))
    with node(tmp_path, tuner="aiter-triton", options={"family": "a16w16"}) as n:
        n.start()
        said = n.wait_record("canary")
        assert (said["ok"], said.get("final")) == (False, True), said["detail"]
        assert said["detail"].startswith("the tuner aiter-triton cannot start here: it needs the Python module t"), said
        assert sys.executable in said["detail"]
        assert "install it there, or name another interpreter (python:) or image in the inventory" in said["detail"]


def test_a_tuner_that_does_not_come_up_in_time(tmp_path: Path) -> None:
    with node(tmp_path, start_timeout_s=0.3, options={"start_seconds": 20}) as n:
        n.start()
        assert n.wait_record("canary")["detail"] == "the tuner did not start: no answer within 0.3 s"
        assert n.tuner_pids() == []


def test_a_long_start_is_no_idleness(tmp_path: Path) -> None:
    with node(tmp_path, idle_exit_s=0.5, options={"start_seconds": 0.8}) as n:
        agent = n.start()
        n.wait_record("canary")
        n.put("a-1")
        assert n.wait_ended("a-1")["outcome"] == "done"
        assert agent.wait(PATIENCE_S) == 0


def test_stop_ends_a_start(tmp_path: Path) -> None:
    with node(tmp_path, options={"start_seconds": 20}) as n:
        agent = n.start()
        wait_until(n.tuner_pids, "the tuner's process")
        assert n.stop(agent, "drain") == 0
        assert n.records("0", "canary") == []


def test_a_canary_that_hangs_ends_in_time(tmp_path: Path) -> None:
    """The child is stopped before it can answer; the agent goes on when the time is up."""
    options = fault("sick_canary", how="stop", times=1)
    with node(tmp_path, canary_timeout_s=0.5, options=options) as n:
        n.start()
        said = n.wait_record("canary")
        assert said["detail"] == "the canary did not end: no answer within 0.5 s"
        wait_until(lambda: n.tuner_pids() == [], "the stopped process is gone")


@pytest.mark.parametrize("times", [1, None])
def test_a_canary_that_kills_its_process_is_tried_once_more(tmp_path: Path, times: int | None) -> None:
    with node(tmp_path, options=fault("sick_canary", how="abort", **({"times": times} if times else {}))) as n:
        n.start()
        said = n.wait_record("canary")
        assert said["ok"] is (times == 1)
        assert times == 1 or "the canary did not end: the tuner's process was killed by SIGABRT" in said["detail"]
        assert len(n.records("0", "tuner_ready")) == 2
