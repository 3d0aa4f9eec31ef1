"""The outer watchdog: hangs, stopped processes and what they leave; and what is no hang."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.workernode import Node, fault, node
from tests.waiting import PATIENCE_S, wait_until


def check_replaced(n: Node, hung: str) -> None:
    """After a hang a new process proves itself before the next claim."""
    kinds = [r["type"] for r in n.records()]
    ended = kinds.index("attempt_ended")
    assert n.records()[ended]["attempt"] == hung
    assert kinds[ended + 1 : ended + 4] == ["tuner_ready", "canary", "attempt_started"]


@pytest.mark.parametrize(
    ("kind", "deaf", "exit"),
    [("hang", False, None), ("hang", True, -signal.SIGKILL), ("stop", False, -signal.SIGKILL)],
)
def test_no_progress_is_a_hang(tmp_path: Path, kind: str, deaf: bool, exit: int | None) -> None:
    options = fault(kind, deaf=deaf, match={"group": "bad"}, after_rows=1)
    with node(tmp_path, options=options) as n:
        n.put("bad-1", shapes=2, watchdog_s=0.4, grace_s=0.3)
        n.put("good-1", watchdog_s=5)
        n.start()
        ended = n.wait_ended("bad-1")
        assert (ended["outcome"], ended["in_flight"], ended["exit"]) == ("hang", 1, exit)
        assert ended["detail"].startswith("no sign of progress for 0.4 s")
        assert 0.4 <= ended["seconds"] < 4
        assert len(n.of("bad-1", "row")) == 1
        assert n.wait_ended("good-1")["outcome"] == "done"
        check_replaced(n, "bad-1")


@pytest.mark.parametrize(("kind", "outcome"), [("hang", "hang"), ("abort", "fault"), ("error", "error")])
def test_grandchildren_die_with_the_group(tmp_path: Path, kind: str, outcome: str) -> None:
    """They hold the tuner's pipes open, so that its end does not show there."""
    with node(tmp_path, options=fault(kind, grandchild=True, deaf=True, match={"group": "bad"})) as n:
        n.put("bad-1", watchdog_s=0.5, grace_s=0.2)
        n.put("good-1")
        n.start()
        assert n.wait_ended("bad-1")["outcome"] == outcome
        assert n.wait_ended("good-1")["outcome"] == "done"
        grandchild = int((n.paths.root / "replay" / "grandchild-0").read_text())
        assert grandchild not in n.tuner_pids()
        assert len(n.tuner_pids()) == 1


def test_a_grandchild_of_a_killed_agent_is_swept_by_the_next(tmp_path: Path) -> None:
    with node(tmp_path, options=fault("kill_worker", grandchild=True, times=1)) as n:
        n.put("bad-1")
        assert n.start().wait(PATIENCE_S) == -signal.SIGKILL
        wait_until(lambda: len(n.tuner_pids()) == 1, "only the grandchild is left")
        (grandchild,) = n.tuner_pids()
        n.start()
        assert n.wait_ended("bad-1")["outcome"] == "worker_died"
        assert grandchild not in n.tuner_pids()
        assert f"ended process {grandchild}" in n.paths.log("0").read_text()


def test_progress_keeps_the_watchdog_quiet(tmp_path: Path) -> None:
    with node(tmp_path, options={"seconds_per_shape": 4.0, "candidates": 1}) as n:
        n.put("slow-1", watchdog_s=2.0)
        n.start()
        ended = n.wait_ended("slow-1")
        assert ended["outcome"] == "done"
        assert ended["seconds"] > 4.0


def test_a_paused_machine_is_no_hang(tmp_path: Path) -> None:
    """Agent and child stand still together for longer than the watchdog, as in a paused container."""
    with node(tmp_path, options={"seconds_per_shape": 1.0, "candidates": 1}) as n:
        agent = n.start()
        n.put("a-1", watchdog_s=1.5)
        n.wait_record("shape_started")
        (child,) = n.tuner_pids()
        for pid in (child, agent.pid):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.0)
        time.sleep(1.0)
        os.kill(agent.pid, signal.SIGCONT)
        time.sleep(0.2)
        os.kill(child, signal.SIGCONT)
        assert n.wait_ended("a-1")["outcome"] == "done"


def test_an_idle_child_that_is_killed_is_replaced(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.start()
        n.wait_record("canary")
        (pid,) = n.tuner_pids()
        os.kill(pid, signal.SIGKILL)
        n.wait_record("canary", count=2)
        n.put("a-1")
        assert n.wait_ended("a-1")["outcome"] == "done"
        assert n.tuner_pids() != [pid]


def test_a_child_that_keeps_dying_makes_the_slot_sick(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.start()
        for count in (1, 2, 3):
            n.wait_record("tuner_ready", count=count)
            wait_until(lambda c=count: len(n.records("0", "canary")) == c, "its canary")  # type: ignore[misc]
            (pid,) = n.tuner_pids()
            os.kill(pid, signal.SIGKILL)
        last = n.wait_record("canary", count=4)
        assert last["ok"] is False
        assert "3 times in a row" in last["detail"]
        waiting = n.put("a-1")
        n.put("c-1", kind="canary", slot="0")
        n.wait_ended("c-1")
        assert n.wait_ended("a-1")["outcome"] == "done"
        assert not waiting.exists()
