"""The agent's life with real processes: claims, order, records, rejections, stop, cancel, and kill -9 at any moment."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kits.worker import Node, fault, interpreters, node
from tests.waiting import wait_until
from worker.agent.inbox import Inbox
from worker.protocol import MAX_SPEC_BYTES, Spec

PYTHONS = interpreters()


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_drains_the_inbox_under_every_python(tmp_path: Path, version: str) -> None:
    if version not in PYTHONS:
        pytest.skip(f"python{version} is not installed")
    with node(tmp_path, options=fault("abort", match={"group": "bad"}), idle_exit_s=0.5) as n:
        n.put("good-1", shapes=3)
        n.put("bad-1")
        n.put("good-2")
        assert n.start(python=PYTHONS[version]).wait(30) == 0, n.said()
        shape, up = ["shape_started", *["row"] * 4, "shape_tuned"], ["tuner_ready", "canary"]
        assert [r["type"] for r in n.records()] == [
            *["worker_started", *up, "attempt_started", *shape, *shape, *shape, "attempt_ended"],
            *["attempt_started", "shape_started", "attempt_ended", *up],
            *["attempt_started", *shape, "attempt_ended", "worker_stopped"],
        ]
        info = n.records("0", "worker_started")[0]["info"]
        assert (info["python"].rpartition(".")[0], info["epoch"]) == (version, 1)
        first, bad, last = n.records("0", "attempt_ended")
        assert (first["outcome"], first["in_flight"], first["exit"]) == ("done", None, None)
        assert (bad["outcome"], bad["in_flight"], bad["exit"]) == ("fault", 1, -signal.SIGABRT)
        assert "Fatal Python error: Aborted" in bad["detail"]
        assert min(first["spent"]["start"], last["spent"]["start"]) > 0
        assert n.records("0", "worker_stopped")[0]["why"].startswith("idle")


def test_a_second_agent_of_a_slot_is_refused_and_a_slot_that_there_is_not(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        first = n.start()
        n.wait_record("canary")
        assert n.start().wait(15) == 4
        assert f"slot 0 has an agent already (process {first.pid})" in n.said()
        assert n.start("7").wait(15) == 2
        assert "node.json has no slot '7', only 0" in n.said("7")
        assert "Traceback" not in n.said("7")
        # the lock ends with the agent, even if its child lives on
        (child,) = n.tuner_pids()
        os.kill(child, signal.SIGSTOP)
        n.kill(first)
        n.start()
        n.wait_record("worker_started", count=2)


def test_what_does_not_fit_is_rejected_with_its_reason(tmp_path: Path) -> None:
    with node(tmp_path, idle_exit_s=0.5) as n:
        n.paths.epoch.write_text("5\n")
        n.put("stale-1", epoch=4)
        n.put("foreign-1", epoch=5, run="other")
        n.put("othertuner-1", epoch=5, tuner="torch")
        n.put_raw("renamed-1", Spec(attempt="else-1", run="r", epoch=5, kind="canary").dumps())
        n.put("again-1", epoch=5)
        n.put("again-1", epoch=5)
        n.put("newer-1", epoch=6)
        assert n.start().wait(15) == 0
        assert {r["attempt"]: r["detail"] for r in n.records("0", "spec_rejected")} == {
            "stale-1": "the spec is of controller 4, the node listens to 5",
            "foreign-1": "the spec is of run 'other', this node works for 'test-run'",
            "othertuner-1": "the spec asks for tuner torch, this worker holds faulty",
            "renamed-1": "the spec is of attempt else-1, its file of renamed-1",
            "again-1": "the attempt was started on this node before",
        }
        assert [r["attempt"] for r in n.records("0", "attempt_ended")] == ["again-1", "newer-1"]
        assert (n.paths.attempt("stale-1") / "rejected.json").exists()
        assert (n.paths.attempt("again-1") / "spec.json").exists()


def test_hostile_specs_hurt_nobody(tmp_path: Path) -> None:
    with node(tmp_path, idle_exit_s=0.5) as n:
        secret = tmp_path / "secret"
        secret.write_bytes(Spec(attempt="link-1", run="test-run", epoch=1, kind="canary").dumps())
        os.symlink(secret, n.inbox_path("link-1"))
        os.mkfifo(n.inbox_path("fifo-1"))
        n.inbox_path("folder-1").mkdir()
        with open(n.inbox_path("huge-1"), "wb") as f:
            f.truncate(MAX_SPEC_BYTES + 1)
        n.put_raw("binary-1", bytes(range(256)))
        n.put_raw("deep-1", b"[" * 100_000)
        n.put_raw("nan-1", Spec(attempt="nan-1", run="test-run", epoch=1, watchdog_s=float("nan")).dumps())
        (n.paths.inbox / "notes.txt").write_text("not a spec")
        (n.paths.inbox / "00000001.any...json").write_text("{}")
        n.put("good-1")
        assert n.start().wait(15) == 0, n.said()
        why = {r["attempt"]: r["detail"] for r in n.records("0", "spec_rejected")}
        assert set(why) == {f"{k}-1" for k in ("link", "fifo", "folder", "huge", "binary", "deep", "nan")}
        assert why["fifo-1"] == why["folder-1"] == "the spec is not a regular file"
        assert why["link-1"].startswith("the spec cannot be read")
        assert "larger than" in why["huge-1"]
        assert "watchdog_s must be positive" in why["nan-1"]
        assert secret.exists()
        assert n.wait_ended("good-1")["outcome"] == "done"
        assert os.listdir(n.paths.claimed("0")) == ["lock"]


def test_cancel_ends_the_attempt_and_keeps_its_rows(tmp_path: Path) -> None:
    """Before it began, while it runs, and of a tuner that is deaf to SIGINT."""
    options = {"seconds_per_shape": 0.4, "candidates": 2, **fault("hang", deaf=True, match={"group": "deaf"})}
    with node(tmp_path, options=options) as n:
        n.paths.cancel("early-1").touch()
        n.put("early-1")
        n.put("long-1", shapes=50)
        n.start()
        early = n.wait_ended("early-1")
        assert (early["outcome"], early["in_flight"], n.of("early-1", "shape_started")) == ("cancelled", None, [])
        n.wait_record("shape_tuned")
        (pid,) = n.tuner_pids()
        n.paths.cancel("long-1").touch()
        ended = n.wait_ended("long-1")
        assert (ended["outcome"], ended["exit"]) == ("cancelled", None)
        assert ended["in_flight"] in range(2, 6)
        wait_until(lambda: not n.paths.cancel("long-1").exists(), "the request is tidied up")
        assert n.tuner_pids() == [pid]  # it came back by itself
        n.put("deaf-1")
        wait_until(lambda: n.of("deaf-1", "shape_started"), "the deaf one is at work")
        n.paths.cancel("deaf-1").touch()
        deaf = n.wait_ended("deaf-1")
        assert (deaf["outcome"], deaf["exit"]) == ("cancelled", -signal.SIGKILL)
        n.put("next-1")
        assert n.wait_ended("next-1")["outcome"] == "done"


@pytest.mark.parametrize("way", ["drain", "now", "SIGTERM", "SIGINT"])
def test_stop(tmp_path: Path, way: str) -> None:
    """A drain finishes the attempt and claims no more; the others end it, also after a drain."""
    with node(tmp_path, options={"seconds_per_shape": 0.5 if way == "drain" else 30}) as n:
        agent = n.start()
        n.put("a-1", shapes=2)
        n.put("b-1")
        n.wait_record("shape_started")
        n.paths.stop.write_text("now" if way == "now" else "drain")
        if way.startswith("SIG"):
            agent.send_signal(signal.Signals[way])
        assert agent.wait(5) == 0
        ended = n.wait_ended("a-1")
        assert (ended["outcome"], ended["in_flight"]) == (("done", None) if way == "drain" else ("cancelled", 1))
        assert way in n.records("0", "worker_stopped")[0]["why"]
        assert len(os.listdir(n.paths.inbox)) == 1


def books(n: Node, attempts: list[str]) -> None:
    """Every attempt ended exactly once, with whole courses in between; nothing is left anywhere."""
    records = n.records()
    for attempt in attempts:
        mine = [r for r in records if r.get("attempt") == attempt]
        ended = [r for r in mine if r["type"] == "attempt_ended"]
        assert len(ended) == 1, (attempt, [r["type"] for r in mine])
        assert mine[-1] is ended[0]
        assert len([r for r in mine if r["type"] == "attempt_started"]) <= 1
        started, settled = ([r["shape"] for r in mine if r["type"] == t] for t in ("shape_started", "shape_tuned"))
        assert started == sorted(set(started))
        assert settled == started[: len(settled)]
        open_shape = started[len(settled) :]
        assert len(open_shape) <= 1
        assert ended[0]["in_flight"] == (open_shape[0] if open_shape else None)
        if ended[0]["outcome"] == "done":
            assert len(settled) == 3
        assert (n.paths.attempt(attempt) / "spec.json").exists()
    assert os.listdir(n.paths.inbox) == []
    assert Inbox(n.paths, "0").claimed() == []


def kill_around(n: Node, seed: int, kills: int) -> None:
    rng = random.Random(seed)
    attempts: list[str] = []
    for i in range(kills):
        for j in range(6):
            attempts.append(f"g{i}x{j}-1")
            n.put(attempts[-1], shapes=3)
        agent = n.start()
        # half of the time early, while it starts and closes what was left
        time.sleep(rng.choice([rng.uniform(0, 0.25), rng.uniform(0.2, 0.5)]))
        victims = n.tuner_pids()
        if victims and rng.random() < 0.4:
            with suppress(ProcessLookupError):
                os.kill(victims[0], signal.SIGKILL)
            time.sleep(rng.uniform(0, 0.15))
        n.kill(agent)
    n.start()
    for attempt in attempts:
        n.wait_ended(attempt)
    books(n, attempts)


@pytest.mark.parametrize(
    ("seed", "kills"), [(1, 10), *(pytest.param(seed, 40, marks=pytest.mark.soak) for seed in range(2, 6))]
)
def test_kills_at_random_moments(tmp_path: Path, seed: int, kills: int) -> None:
    with node(tmp_path, options={"seconds_per_shape": 0.01}) as n:
        kill_around(n, seed, kills)
