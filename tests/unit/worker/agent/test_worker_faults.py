"""The agent with a tuner that dies, errs or sends wrong messages; the deaths are real."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.workernode import fault, interpreters, node
from tests.waiting import wait_until
from worker.protocol import Spec, SpecShape


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
        # what was measured before stays: a whole shape and two rows
        assert [r["shape"] for r in n.of("bad-1", "shape_tuned")] == [1]
        assert [r["shape"] for r in n.of("bad-1", "row")] == [1] * 4 + [2] * 2
        assert n.wait_ended("good-1")["outcome"] == "done"
        kinds = [r["type"] for r in n.records("0", "tuner_ready", "canary", "attempt_ended")]
        assert kinds == ["tuner_ready", "canary", "attempt_ended"] * 2


@pytest.mark.parametrize(
    ("number", "outcome", "says"),
    [
        (signal.SIGKILL, "fault", "SIGKILL, not sent by the worker"),
        (signal.SIGINT, "error", "SIGINT that the worker did not send"),
    ],
)
def test_a_signal_from_outside_is_said_to_be_one(tmp_path: Path, number: int, outcome: str, says: str) -> None:
    with node(tmp_path, options={"seconds_per_shape": 30}) as n:
        n.put("a-1")
        n.start()
        n.wait_record("shape_started")
        (pid,) = n.tuner_pids()
        os.kill(pid, number)
        ended = n.wait_ended("a-1")
        assert (ended["outcome"], ended["in_flight"]) == (outcome, 1)
        assert says in ended["detail"]


def test_kill_worker_takes_the_agent_and_its_tuner(tmp_path: Path) -> None:
    with node(tmp_path, options=fault("kill_worker", match={"M": 2}), idle_exit_s=0.3) as n:
        for attempt in ("a-1", "a-2"):
            n.put(attempt, shapes=2)
            agent = n.start()
            assert agent.wait(15) == -signal.SIGKILL
            wait_until(lambda: n.tuner_pids() == [], "the tuner died with its agent")
        assert n.start().wait(15) == 0
        for attempt in ("a-1", "a-2"):
            ended = n.wait_ended(attempt)
            assert (ended["outcome"], ended["in_flight"]) == ("worker_died", 2)
            assert [r["shape"] for r in n.of(attempt, "shape_tuned")] == [1]


def test_a_truncated_write_costs_one_line(tmp_path: Path) -> None:
    with node(tmp_path, options=fault("truncate", match={"M": 1}, times=1), idle_exit_s=0.3) as n:
        n.put("a-1")
        assert n.start().wait(15) == -signal.SIGKILL
        torn = n.paths.events("0").read_bytes()
        assert not torn.endswith(b"\n")
        n.put("a-2")
        assert n.start().wait(15) == 0
        lines = n.paths.events("0").read_bytes().split(b"\n")
        bad = [line for line in lines if line and not line.endswith(b"}")]
        assert bad == [torn.split(b"\n")[-1]]
        ended = n.wait_ended("a-1")
        assert (ended["outcome"], ended["in_flight"]) == ("worker_died", 1)
        assert n.wait_ended("a-2")["outcome"] == "done"


@pytest.mark.parametrize(
    ("kind", "reason", "status"), [("wrong", "wrong_result", "wrong"), ("no_candidate", "no_candidate", "error")]
)
def test_a_verdict_is_no_fault(tmp_path: Path, kind: str, reason: str, status: str) -> None:
    with node(tmp_path, options=fault(kind, match={"M": [1, 3]})) as n:
        n.put("a-1", shapes=3)
        n.start()
        assert n.wait_ended("a-1")["outcome"] == "done"
        failed = n.of("a-1", "shape_failed")
        assert [(r["shape"], r["reason"]) for r in failed] == [(1, reason), (3, reason)]
        assert [r["shape"] for r in n.of("a-1", "shape_tuned")] == [2]
        rows = [r["row"] for r in n.of("a-1", "row") if r["shape"] == 1]
        assert [r["status"] for r in rows].count(status) >= 3
        assert all(r["errRatio"] > 0.05 for r in rows if r["status"] == "wrong")


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A memory cgroup of 200 MB (v1 or v2) that we may make, or a skip."""
    for base, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = base / f"gemmfleet-test-{os.getpid()}"
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
        assert agent.poll() is None  # the tuner was offered, the agent lives
        n.put("b-1")
        assert n.wait_ended("b-1")["outcome"] == "done"
        n.kill(agent)


def test_a_group_run_by_hand(tmp_path: Path) -> None:
    group = tmp_path / "group.json"
    shapes = tuple(SpecShape(i, {"M": i, "N": 64, "K": 32}) for i in (1, 2))
    group.write_bytes(Spec(attempt="g-1", run="r", epoch=1, tuner="replay", shapes=shapes).dumps())
    python = next(iter(interpreters().values()))

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        argv = [python, "-m", "worker", *args]
        return subprocess.run(argv, capture_output=True, text=True, check=False)

    done = run("run", str(group), "--node-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tuner replay is ready after ")
    assert lines[1].startswith("canary passed: ")
    assert re.fullmatch(r"shape 1 M=1 N=64 K=32: [\d.]+ us, [\d.e-]+ TFLOPS, \w+ \(of 4 candidates\)", lines[2])
    assert lines[-2].startswith("done: 2 of 2 shapes tuned in ")
    assert lines[-1] == f"records: {tmp_path}/attempts/g-1/records.jsonl"
    assert (tmp_path / "attempts" / "g-1" / "records.jsonl").read_bytes().count(b'"shape_tuned"') == 2

    options = {"replay": fault("wrong", match={"M": 1})}
    failing = Spec(attempt="g-2", run="r", epoch=1, shapes=shapes, options=options)
    group.write_bytes(failing.dumps())
    some = run("run", str(group), "--node-dir", str(tmp_path), "--tuner", "faulty")
    assert some.returncode == 1
    assert "shape 1 M=1 N=64 K=32: wrong_result, 3 of 4 candidates off" in some.stdout
    assert "done: 1 of 2 shapes tuned" in some.stdout

    no_tuner = run("run", str(group), "--node-dir", str(tmp_path))
    assert (no_tuner.returncode, no_tuner.stderr) == (2, f"worker run: {group}: no tuner is named; use --tuner\n")
    group.write_text("{}")
    bad = run("run", str(group), "--node-dir", str(tmp_path))
    assert bad.returncode == 2
    assert "missing field 'attempt'" in bad.stderr
