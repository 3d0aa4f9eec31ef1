"""The agent with a tuner that dies, errs, hangs or sends wrong messages; the deaths are real."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kits.worker import fault, node
from tests.waiting import PATIENCE_S, wait_until


@pytest.mark.parametrize(
    ("kind", "extra", "outcome", "exit", "says"),
    [
        ("abort", {}, "fault", -signal.SIGABRT, "the tuner's process was killed by SIGABRT"),
        ("exit", {"code": 7}, "fault", 7, "the tuner's process exited with status 7"),
        ("exit", {"code": 0}, "fault", 0, "the tuner's process exited with status 0"),
        ("error", {}, "error", None, "RuntimeError: replay: an error that is no shape's fault"),
        ("oom", {}, "oom", None, "MemoryError"),
        ("lie", {}, "error", -signal.SIGKILL, "the tuner broke the protocol: shape_tuned of shape 1000002"),
    ],
)
def test_a_fault_ends_the_attempt_and_names_the_shape(
    tmp_path: Path, kind: str, extra: dict[str, Any], outcome: str, exit: int | None, says: str
) -> None:
    with node(tmp_path, options=fault(kind, match={"M": 2}, after_rows=2, **extra)) as n:
        n.put("bad-1", shapes=3)
        n.put("good-1")
        n.start()
        ended = n.wait_ended("bad-1")
        assert (ended["outcome"], ended["in_flight"], ended["exit"]) == (outcome, 2, exit)
        assert ended["detail"].startswith(says)
        assert len(ended["detail"].encode()) <= 2000
        # earlier measurements stay: a whole shape and two rows
        assert [r["shape"] for r in n.of("bad-1", "shape_tuned")] == [1]
        assert [r["shape"] for r in n.of("bad-1", "row")] == [1] * 4 + [2] * 2
        assert n.wait_ended("good-1")["outcome"] == "done"
        kinds = [r["type"] for r in n.records("0", "tuner_ready", "canary", "attempt_ended")]
        assert kinds == ["tuner_ready", "canary", "attempt_ended"] * 2


@pytest.mark.parametrize("kind", ["kill_worker", "truncate"])
def test_an_agent_that_is_killed_takes_its_tuner_and_costs_one_line_at_most(tmp_path: Path, kind: str) -> None:
    with node(tmp_path, options=fault(kind, match={"M": 2}, times=1), idle_exit_s=0.3) as n:
        n.put("a-1", shapes=2)
        assert n.start().wait(15) == -signal.SIGKILL
        wait_until(lambda: n.tuner_pids() == [], "the tuner died with its agent")
        torn = n.paths.events("0").read_bytes().split(b"\n")[-1]
        assert bool(torn) is (kind == "truncate")
        begun = n.of("a-1", "attempt_started")[0]["t"]
        (n.paths.root / "supervisor").mkdir(exist_ok=True)
        n.paths.last_end("0").write_text(f"137 {begun:.0f} {begun + 12:.0f} {'true' if torn else 'false'}\n")
        n.put("a-2")
        assert n.start().wait(15) == 0
        lines = n.paths.events("0").read_bytes().split(b"\n")
        assert [line for line in lines if line and not line.endswith(b"}")] == ([torn] if torn else [])
        ended = n.wait_ended("a-1")
        assert (ended["outcome"], ended["in_flight"]) == ("worker_died", 2)
        assert 11 < ended["seconds"] < 13
        why = "because its memory was used up" if torn else "ended from outside (docker kill, a user, or the kernel)"
        assert ended["detail"] == f"its worker is gone: it ended with code 137 (SIGKILL) after 12 s, {why}"
        assert [r["shape"] for r in n.of("a-1", "shape_tuned")] == [1]
        assert n.wait_ended("a-2")["outcome"] == "done"


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A memory cgroup of 200 MB (v1 or v2) that we may make, or a skip."""
    for base, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(base) / f"gemmfleet-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(200 * 2**20))
            yield group
            return
        except OSError:
            continue
        finally:
            wait_until(lambda g=group: not (g / "cgroup.procs").read_text(), "the cgroup is empty")  # type: ignore[misc]
            group.rmdir()
    pytest.skip("may not make a memory cgroup here")


