"""Polls the nodes of a run for `status`: which workers run, and what the GPUs do now.

A poll runs only the brief part of the check script (check_script.py), and asks the engine for its workers. `poll` asks
every node once; `Watch` asks again and again, and keeps the connections open, so that the next round needs no login.
Both are made of `NodePoll`, which asks one node. `ask_all` calls any questions side by side; node_check.py uses it too.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from orchestrator.engines import Engine, WorkerState
from orchestrator.errors import OrchestratorError, SlowError, UnreachableError
from orchestrator.inventory.load import resolved
from orchestrator.machines.check_script import ARGV, read_facts, render_script
from orchestrator.machines.facts import NodeFacts
from orchestrator.machines.node_link import engine_of, transport_to
from orchestrator.machines.node_plan import NodePlan, node_of
from orchestrator.transport.base import Transport

T = TypeVar("T")
LIMIT_S = 4.5
"""A node that has not answered by then is slow if it accepted the connection, else unreachable."""
MARGIN_S = 0.2
"""Connecting and the check script get this much less than the limit, so that their result arrives in time. The
engine's list of workers has a limit of its own; `ask_all` does not wait for it."""
EVERY_S = 3.0
"""Seconds between two rounds of `Watch`."""


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """A node's answer, or why there is none."""

    node: str
    at: float
    """Epoch seconds."""
    workers: tuple[WorkerState, ...] = ()
    facts: NodeFacts | None = None
    error: str = ""
    """The reason why it did not answer; "" if it did."""
    slow: bool = False
    """It is reachable, but did not answer in time."""


class Connection(NamedTuple):
    """An open connection to a node that is polled."""

    transport: Transport
    engine: Engine
    script: bytes
    """The brief check script."""


class NodePoll:
    """Polls a node, in one thread at a time. `limit_s`: seconds that an answer may take."""

    def __init__(self, plan: NodePlan, limit_s: float = LIMIT_S) -> None:
        self._plan = plan
        self._limit_s = limit_s
        self.connection: Connection | None = None

    def ask(self, *, keep: bool = False) -> NodeAnswer:
        """Poll once. Never raises for trouble with the node. `keep`: leave the connection open for the next time."""
        until = time.monotonic() + self._limit_s - MARGIN_S
        try:
            if self.connection is None:
                self.connection = self._connect()
            transport, engine, check_script = self.connection
            seconds = max(0.1, until - time.monotonic())
            facts = read_facts(transport.run(ARGV, stdin=check_script, timeout=seconds))
            workers = tuple(engine.list())
            return NodeAnswer(self._plan.node, time.time(), workers, facts if facts.complete else None)
        except OrchestratorError as e:
            keep = False
            return self._answer_for(e)
        finally:
            if not keep:
                self.close()

    def _connect(self) -> Connection:
        node = node_of(self._plan)
        transport = transport_to(node, patient=False, connect_s=self._limit_s - MARGIN_S)
        transport.connect()
        return Connection(transport, engine_of(self._plan, transport), render_script(resolved(node), brief=True))

    def _answer_for(self, error: OrchestratorError) -> NodeAnswer:
        has_greeted = isinstance(error, SlowError) or (isinstance(error, UnreachableError) and error.greeted)
        is_silent = isinstance(error, UnreachableError) and error.silent
        if has_greeted or is_silent:
            return no_answer(self._plan.node, self._limit_s, has_greeted=has_greeted)
        return NodeAnswer(self._plan.node, time.time(), error=error.reason)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.engine.close()
            self.connection.transport.close()
            self.connection = None


def no_answer(node: str, limit_s: float, *, has_greeted: bool) -> NodeAnswer:
    """The answer for a node that gave none in time. `has_greeted`: it accepted the connection, so it is only slow."""
    why = ", though it accepted the connection; --timeout gives it longer" if has_greeted else ""
    return NodeAnswer(node, time.time(), error=f"no answer within {limit_s:g} s{why}", slow=has_greeted)


def poll(plans: Sequence[NodePlan], limit_s: float = LIMIT_S) -> Iterator[NodeAnswer]:
    """Poll every node once and yield the answers as they come. Nodes without one within `limit_s` come last."""
    polls = {plan.node: NodePoll(plan, limit_s) for plan in plans}
    for name, answer in ask_all({name: node_poll.ask for name, node_poll in polls.items()}, limit_s):
        yield answer or no_answer(name, limit_s, has_greeted=polls[name].connection is not None)


def ask_all(questions: Mapping[str, Callable[[], T]], limit_s: float) -> Iterator[tuple[str, T | None]]:
    """Call all at once, each in a thread. Yield (name, answer) as they come, and at the end (name, None) for those
    without an answer within `limit_s`."""
    answers: queue.SimpleQueue[tuple[str, T]] = queue.SimpleQueue()

    def ask(name: str, question: Callable[[], T]) -> None:
        answers.put((name, question()))

    until = time.monotonic() + limit_s
    silent = dict.fromkeys(questions)
    for name, question in questions.items():
        # daemons, because a node that hangs must not keep the program from ending
        threading.Thread(target=ask, args=(name, question), name=f"ask {name}", daemon=True).start()
    with contextlib.suppress(queue.Empty):
        while silent:
            name, answer = answers.get(timeout=max(0.0, until - time.monotonic()))
            del silent[name]
            yield name, answer
    yield from silent.items()


class Watch:
    """The latest answers, renewed every EVERY_S in the background until `close`."""

    def __init__(self, plans: Sequence[NodePlan], limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._latest: dict[str, NodeAnswer] = {}
        self._stop = threading.Event()
        for plan in plans:
            threading.Thread(target=self._keep_asking, args=(plan,), name=f"watch {plan.node}", daemon=True).start()

    def answers(self) -> list[NodeAnswer]:
        """The latest answer of each node; an error if its answer is too old."""
        now = time.time()
        answers = []
        for answer in list(self._latest.values()):
            age = now - answer.at
            if age > EVERY_S + self._limit_s and not answer.error:
                answer = NodeAnswer(answer.node, answer.at, error=f"no answer for {age:.0f} s")
            answers.append(answer)
        return answers

    def close(self) -> None:
        self._stop.set()

    def _keep_asking(self, plan: NodePlan) -> None:
        """Poll one node until `close`. In a thread."""
        with contextlib.closing(NodePoll(plan, self._limit_s)) as node:
            while not self._stop.is_set():
                self._latest[plan.node] = node.ask(keep=True)
                self._stop.wait(EVERY_S)
