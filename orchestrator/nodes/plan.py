"""Node plans from an inventory: slots, devices, folders, transports and engines. A plan keeps references
(`${env:NAME}`) as they are written, as it is rendered into files that stay. They are resolved here, at the moment of
use: in `transport_of`, `engine_of` and `private_env`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.dispatch.deploy import NodePlan
from orchestrator.engine import Engine
from orchestrator.engines import UNUSABLE, Finding, find_engine
from orchestrator.errors import OrchestratorError
from orchestrator.inventory import Node, check_references, resolved
from orchestrator.inventory.references import has_reference, resolve
from orchestrator.nodes.check import NodeReport, check_node, compare, load_facts, unreachable
from orchestrator.nodes.facts import ARGV, DEFAULT_WORKDIR, TIMEOUT_S, NodeFacts, from_home, script
from orchestrator.nodes.occupancy import twice
from orchestrator.transport import LocalTransport, Transport
from worker.protocol import CPUS
from worker.protocol.environment import AITER_SWITCHES

if TYPE_CHECKING:
    from orchestrator.inventory import Inventory

RESULTS = "GEMMFLEET_RESULTS"
MAX_PARALLEL = 64
CONNECT_S = 5.0


# --- plans --------------------------------------------------------------------------------------------------------


def plan_nodes(
    inventory: Inventory, run: str, run_folder: Path, facts: Mapping[str, NodeFacts] | None = None
) -> list[NodePlan]:
    """One NodePlan a node. `gpus: auto` is one slot a GPU that was found, or one slot with all cores.

    `facts`: of the nodes (`check_nodes`); by default those that the run kept (`save_facts`).
    A remote node whose GPUs are neither listed nor known has no slots: leave it out until it answers.
    """
    known = load_facts(run_folder, inventory.nodes) if facts is None else facts
    return [_plan(node, run, run_folder, known.get(name)) for name, node in inventory.nodes.items()]


def _plan(node: Node, run: str, run_folder: Path, facts: NodeFacts | None) -> NodePlan:
    gpus, gfx, cu_num = _gpus(node, facts)
    slots = tuple(str(g) for g in gpus or ()) or (("0",) if gpus is not None else ())
    spec = find_engine(node.engine)
    python = node.python or (sys.executable if node.transport == "local" and not spec.runs_images else None)
    all_env = _all_env(node, run)
    env = {name: value for name, value in all_env.items() if not has_reference(value)}
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
        switches=tuple(n for n in sorted(all_env) if AITER_SWITCHES.fullmatch(n)),
        cache="../../.cache" if node.transport != "local" or node.workdir else "../../../.cache",
    )


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
    elif node.transport == "local":
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


def _folder(node: Node, run: str, run_folder: Path) -> str:
    """The node folder; of a remote node absolute, or relative to its home folder, where commands begin."""
    workdir = resolve({"workdir": node.workdir}, node.name, node.origin)["workdir"]
    if node.transport == "local":
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


def _all_env(node: Node, run: str) -> dict[str, str]:
    """The environment of a node's workers, references and all. `aiter:` wins over `env:`."""
    env = {**node.env, **find_engine(node.engine).env(node), **node.aiter.variables()}
    return {**env, RESULTS: f"{node.results}/{run}/{node.name}"} if node.results else env


# --- what is resolved, when it is used ----------------------------------------------------------------------------


def node_of(plan: NodePlan) -> Node:
    """The inventory's node that a plan was made of, its references unresolved."""
    assert plan.source is not None
    return plan.source


def private_env(plan: NodePlan) -> dict[str, str]:
    """The variables of the workers whose values come from our environment: for `Engine.start` alone, never for a
    file. Raises InventoryError naming file, line, node and variable."""
    node = node_of(plan)
    private = {name for name, value in _all_env(node, plan.run).items() if has_reference(value)}
    return {n: v for n, v in _all_env(resolved(node), plan.run).items() if n in private} if private else {}


def results_folder(plan: NodePlan) -> str | None:
    """The node's folder of results for this run, where the inventory names one."""
    return _all_env(resolved(node_of(plan)), plan.run).get(RESULTS) if node_of(plan).results else None


def transport_of(
    plan: NodePlan, *, accept_new_host_keys: bool = False, patient: bool = True, connect_s: float = CONNECT_S
) -> Transport:
    """Transport to a plan's node. Raise InventoryError where a reference cannot be resolved."""
    node = node_of(plan)
    return transport_to(node, accept_new_host_keys=accept_new_host_keys, patient=patient, connect_s=connect_s)


def transport_to(
    node: Node, *, accept_new_host_keys: bool = False, patient: bool = True, connect_s: float = CONNECT_S
) -> Transport:
    """Transport to a node of an inventory. `connect_s`: the time limit of `connect`; `patient`: a refused connection
    is tried again within it."""
    if node.transport == "local":
        return LocalTransport(node.name)
    from orchestrator.transport.ssh import SshTransport

    real = resolved(node)
    return SshTransport(
        node.name,
        real.host or node.name,
        user=real.user,
        port=real.port,
        identity=os.path.expanduser(real.identity) if real.identity else None,
        proxy_jump=real.proxy_jump,
        accept_new_host_keys=accept_new_host_keys,
        connect_timeout=connect_s,
        patient=patient,
        config=Path(real.ssh_config).expanduser() if real.ssh_config else None,
    )


def engine_of(plan: NodePlan, transport: Transport, *, progress: Callable[[str], None] = lambda text: None) -> Engine:
    """Engine of a plan's node. `progress` is called with the state of an image's pull."""
    made: Engine = find_engine(plan.engine).create(plan, transport, progress)
    return made


# --- asking the nodes ---------------------------------------------------------------------------------------------


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
    asked = list(nodes)
    check_references(asked)
    pool = ThreadPoolExecutor(max_workers=max(1, min(MAX_PARALLEL, len(asked))), thread_name_prefix="check")
    try:
        waiting = {pool.submit(_ask, node, run, accept_new_host_keys): node.name for node in asked}
        reports = {}
        for done in as_completed(waiting):
            reports[waiting[done]] = done.result()
            answered(done.result())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    found = dict(twice({n.name: n for n in asked}, {n: r.facts for n, r in reports.items()}))
    for name, why in found.items():
        findings = (*reports[name].findings, Finding(UNUSABLE, "gpus", why))
        reports[name] = replace(reports[name], findings=findings)
    return compare([reports[node.name] for node in asked])


def _ask(node: Node, run: str, accept_new_host_keys: bool) -> NodeReport:
    try:
        real = resolved(node)
        transport = transport_to(node, accept_new_host_keys=accept_new_host_keys)
        try:
            transport.connect()
            began = time.time()
            done = transport.run(ARGV, stdin=script(real), timeout=TIMEOUT_S)
        finally:
            transport.close()
    except OrchestratorError as e:
        return unreachable(node, e.reason)
    return check_node(node, done, began, run)
