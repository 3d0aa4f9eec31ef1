"""Node plans from an inventory: slots, devices, folders, environment. A plan keeps references (`${env:NAME}`) as they
are written, as it is rendered into files that stay; `link` resolves them, at the moment of use.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.dispatch.deploy import NodePlan
from orchestrator.engines import find_engine
from orchestrator.inventory import Node
from orchestrator.inventory.values import has_reference, resolve
from orchestrator.nodes.check import load_facts
from orchestrator.nodes.facts import DEFAULT_WORKDIR, NodeFacts, from_home
from orchestrator.nodes.occupancy import device_lock
from worker.protocol import CPUS, DEVICE_LOCK, DEVICE_SHARED
from worker.protocol.paths import AITER_SWITCHES

if TYPE_CHECKING:
    from orchestrator.inventory import Inventory

RESULTS = "GEMMFLEET_RESULTS"
GRANTED = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Variables by which schedulers name the GPUs of a lease."""


def plan_nodes(
    inventory: Inventory, run: str, run_folder: Path, facts: Mapping[str, NodeFacts] | None = None
) -> list[NodePlan]:
    """One NodePlan a machine; pools of leases have none.

    `gpus: auto` is one slot a GPU that was found, or one slot with all cores.

    `facts`: of the nodes (`check_nodes`); by default those that the run kept (`save_facts`).
    A remote node whose GPUs are neither listed nor known has no slots: leave it out until it answers.
    """
    known = load_facts(run_folder, inventory.nodes) if facts is None else facts
    machines = [n for n in inventory.nodes.values() if n.lease is None]
    return [_plan(n, run, run_folder, known.get(n.name)) for n in machines]


def _plan(node: Node, run: str, run_folder: Path, facts: NodeFacts | None) -> NodePlan:
    gpus, gfx, cu_num = _gpus(node, facts)
    slots = tuple(str(g) for g in gpus or ()) or (("0",) if gpus is not None else ())
    spec = find_engine(node.engine)
    python = node.python or (sys.executable if node.is_here and not (spec.runs_images or spec.enter) else None)
    whole_env = all_env(node, run)
    env = {name: value for name, value in whole_env.items() if not has_reference(value)}
    return NodePlan(
        node=node.name,
        folder=_folder(node, run, run_folder),
        slots=slots,
        transport=node.transport,
        engine=node.engine,
        python=python,
        env=env,
        devices=_devices(node, gpus or [], slots, facts),
        gfx=node.gfx or gfx,
        cu_num=node.cu_num or cu_num,
        source=node,
        run=run,
        docker=spec.container(node, run) if spec.container else None,
        switches=tuple(n for n in sorted(whole_env) if AITER_SWITCHES.fullmatch(n)),
        cache=_cache(node),
    )


def plan_lease(node: Node, run: str, facts: NodeFacts, granted: Mapping[str, str]) -> tuple[NodePlan, tuple[str, ...]]:
    """Plan of a leased node, and the id of each slot's GPU on its host. `granted`: what its scheduler set of GRANTED.

    Slots are the devices that were granted. HIP counts within ROCR_VISIBLE_DEVICES, which is left as it is.
    """
    lists = {name: [x for x in granted.get(name, "").split(",") if x] for name in GRANTED}
    found = next((x for x in lists.values() if x), [])
    n = node.gpus if isinstance(node.gpus, int) else len(found) or len(facts.gpus)
    plan = _plan(node.model_copy(update={"gpus": n}), run, Path(), facts)
    if n == 0:
        return plan, ("",)
    devices, ids = {}, []
    for i, slot in enumerate(plan.slots):
        hip = lists["HIP_VISIBLE_DEVICES"] if not lists["ROCR_VISIBLE_DEVICES"] else []
        cuda = lists["CUDA_VISIBLE_DEVICES"]
        own = {
            "HIP_VISIBLE_DEVICES": hip[i] if i < len(hip) else str(i),
            "CUDA_VISIBLE_DEVICES": cuda[i] if i < len(cuda) else str(i),
        }
        devices[slot] = {**plan.devices[slot], **own}
        number = found[i] if i < len(found) else str(i)
        known = facts.gpus[int(number)].id if number.isdigit() and int(number) < len(facts.gpus) else ""
        ids.append(known or number)
    return replace(plan, devices=devices), tuple(ids)


