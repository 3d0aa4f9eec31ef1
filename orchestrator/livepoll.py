"""Asking the nodes of a run how they are right now: all at once, each in its own thread, nobody waits for anybody.

What is asked is one rendered script (GPUs, containers; templates/check.sh.j2) and the engine's list of workers. The
connections stay open, so that a second round costs no login.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.errors import NodeError, OrchestratorError
from orchestrator.fleet import engine_of, node_of, transport_of
from orchestrator.inventory import resolved
from orchestrator.nodefacts import ARGV, Facts, read_facts, script

if TYPE_CHECKING:
    from orchestrator.dispatch.deploy import NodePlan
    from orchestrator.engine import Engine, WorkerState
    from orchestrator.transport import Transport

LIMIT_S = 4.5
"""A node that has not answered by then is unreachable."""
EVERY_S = 3.0
"""Between two rounds of `Watch`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a node said, or `error`: why it said nothing. `at`: epoch seconds."""

    node: str
    at: float
    workers: tuple[WorkerState, ...] = ()
    facts: Facts | None = None
    error: str = ""


class NodePoll:
    """One node; used by one thread at a time."""

    def __init__(self, plan: NodePlan) -> None:
        self._plan = plan
        self._open: tuple[Transport, Engine, bytes] | None = None

    def ask(self) -> Answer:
        """Never raises for what is wrong with the node."""
        try:
            transport, engine, text = self._connected()
            done = transport.run(ARGV, stdin=text, timeout=LIMIT_S)
            facts = read_facts(done)
            return Answer(self._plan.node, time.time(), tuple(engine.list()), facts if facts.complete else None)
        except OrchestratorError as e:
            self.close()
            told = str(e).removeprefix(f"{self._plan.node}: ") if isinstance(e, NodeError) else str(e)
            return Answer(self._plan.node, time.time(), error=told)

    def close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened[1].close()
            opened[0].close()

    def _connected(self) -> tuple[Transport, Engine, bytes]:
        if self._open is None:
            transport = transport_of(self._plan, patient=False)
            transport.connect()
            text = script(resolved(node_of(self._plan)), brief=True)
            self._open = (transport, engine_of(self._plan, transport), text)
        return self._open


def poll(plans: Sequence[NodePlan], limit_s: float = LIMIT_S) -> Iterator[Answer]:
    """Every node once, in the order of their answers; who has not answered within `limit_s` comes last."""
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def ask(plan: NodePlan) -> None:
        with contextlib.closing(NodePoll(plan)) as node:
            answers.put(node.ask())

    until = time.monotonic() + limit_s
    for plan in plans:  # daemons: a node that hangs must not keep the program from ending
        threading.Thread(target=ask, args=(plan,), name=f"poll {plan.node}", daemon=True).start()
    missing = {p.node for p in plans}
    while missing:
        try:
            answer = answers.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            break
        missing.discard(answer.node)
        yield answer
    for plan in plans:
        if plan.node in missing:
            yield Answer(plan.node, time.time(), error=f"no answer within {limit_s:g} s")


class Watch:
    """The latest answers, renewed every EVERY_S in the background until `close`."""

    def __init__(self, plans: Sequence[NodePlan]) -> None:
        self._latest: dict[str, Answer] = {}
        self._stop = threading.Event()
        for plan in plans:
            threading.Thread(target=self._keep, args=(plan,), name=f"watch {plan.node}", daemon=True).start()

    def answers(self) -> list[Answer]:
        """Of the nodes that have answered so far; one that fell silent is told as such."""
        now, out = time.time(), []
        for answer in list(self._latest.values()):
            old = now - answer.at
            silent = not answer.error and old > EVERY_S + LIMIT_S
            out.append(Answer(answer.node, answer.at, error=f"no answer for {old:.0f} s") if silent else answer)
        return out

    def close(self) -> None:
        self._stop.set()

    def _keep(self, plan: NodePlan) -> None:
        with contextlib.closing(NodePoll(plan)) as node:
            while not self._stop.is_set():
                self._latest[plan.node] = node.ask()
                self._stop.wait(EVERY_S)
