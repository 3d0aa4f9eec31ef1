"""How a run stands, from outside: the ledger (read-only) plus a live poll of every node."""

from __future__ import annotations

import contextlib
import json
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from orchestrator.busy import busy_sentence
from orchestrator.dispatch.deploy import NodePlan
from orchestrator.dispatch.lock import holder
from orchestrator.drive import describe
from orchestrator.errors import OrchestratorError
from orchestrator.events import CanaryFailed, CanaryPassed, NodeBusy, NodeDraining, NodeJoined, NodeLost, Quarantine
from orchestrator.fleet import engine_of, plan_nodes, transport_of
from orchestrator.inventory import limit, load_inventory
from orchestrator.ledger import LedgerReader
from orchestrator.planning import CostModel
from orchestrator.runs import RunConfig
from orchestrator.status import NodeStatus, RunStatus, SlotStatus

if TYPE_CHECKING:
    from orchestrator.engine import WorkerState
    from orchestrator.paths import RunPaths

POLL_S = 5.0
"""A node that has not answered by then is shown as unreachable."""
LOG_LINES = 3


def survey(paths: RunPaths, *, poll: bool = True) -> RunStatus:
    """The status of a run. Raises LedgerError or InputError where the run folder cannot be read."""
    config = RunConfig.read(paths.config)
    inventory = load_inventory(paths.inventory)
    if config.limit is not None:
        inventory = limit(inventory, config.limit)
    plans = plan_nodes(inventory, config.run, paths.root)
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        status = _from_ledger(paths, config, ledger, plans)
    if poll:
        _poll(status, plans)
    return status


def _from_ledger(paths: RunPaths, config: RunConfig, ledger: LedgerReader, plans: list[NodePlan]) -> RunStatus:
    counts, now = ledger.counts(), time.time()
    who = holder(paths.lock)
    state = ledger.state
    if not who and state in ("preparing", "running"):
        state = "interrupted"  # its controller died without a word
    s = RunStatus(
        config.run,
        state,
        total=counts.total,
        tuned=counts.tuned,
        skipped=counts.skipped,
        failed=counts.failed,
        running=counts.running,
        started=config.created,
        controller=f"process {who['pid']} on {who.get('host', '?')}" if who else "",
        family=config.family,
        tuner=config.tuner,
    )
    rate = ledger.rate(now)
    s.rate_per_min = rate * 60.0 if rate else None
    per_node = ledger.per_node()
    devices = {(x.node, x.slot): x for x in ledger.slots()}
    for plan in plans:
        node = NodeStatus(plan.node, slots=[SlotStatus(x) for x in plan.slots])
        node.tuned, node.failed = per_node.get(plan.node, (0, 0))
        for slot in node.slots:
            if (plan.node, slot.slot) in devices:
                slot.device = str(devices[plan.node, slot.slot].device.get("device", ""))
        node.log = _tail(paths, plan.node)
        s.nodes.append(node)
    _replay_states(s, ledger)
    _in_flight(s, ledger)
    s.eta_s = _eta(s, ledger, config) if state in ("planned", "preparing", "running", "interrupted") else 0.0
    return s


def _replay_states(s: RunStatus, ledger: LedgerReader) -> None:
    """Node and slot states as the journal left them."""
    nodes = {n.name: n for n in s.nodes}
    slots = {(n.name, x.slot): x for n in s.nodes for x in n.slots}
    for _, record in ledger.journal_records():
        match record:
            case NodeJoined(node, _) if node in nodes:
                nodes[node].state, nodes[node].detail = "ready", ""
            case NodeLost(node, detail) if node in nodes:
                nodes[node].state, nodes[node].detail = "unreachable", detail
            case NodeBusy(node, doing, detail) if node in nodes:
                nodes[node].detail = "" if doing == "free" else busy_sentence(node, doing, detail)
                if doing in ("wait", "free"):
                    nodes[node].state = "preparing"
            case NodeDraining(node) if node in nodes:
                nodes[node].state = "draining"
            case CanaryPassed(node, slot, _) if (node, slot) in slots:
                slots[node, slot].state = "idle"
            case CanaryFailed(node, slot, _) if (node, slot) in slots:
                slots[node, slot].state = "canary failed"
            case Quarantine(node, slot, why, _) if (node, slot) in slots:
                slots[node, slot].state, nodes[node].detail = "quarantined", why
            case _:
                pass


