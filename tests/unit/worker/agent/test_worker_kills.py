"""kill -9 of agent and tuner at random moments: the books balance every time."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.workernode import Node, node
from worker.agent.inbox import Inbox


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
