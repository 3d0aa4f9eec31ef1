"""Questions to nodes, all at once, each in its own thread: the check before a run, and polls while it works.

Both run one rendered script (GPUs, containers; templates/check.sh.j2), a poll its brief part; it adds the engine's list
of workers. The connections of polls stay open, so that a second round costs no login.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from orchestrator.engines import UNUSABLE, Finding
from orchestrator.errors import OrchestratorError, SlowError, UnreachableError
from orchestrator.inventory import Node, check_references, resolved
from orchestrator.nodes.check import NodeReport, check_node, compare, unreachable
from orchestrator.nodes.facts import ARGV, TIMEOUT_S, NodeFacts, read_facts, script
from orchestrator.nodes.link import engine_of, node_of, transport_of, transport_to
from orchestrator.nodes.occupancy import twice
from orchestrator.transport import connected

if TYPE_CHECKING:
    from orchestrator.dispatch.deploy import NodePlan
    from orchestrator.engines import Engine, WorkerState
    from orchestrator.transport import Transport

T = TypeVar("T")
LIMIT_S = 4.5
"""A node that has not answered by then is slow if it let us in, or began to; else it is unreachable."""
ASIDE_S = 0.2
"""Part of the limit that is kept back from the calls to a node, so that their result arrives in time."""
EVERY_S = 3.0
"""Between two rounds of `Watch`."""


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """Answer of a node, or `error`: why there is none. `at`: epoch seconds. `slow`: it is there, and did not answer in
    time."""

    node: str
    at: float
    workers: tuple[WorkerState, ...] = ()
    facts: NodeFacts | None = None
    error: str = ""
    slow: bool = False


class NodePoll:
    """One node; used by one thread at a time. `limit_s`: so long may an answer take."""

    def __init__(self, plan: NodePlan, limit_s: float = LIMIT_S) -> None:
        self._plan, self._limit_s = plan, limit_s
        self._open: tuple[Transport, Engine, bytes] | None = None

    @property
    def let_in(self) -> bool:
        """Return whether there is a connection."""
        return self._open is not None

    def ask(self) -> NodeAnswer:
        """Never raises for what is wrong with the node."""
        try:
            until = time.monotonic() + self._limit_s - ASIDE_S
            transport, engine, text = self._connected()
            done = transport.run(ARGV, stdin=text, timeout=max(0.1, until - time.monotonic()))
            facts = read_facts(done)
            return NodeAnswer(self._plan.node, time.time(), tuple(engine.list()), facts if facts.complete else None)
        except OrchestratorError as e:
            self.close()
            unreachable = e if isinstance(e, UnreachableError) else None
            if isinstance(e, SlowError) or (unreachable and unreachable.greeted):
                return slow_answer(self._plan.node, self._limit_s)
            if unreachable and unreachable.silent:
                return NodeAnswer(self._plan.node, time.time(), error=f"no answer within {self._limit_s:g} s")
            return NodeAnswer(self._plan.node, time.time(), error=e.reason)

    def close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened[1].close()
            opened[0].close()

    def _connected(self) -> tuple[Transport, Engine, bytes]:
        if self._open is None:
            transport = transport_of(self._plan, patient=False, connect_s=self._limit_s - ASIDE_S)
            transport.connect()
            text = script(resolved(node_of(self._plan)), brief=True)
            self._open = (transport, engine_of(self._plan, transport), text)
        return self._open


def slow_answer(node: str, limit_s: float) -> NodeAnswer:
    """Answer for a node that is there and too busy to answer in time."""
    why = f"no answer within {limit_s:g} s, though it took the connection: --timeout gives it longer"
    return NodeAnswer(node, time.time(), error=why, slow=True)


def poll(plans: Sequence[NodePlan], limit_s: float = LIMIT_S) -> Iterator[NodeAnswer]:
    """Poll every node once, in the order of their answers; those without one within `limit_s` come last."""

    def ask(node: NodePoll) -> NodeAnswer:
        with contextlib.closing(node):
            return node.ask()

    polls = {p.node: NodePoll(p, limit_s) for p in plans}
    for name, answer in ask_all({name: partial(ask, node) for name, node in polls.items()}, limit_s):
        if answer is not None:
            yield answer
        elif polls[name].let_in:
            yield slow_answer(name, limit_s)
        else:
            yield NodeAnswer(name, time.time(), error=f"no answer within {limit_s:g} s")


def ask_all(questions: Mapping[str, Callable[[], T]], limit_s: float) -> Iterator[tuple[str, T | None]]:
    """Call all at once, each in a thread; yield (name, answer) as they come, then (name, None) of those without one
    within `limit_s`."""
    answers: queue.SimpleQueue[tuple[str, T]] = queue.SimpleQueue()

    def ask(name: str, question: Callable[[], T]) -> None:
        answers.put((name, question()))

    until = time.monotonic() + limit_s
    for name, question in questions.items():  # daemons: a node that hangs must not keep the program from ending
        threading.Thread(target=ask, args=(name, question), name=f"ask {name}", daemon=True).start()
    silent = dict.fromkeys(questions)
    while silent:
        try:
            name, answer = answers.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            break
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
            threading.Thread(target=self._keep, args=(plan,), name=f"watch {plan.node}", daemon=True).start()

    def answers(self) -> list[NodeAnswer]:
        """Answers of the nodes so far; one without a recent answer has an error."""
        now, out = time.time(), []
        for answer in list(self._latest.values()):
            old = now - answer.at
            silent = not answer.error and old > EVERY_S + self._limit_s
            out.append(NodeAnswer(answer.node, answer.at, error=f"no answer for {old:.0f} s") if silent else answer)
        return out

    def close(self) -> None:
        self._stop.set()

    def _keep(self, plan: NodePlan) -> None:
        with contextlib.closing(NodePoll(plan, self._limit_s)) as node:
            while not self._stop.is_set():
                self._latest[plan.node] = node.ask()
                self._stop.wait(EVERY_S)


MAX_PARALLEL = 64
"""Nodes that are checked at a time."""


def check_nodes(
    nodes: Iterable[Node],
    *,
    run: str = "",
    accept_new_host_keys: bool = False,
    answered: Callable[[NodeReport], None] = lambda report: None,
) -> list[NodeReport]:
    """Check all nodes at once; reports in their order. `answered` is called with each as it answers.

    Changes nothing on a node. A node that does not answer is a report like another; a reference of the inventory
    whose variable is not set is the user's mistake: InventoryError, before any node is checked.
    """
    wanted = list(nodes)
    check_references(wanted)
    pool = ThreadPoolExecutor(max_workers=max(1, min(MAX_PARALLEL, len(wanted))), thread_name_prefix="check")
    try:
        waiting = {pool.submit(_check, node, run, accept_new_host_keys): node.name for node in wanted}
        reports = {}
        for done in as_completed(waiting):
            reports[waiting[done]] = done.result()
            answered(done.result())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    found = dict(twice({n.name: n for n in wanted}, {n: r.facts for n, r in reports.items()}))
    for name, why in found.items():
        findings = (*reports[name].findings, Finding(UNUSABLE, "gpus", why))
        reports[name] = replace(reports[name], findings=findings)
    return compare([reports[node.name] for node in wanted])


def _check(node: Node, run: str, accept_new_host_keys: bool) -> NodeReport:
    try:
        real = resolved(node)
        with connected(transport_to(node, accept_new_host_keys=accept_new_host_keys)) as transport:
            began = time.time()
            done = transport.run(ARGV, stdin=script(real), timeout=TIMEOUT_S)
    except OrchestratorError as e:
        return unreachable(node, e.reason)
    return check_node(node, done, began, run)