def _in_flight(s: RunStatus, ledger: LedgerReader) -> None:
    family = ledger.family
    slots = {(n.name, x.slot): (n, x) for n in s.nodes for x in n.slots}
    for attempt in ledger.attempts(open_only=True):
        if attempt.started_at is None or (attempt.node, attempt.slot) not in slots:
            continue
        node, slot = slots[attempt.node, str(attempt.slot)]
        slot.attempt, slot.state, slot.since, slot.doing = attempt.id, "busy", attempt.started_at, attempt.id
        if attempt.current is not None:
            key = dict(zip(family.key_names, ledger.key(attempt.current), strict=True))
            slot.doing = f"{describe(key)}  ({attempt.id})"
        if node.state == "ready":
            node.state = "busy"
    for node_ in s.nodes:
        if node_.slots and all(x.state == "quarantined" for x in node_.slots):
            node_.state = "quarantined"


def _eta(s: RunStatus, ledger: LedgerReader, config: RunConfig) -> float:
    """Estimated seconds of what is not settled, corrected by how long the settled took so far, over the slots."""
    family = ledger.family
    cost = CostModel(**ledger.meta("cost"))
    done = left = 0.0
    for shape in ledger.shapes():
        if shape.state == "skipped":
            continue
        c = cost.cost_s(dict(zip(family.key_names, shape.key, strict=True)), family)
        if shape.state == "pending":
            left += c
        else:
            done += c
    spent = sum(a.seconds or 0.0 for a in ledger.attempts())
    ratio = spent / done if done > 0 and spent > 0 else 1.0
    return left * ratio / max(1, sum(len(n.slots) for n in s.nodes))


def _tail(paths: RunPaths, node: str) -> list[str]:
    try:
        with paths.log(node).open("rb") as f:
            f.seek(max(0, f.seek(0, 2) - 8192))
            return f.read().decode("utf-8", "replace").splitlines()[-LOG_LINES:]
    except OSError:
        return []


def _poll(s: RunStatus, plans: list[NodePlan]) -> None:
    """Ask every node's engine at once; who does not answer in time holds up nobody."""
    pool = ThreadPoolExecutor(max_workers=min(64, len(plans)))
    asked: dict[str, Future[list[WorkerState]]] = {p.node: pool.submit(_ask, p) for p in plans}
    wait(asked.values(), timeout=POLL_S)
    pool.shutdown(wait=False, cancel_futures=True)
    over = s.state in ("finished", "cancelled", "planned")
    for node in s.nodes:
        answer = asked[node.name]
        if not answer.done():
            node.state, node.detail = "unreachable", f"no answer within {POLL_S:g} s"
            continue
        try:
            workers = {w.slot: w for w in answer.result()}
        except OrchestratorError as e:
            if not over:
                node.state, node.detail = "unreachable", str(e)
            continue
        for slot in node.slots:
            worker = workers.get(slot.slot)
            if worker is not None and worker.state == "running":
                continue
            slot.state = "no worker" if worker is None or worker.code in (None, 0) else f"worker {worker.why}"


def _ask(plan: NodePlan) -> list[WorkerState]:
    transport = transport_of(plan)
    transport.connect()
    try:
        with contextlib.closing(engine_of(plan, transport)) as engine:
            return engine.list()
    finally:
        transport.close()


def to_json(status: RunStatus) -> str:
    """The document of `status --json`."""
    return json.dumps(status.to_json(), indent=1)