def with_device_locks(plan: NodePlan, *, shared: bool) -> NodePlan:
    """The plan with a lock for each slot's device, which its worker holds on the host. `shared`: it waits for no other
    run."""
    devices = {}
    for slot, env in plan.devices.items():
        name = device_lock(int(slot) if env["HIP_VISIBLE_DEVICES"] else None)
        devices[slot] = {**env, DEVICE_LOCK: name, **({DEVICE_SHARED: "1"} if shared else {})}
    return replace(plan, devices=devices)


def device_memory(nodes: Sequence[NodePlan], facts: Mapping[str, NodeFacts]) -> int | None:
    """Bytes of memory of the largest device that the nodes' slots have; None where one of them is unknown.

    A slot without a GPU has its machine's memory.
    """
    found: list[int] = []
    for n in nodes:
        known = facts.get(n.node)
        if known is not None and known.gpus:
            sizes = [g.memory_total for g in known.gpus]
        elif n.transport == "local":
            from worker.device.probe import find_gpus, memory_bytes

            on_gpus = any(d["HIP_VISIBLE_DEVICES"] for d in n.devices.values())
            sizes = [g["memory"] for g in find_gpus()] if on_gpus else [memory_bytes()]
        else:
            sizes = [None]
        if None in sizes:
            return None
        found += [s for s in sizes if s]
    return max(found, default=None)


def _gpus(node: Node, facts: NodeFacts | None) -> tuple[list[int] | None, str | None, int | None]:
    """(numbers of the GPUs to use or None for unknown, gfx, cu_num) of a node."""
    if facts is not None:
        found, gfx, cu_num = len(facts.gpus), facts.gfx, facts.cu_num
    elif node.is_here:
        from worker.device.probe import gpu_count, identify

        seen = identify()
        found = gpu_count() if node.gpus == "auto" else 0
        gfx = str(seen["gfx"]) if seen.get("gfx") else None
        cu_num = int(seen["cu_num"]) if seen.get("cu_num") else None
    else:
        found, gfx, cu_num = -1, None, None
    if isinstance(node.gpus, tuple):
        return list(node.gpus), gfx, cu_num
    if isinstance(node.gpus, int):
        return list(range(node.gpus)), gfx, cu_num
    return (list(range(found)) if found >= 0 else None), gfx, cu_num


def _cache(node: Node) -> str:
    """Path from the node folder to what outlives a run; "" for none."""
    if node.lease is not None:
        return node.cache or ""
    return "../../.cache" if not node.is_here or node.workdir else "../../../.cache"


def _folder(node: Node, run: str, run_folder: Path) -> str:
    """The node folder; of a remote node absolute, or relative to where commands begin: its home folder, or that of its
    lease."""
    if node.lease is not None:
        return node.name
    workdir = resolve({"workdir": node.workdir}, node.name, node.origin)["workdir"]
    if node.is_here:
        folder = Path(workdir).expanduser() / run / node.name if workdir else run_folder / "work" / node.name
        return str(folder.absolute())
    return f"{from_home(workdir or DEFAULT_WORKDIR).rstrip('/')}/{run}/{node.name}"


def _devices(node: Node, gpus: list[int], slots: tuple[str, ...], facts: NodeFacts | None) -> dict[str, dict[str, str]]:
    """Each slot's own environment: the one GPU that it sees, and the cores that it runs on."""
    alone = find_engine(node.engine).isolates(node)
    out = {}
    for i, slot in enumerate(slots):
        seen = "" if not gpus else "0" if alone else slot  # alone in its container, a GPU has the number 0
        out[slot] = {"HIP_VISIBLE_DEVICES": seen, "CUDA_VISIBLE_DEVICES": seen}
        if gpus and (cpus := _cpus(node, i, gpus[i], facts)):
            out[slot][CPUS] = cpus
    return out


def _cpus(node: Node, index: int, gpu: int, facts: NodeFacts | None) -> str:
    """The cores near a slot's GPU as the kernel lists them, "" for anywhere."""
    if node.numa == "none" or facts is None:
        return ""
    if node.numa == "auto":
        return facts.gpus[gpu].cpus if gpu < len(facts.gpus) else ""
    wanted = node.numa[index] if index < len(node.numa) else None
    return next((g.cpus for g in facts.gpus if g.numa == wanted and g.cpus), "")


def all_env(node: Node, run: str) -> dict[str, str]:
    """The environment of a node's workers, references and all. `aiter:` wins over `env:`."""
    env = {**node.env, **find_engine(node.engine).env(node), **node.aiter.variables()}
    return {**env, RESULTS: f"{node.results}/{run}/{node.name}"} if node.results else env