def test_the_kernels_out_of_memory_killer_is_recognised(tmp_path: Path, memory_cgroup: Path) -> None:
    with node(tmp_path, options=fault("oom", match={"M": 2}, guard=False)) as n:
        agent = n.start()
        n.wait_record("canary")
        for pid in (agent.pid, *n.tuner_pids()):
            (memory_cgroup / "cgroup.procs").write_text(str(pid))
        n.put("a-1", shapes=2)
        ended = n.wait_ended("a-1")
        assert (ended["outcome"], ended["in_flight"], ended["exit"]) == ("oom", 2, -signal.SIGKILL)
        assert ended["detail"].startswith("the tuner's process was killed by the kernel for memory")
        n.put("b-1")
        assert n.wait_ended("b-1")["outcome"] == "done", "the tuner was offered, the agent lives"
        n.kill(agent)


@pytest.mark.parametrize(
    ("kind", "more", "outcome", "exit"),
    [
        ("hang", {}, "hang", None),
        ("hang", {"deaf": True, "grandchild": True}, "hang", -signal.SIGKILL),
        ("stop", {}, "hang", -signal.SIGKILL),
        # a grandchild holds the tuner's pipes open, so that its end does not show there
        ("abort", {"grandchild": True}, "fault", -signal.SIGABRT),
        ("error", {"grandchild": True}, "error", None),
    ],
)
def test_no_progress_is_a_hang_and_nothing_of_the_process_lives_on(
    tmp_path: Path, kind: str, more: dict[str, Any], outcome: str, exit: int | None
) -> None:
    with node(tmp_path, options=fault(kind, match={"group": "bad"}, after_rows=1, **more)) as n:
        n.put("bad-1", shapes=2, watchdog_s=0.4, grace_s=0.3)
        n.put("good-1", watchdog_s=5)
        n.start()
        ended = n.wait_ended("bad-1")
        assert (ended["outcome"], ended["in_flight"], ended["exit"]) == (outcome, 1, exit)
        assert ended["detail"].startswith("no sign of progress for 0.4 s") is (outcome == "hang")
        assert len(n.of("bad-1", "row")) == 1
        assert n.wait_ended("good-1")["outcome"] == "done"
        kinds = [r["type"] for r in n.records("0", "tuner_ready", "canary", "attempt_started", "attempt_ended")]
        assert kinds == ["tuner_ready", "canary", "attempt_started", "attempt_ended"] * 2, "a new process proves itself"
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


def test_progress_keeps_the_watchdog_quiet_and_a_paused_machine_is_no_hang(tmp_path: Path) -> None:
    """Agent and child stand still together for longer than the watchdog, as in a paused container."""
    with node(tmp_path, options={"seconds_per_shape": 3.0, "candidates": 1}) as n:
        agent = n.start()
        n.put("a-1", watchdog_s=1.5)
        n.wait_record("shape_started")
        (child,) = n.tuner_pids()
        for pid in (child, agent.pid):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.0)
        os.kill(agent.pid, signal.SIGCONT)
        time.sleep(0.2)
        os.kill(child, signal.SIGCONT)
        ended = n.wait_ended("a-1")
        assert (ended["outcome"], ended["seconds"] > 3.0) == ("done", True)


def test_an_idle_child_that_is_killed_is_replaced_and_one_that_keeps_dying_makes_the_slot_sick(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.start()
        for count in (1, 2, 3):
            n.wait_record("tuner_ready", count=count)
            wait_until(lambda c=count: len(n.records("0", "canary")) == c, "its canary")  # type: ignore[misc]
            (pid,) = n.tuner_pids()
            os.kill(pid, signal.SIGKILL)
        last = n.wait_record("canary", count=4)
        assert (last["ok"], "3 times in a row" in last["detail"]) == (False, True)
        n.put("a-1")
        n.put("c-1", kind="canary", slot="0")
        assert [n.wait_ended(a)["outcome"] for a in ("c-1", "a-1")] == ["done", "done"]
