"""How a run stands, from outside: the ledger (read-only) plus a live poll of every node."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

from orchestrator.busy import busy_sentence
from orchestrator.dispatch.deploy import NodePlan
from orchestrator.dispatch.lock import holder
from orchestrator.events import CanaryFailed, CanaryPassed, NodeBusy, NodeDraining, NodeJoined, NodeLost, Quarantine
from orchestrator.fleet import plan_nodes
from orchestrator.inventory import limit, load_inventory
from orchestrator.ledger import LedgerReader
from orchestrator.livepoll import Answer, poll
from orchestrator.nodefindings import HOT_C
from orchestrator.planning import CostModel
from orchestrator.runs import RunConfig
from orchestrator.shapes import describe
from orchestrator.status import NodeStatus, RunStatus, SlotStatus

if TYPE_CHECKING:
    from orchestrator.nodefacts import Gpu
    from orchestrator.paths import RunPaths

LOG_LINES = 3


def survey(paths: RunPaths) -> RunStatus:
    """The status of a run, with what every node says now. Raises LedgerError or InputError."""
    look = Look(paths)
    status = look.status()
    for answer in poll(look.plans):
        look.add(status, answer)
    return status


class Look:
    """At one run, again and again. Raises LedgerError or InputError where the run folder cannot be read."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._config = RunConfig.read(paths.config)
        inventory = load_inventory(paths.inventory)
        if self._config.limit is not None:
            inventory = limit(inventory, self._config.limit)
        self.plans = plan_nodes(inventory, self._config.run, paths.root)

    def status(self) -> RunStatus:
        """What the ledger and the run's folder say."""
        with LedgerReader.open_readonly(self._paths.ledger) as ledger:
            status = _from_ledger(self._paths, self._config, ledger, self.plans)
        for path in self._paths.results():
            with contextlib.suppress(OSError):
                stat = path.stat()
                status.files.append({"path": str(path), "bytes": stat.st_size, "written": stat.st_mtime})
        return status

    def add(self, status: RunStatus, answer: Answer) -> NodeStatus:
        """The node that answered, with its answer in the picture."""
        plan = next(p for p in self.plans if p.node == answer.node)
        add_answer(status, plan, answer)
        return next(n for n in status.nodes if n.name == answer.node)


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


def add_answer(s: RunStatus, plan: NodePlan, answer: Answer) -> None:
    """What a node said just now, into the picture."""
    node = next(n for n in s.nodes if n.name == plan.node)
    node.live = {"at": round(answer.at, 3), "error": answer.error}
    over = s.state in ("finished", "cancelled", "planned")
    if answer.error:
        if not over:
            node.state, node.detail = "unreachable", answer.error
        return
    facts = answer.facts
    if facts is not None:
        node.live |= {
            "load": facts.values.get("load", "").split(" ")[:3],
            "containers": [
                {"name": c.name, "image": c.image, "status": c.status, "slot": c.slot or None, "ours": c.run == s.run}
                for c in facts.containers
            ],
            "gpus": [gpu_now(i, g) for i, g in enumerate(facts.gpus)],
        }
    workers = {w.slot: w for w in answer.workers}
    for slot in node.slots:
        if facts is not None and plan.devices.get(slot.slot, {}).get("HIP_VISIBLE_DEVICES"):
            number = int(slot.slot)
            slot.gpu = gpu_now(number, facts.gpus[number]) if number < len(facts.gpus) else None
        worker = workers.get(slot.slot)
        if worker is not None and worker.state == "running":
            continue
        slot.state = "no worker" if worker is None or worker.code in (None, 0) else f"worker {worker.why}"


def gpu_now(number: int, gpu: Gpu) -> dict[str, Any]:
    """A GPU's reading for `status`: what is not known is left out. `health`: ok, or what is wrong in words."""
    errors = ", ".join(f"{block} {n}" for block, n in gpu.uncorrectable.items())
    hot = max(gpu.temperature_c.values(), default=0.0)
    wrong = [f"uncorrectable errors: {errors}"] if errors else []
    wrong += [f"{hot:.0f} C"] if hot >= HOT_C else []
    found = {
        "number": number, "gfx": gpu.gfx, "use_pct": gpu.use_pct, "memory_used": gpu.memory_used,
        "memory_total": gpu.memory_total, "temperature_c": gpu.temperature_c or None, "power_w": gpu.power_w,
        "partition": gpu.partition or None, "uncorrectable": gpu.uncorrectable or None,
        "health": "; ".join(wrong) or "ok",
    }  # fmt: skip
    return {k: v for k, v in found.items() if v is not None}


def to_json(status: RunStatus) -> str:
    """The document of `status --json`."""
    return json.dumps(status.to_json(), indent=1)
