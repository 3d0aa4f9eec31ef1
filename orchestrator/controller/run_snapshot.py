"""The status of a run from outside its controller: what its ledger says, and what its nodes answer now.

`gemmfleet status` calls `polled_status` once; its live view (cli/status.py) keeps a `RunSnapshot`, so that each round
replays only the new records of the journal.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from orchestrator.inventory.load import limit, load_inventory
from orchestrator.ledger.reader import LedgerReader, Replay
from orchestrator.machines.facts import Gpu, NodeFacts
from orchestrator.machines.node_plan import plan_nodes
from orchestrator.machines.node_poll import LIMIT_S, NodeAnswer, poll
from orchestrator.paths import RunConfig, RunPaths, holder
from orchestrator.view.header import RunHeader
from orchestrator.view.status import NodeStatus, RunStatus, run_status, state_now
from worker.protocol import HOT_C
from worker.text import uncoloured

LOG_LINES = 3
"""Last lines of a node's log that the status shows."""
TAIL_BYTES = 8192
"""The last lines are looked for in this many bytes at the end of the log."""


def polled_status(paths: RunPaths, limit_s: float = LIMIT_S) -> RunStatus:
    """The status of a run, with the answer of each node within `limit_s`. Raise LedgerError or InputError."""
    snapshot = RunSnapshot(paths)
    status = snapshot.status()
    for answer in poll(snapshot.plans, limit_s):
        snapshot.add(status, answer)
    return status


class RunSnapshot:
    """Takes snapshots of a run. Raises LedgerError or InputError if the run folder cannot be read."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._config = RunConfig.read(paths.config)
        inventory = limit(load_inventory(paths.inventory), self._config.limit)
        self._replay = Replay()
        self.plans = plan_nodes(inventory, self._config.run, paths.root)

    def status(self) -> RunStatus:
        """The status from the ledger and the run's folder."""
        controller = holder(self._paths.lock)
        with LedgerReader.open_readonly(self._paths.ledger, replay=self._replay) as ledger, ledger.snapshot():
            header = RunHeader.of(ledger, self._config, {plan.node: plan.slots for plan in self.plans})
            state = state_now(ledger.state, driven=bool(controller))
            end = None if controller else ledger.meta("ended")
            status = run_status(ledger.replayed, header, state, time.time(), end=end)
            devices = {(slot.node, slot.slot): str(slot.device.get("device", "")) for slot in ledger.slots()}
        if controller:
            status.controller = f"process {controller['pid']} on {controller.get('host', '?')}"
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
        """Add a node's answer to the status, and return the node's part of it."""
        plan = next(plan for plan in self.plans if plan.node == answer.node)
        node = next(node for node in status.nodes if node.name == plan.node)
        node.live = {"at": round(answer.at, 3), "error": answer.error, "slow": answer.slow}
        if answer.error:
            if status.state not in ("finished", "cancelled", "planned"):
                node.state = "slow" if answer.slow else "unreachable"
                node.detail = answer.error
            return node
        if answer.facts is not None:
            node.live |= _facts_now(answer.facts, status.run)
        workers = {worker.slot: worker for worker in answer.workers}
        for slot in node.slots:
            has_gpu = bool(plan.devices.get(slot.slot, {}).get("HIP_VISIBLE_DEVICES"))
            if answer.facts is not None and has_gpu:
                number = int(slot.slot)
                gpus = answer.facts.gpus
                slot.gpu = gpu_now(number, gpus[number]) if number < len(gpus) else None
            worker = workers.get(slot.slot)
            if worker is None or (worker.state != "running" and worker.code in (None, 0)):
                slot.state = "no worker"
            elif worker.state != "running":
                slot.state = f"worker {worker.how_it_ended}"
        return node


def _facts_now(facts: NodeFacts, run: str) -> dict[str, Any]:
    """Load, containers and GPUs of a node. `run`: ours."""
    containers = []
    for container in facts.containers:
        containers.append(
            {
                "name": container.name,
                "image": container.image,
                "status": container.status,
                "slot": container.slot or None,
                "ours": container.run == run,
            }
        )
    return {
        "load": facts.values.get("load", "").split(" ")[:3],
        "containers": containers,
        "gpus": [gpu_now(number, gpu) for number, gpu in enumerate(facts.gpus)],
    }


def _tail(paths: RunPaths, node: str) -> list[str]:
    """The last lines of a node's log; [] if the node has no log yet."""
    try:
        with paths.log(node).open("rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - TAIL_BYTES))
            return uncoloured(f.read().decode("utf-8", "replace")).splitlines()[-LOG_LINES:]
    except OSError:
        return []


def gpu_now(number: int, gpu: Gpu) -> dict[str, Any]:
    """The reading of a GPU for `status`, without unknown values. `health`: ok, or the problems."""
    problems = []
    if gpu.uncorrectable:
        errors = ", ".join(f"{block} {count}" for block, count in gpu.uncorrectable.items())
        problems.append(f"uncorrectable errors: {errors}")
    hottest = max(gpu.temperature_c.values(), default=0.0)
    if hottest >= HOT_C:
        problems.append(f"{hottest:.0f} C")
    reading = {
        "number": number,
        "gfx": gpu.gfx,
        "use_pct": gpu.use_pct,
        "memory_used": gpu.memory_used,
        "memory_total": gpu.memory_total,
        "temperature_c": gpu.temperature_c or None,
        "power_w": gpu.power_w,
        "partition": gpu.partition or None,
        "uncorrectable": gpu.uncorrectable or None,
        "health": "; ".join(problems) or "ok",
    }
    return {name: value for name, value in reading.items() if value is not None}
