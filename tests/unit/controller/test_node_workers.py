"""Dead workers of a node: launched again, but not for ever, while another thread reads beats."""

from __future__ import annotations

from typing import Any

from orchestrator.controller.messages import Beat
from orchestrator.controller.node_workers import RELAUNCHES, NodeWorkers
from orchestrator.engines import WorkerState


class EngineOfDeadWorker:
    """An engine (orchestrator/engines.py) with one worker, which ends as soon as it is started."""

    def __init__(self) -> None:
        self.starts = 0
        self.beat_while_listing: Any = lambda: None

    def start(self, slots: object, env: object = None) -> None:
        self.starts += 1

    def list(self) -> list[WorkerState]:
        self.beat_while_listing()
        return [WorkerState("0", "ended", code=1)]


def beat(*, alive: bool) -> Beat:
    return Beat(0.0, 1, {"0": {"alive": alive}}, "")


def test_a_worker_that_keeps_dying_is_given_up_and_a_sign_of_life_while_the_engine_is_asked_is_no_error() -> None:
    engine: Any = EngineOfDeadWorker()
    workers = NodeWorkers(engine, ["0"], {}, launch=True, may_have_started=False)
    assert [list(workers.dead(beat(alive=False))) for _ in range(2)] == [[], ["0"]]
    assert [workers.revive("0") for _ in range(RELAUNCHES)] == [""] * RELAUNCHES
    engine.beat_while_listing = lambda: list(workers.dead(beat(alive=True)))
    assert workers.revive("0") == "the worker keeps exiting with code 1"
    assert engine.starts == RELAUNCHES
