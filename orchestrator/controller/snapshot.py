"""Snapshot of a run from outside: the ledger (read-only) plus a live poll of every node."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from orchestrator.controller.deploy import NodePlan
from orchestrator.controller.node_check import LIMIT_S, NodeAnswer, poll
from orchestrator.controller.node_plan import plan_nodes
from orchestrator.inventory.load import limit, load_inventory
from orchestrator.ledger.reader import LedgerReader, Replay
from orchestrator.paths import RunConfig, holder
from orchestrator.view.status import NodeStatus, RunHeader, RunStatus, run_status, state_now
from worker.device import HOT_C
from worker.text import uncoloured

if TYPE_CHECKING:
    from orchestrator.controller.facts import Gpu
    from orchestrator.paths import RunPaths

LOG_LINES = 3


def polled_status(paths: RunPaths, limit_s: float = LIMIT_S) -> RunStatus:
    """Status of a run, with the answers of every node within `limit_s`. Raise LedgerError or InputError."""
    snapshot = RunSnapshot(paths)
    status = snapshot.status()
    for answer in poll(snapshot.plans, limit_s):
        snapshot.add(status, answer)
    return status


class RunSnapshot:
    """Snapshots of one run, as often as needed. Raise LedgerError or InputError where the run folder cannot be read."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._config = RunConfig.read(paths.config)
        inventory = load_inventory(paths.inventory)
        if self._config.limit is not None:
            inventory = limit(inventory, self._config.limit)
        self._replay = Replay()
        self.plans = plan_nodes(inventory, self._config.run, paths.root)

    def status(self) -> RunStatus:
        """Status from the ledger and the run's folder."""
        who = holder(self._paths.lock)
        with LedgerReader.open_readonly(self._paths.ledger, replay=self._replay) as ledger, ledger.snapshot():
            about = RunHeader.of(ledger, self._config, {p.node: p.slots for p in self.plans})
            word = state_now(ledger.state, driven=bool(who))
            status = run_status(ledger.replayed, about, word, time.time(), end=None if who else ledger.meta("ended"))
            devices = {(x.node, x.slot): str(x.device.get("device", "")) for x in ledger.slots()}
        status.controller = f"process {who['pid']} on {who.get('host', '?')}" if who else ""
        for node in status.nodes:
            node.log = _tail(self._paths, node.name)
            for slot in node.slots:
                slot.device = devices.get((node.name, slot.slot), "")
        for path in self._paths.results():
            with contextlib.suppress(OSError):
                stat = path.stat()
                status.files.append({"path": str(path), "bytes": stat.st_size, "written": stat.st_mtime})
        return status

    def add(self, status: RunStatus, answer: NodeAnswer) -> NodeStatus:
        """Add an answer to the status; return the node's part of it."""
        plan = next(p for p in self.plans if p.node == answer.node)
        add_answer(status, plan, answer)
        return next(n for n in status.nodes if n.name == answer.node)


def _tail(paths: RunPaths, node: str) -> list[str]:
    try:
        with paths.log(node).open("rb") as f:
            f.seek(max(0, f.seek(0, 2) - 8192))
            return uncoloured(f.read().decode("utf-8", "replace")).splitlines()[-LOG_LINES:]
    except OSError:
        return []


def add_answer(s: RunStatus, plan: NodePlan, answer: NodeAnswer) -> None:
    """Add the answer of a node to the status."""
    node = next(n for n in s.nodes if n.name == plan.node)
    node.live = {"at": round(answer.at, 3), "error": answer.error, "slow": answer.slow}
    over = s.state in ("finished", "cancelled", "planned")
    if answer.error:
        if not over:
            node.state, node.detail = "slow" if answer.slow else "unreachable", answer.error
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
    """Reading of a GPU for `status`, without unknown values. `health`: ok, or the problems."""
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
