"""Plans of nodes from an inventory (slots, devices, folders, environment), and what leads to a planned node: its
transport, its engine, and what its workers get of our environment.

A plan keeps references (`${env:NAME}`) as they are written, as it is rendered into files that stay; they are resolved
at the moment of use.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.controller.deploy import NodePlan
from orchestrator.controller.facts import DEFAULT_WORKDIR, NodeFacts, facts_here, from_home, load_facts
from orchestrator.controller.occupancy import device_lock
from orchestrator.engines import Engine, find_engine
from orchestrator.inventory.load import resolved
from orchestrator.inventory.model import Inventory, Node
from orchestrator.inventory.values import REFERENCE_RE, has_reference, resolve
from orchestrator.transport import LocalTransport, Transport
from worker.protocol import CPUS, DEVICE_LOCK, DEVICE_SHARED
from worker.protocol.paths import AITER_SWITCHES

# A login takes long on a busy node, or where the account comes from a directory.
CONNECT_S = 15.0
RESULTS = "GEMMFLEET_RESULTS"
# Variables by which schedulers name the GPUs of a lease.
GRANTED = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


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
    return [_plan(n, run, run_folder, known.get(n.name) or (facts_here() if n.is_here else None)) for n in machines]


def _plan(node: Node, run: str, run_folder: Path, facts: NodeFacts | None) -> NodePlan:
    found = range(node.gpus) if isinstance(node.gpus, int) else () if facts is None else range(len(facts.gpus))
    gpus = node.gpus if isinstance(node.gpus, tuple) else tuple(found)
    known = facts is not None or node.gpus != "auto"
    spec = find_engine(node.engine)
    python = node.python or (sys.executable if node.is_here and not (spec.runs_images or spec.enter) else None)
    whole_env = all_env(node, run)
    env = {name: value for name, value in whole_env.items() if not has_reference(value)}
    return NodePlan(
        node=node.name,
        folder=_folder(node, run, run_folder),
        slots=tuple(map(str, gpus)) or (("0",) if known else ()),
        transport=node.transport,
        engine=node.engine,
        python=python,
        env=env,
        devices=dict(_devices(node, gpus, facts)) if known else {},
        gfx=node.gfx or (facts.gfx if facts else None),
        cu_num=node.cu_num or (facts.cu_num if facts else None),
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
    rocr, hip, cuda = ([x for x in granted.get(name, "").split(",") if x] for name in GRANTED)
    n = node.gpus if isinstance(node.gpus, int) else len(rocr or hip or cuda) or len(facts.gpus)
    plan = _plan(node.model_copy(update={"gpus": n}), run, Path(), facts)
    if n == 0:
        return plan, ("",)
    lists = (rocr or hip or cuda, [] if rocr else hip, cuda)
    numbers, hips, cudas = ([*x, *map(str, range(len(x), n))] for x in lists)
    own = zip(plan.slots, hips, cudas, strict=False)
    devices = {s: {**plan.devices[s], "HIP_VISIBLE_DEVICES": h, "CUDA_VISIBLE_DEVICES": c} for s, h, c in own}
    known = {str(number): gpu.id for number, gpu in enumerate(facts.gpus)}
    return replace(plan, devices=devices), tuple(known.get(x) or x for x in numbers[:n])


def with_device_locks(plan: NodePlan, *, shared: bool) -> NodePlan:
    """The plan with a lock for each slot's device, which its worker holds on the host. `shared`: it waits for no other
    run."""
    share = {DEVICE_SHARED: "1"} if shared else {}
    locks = {s: device_lock(int(s) if env["HIP_VISIBLE_DEVICES"] else None) for s, env in plan.devices.items()}
    return replace(plan, devices={s: {**env, DEVICE_LOCK: locks[s], **share} for s, env in plan.devices.items()})


def device_memory(nodes: Sequence[NodePlan], facts: Mapping[str, NodeFacts]) -> int | None:
    """Bytes of memory of the largest device that the nodes' slots have; None where one of them is unknown.

    A slot without a GPU has its machine's memory.
    """
    sizes: list[int | None] = []
    for n in nodes:
        known = facts.get(n.node) or (facts_here() if n.transport == "local" else NodeFacts({}))
        on_gpus = any(env["HIP_VISIBLE_DEVICES"] for env in n.devices.values())
        sizes += [g.memory_total for g in known.gpus] if on_gpus else [(known.number("memory_kb") or 0) * 1024 or None]
    return None if None in sizes else max((s for s in sizes if s), default=None)


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


def _devices(node: Node, gpus: Sequence[int], facts: NodeFacts | None) -> Iterator[tuple[str, dict[str, str]]]:
    """Each slot's own environment: the one GPU that it sees, and the cores near it, as the kernel lists them."""
    alone = find_engine(node.engine).isolates(node)
    there = dict(enumerate(facts.gpus)) if facts is not None else {}
    for i, gpu in enumerate(gpus):
        seen = "0" if alone else str(gpu)  # alone in its container, a GPU has the number 0
        if isinstance(node.numa, tuple):
            wanted = node.numa[i] if i < len(node.numa) else None
            cpus = next((g.cpus for g in there.values() if g.numa == wanted and g.cpus), "")
        else:
            cpus = there[gpu].cpus if node.numa == "auto" and gpu in there else ""
        yield str(gpu), {"HIP_VISIBLE_DEVICES": seen, "CUDA_VISIBLE_DEVICES": seen, **({CPUS: cpus} if cpus else {})}
    if not gpus:
        yield "0", {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": ""}


def all_env(node: Node, run: str) -> dict[str, str]:
    """The environment of a node's workers, references and all. `aiter:` wins over `env:`."""
    env = {**node.env, **find_engine(node.engine).env(node), **node.variables()}
    env |= {**node.aiter.variables(), **node.aiter.compilers}
    return {**env, RESULTS: f"{node.results}/{run}/{node.name}"} if node.results else env


# --- the way to a planned node ------------------------------------------------------------------------------------


def node_of(plan: NodePlan) -> Node:
    """The inventory's node that a plan was made of, its references unresolved."""
    assert plan.source is not None
    return plan.source


def private_env(plan: NodePlan) -> dict[str, str]:
    """The variables of the workers whose values come from our environment: for `Engine.start` alone, never for a
    file. Raises InventoryError naming file, line, node and variable."""
    private = [name for name, value in all_env(node_of(plan), plan.run).items() if has_reference(value)]
    real = all_env(resolved(node_of(plan)), plan.run) if private else {}
    return {name: real[name] for name in private}


def results_folder(plan: NodePlan) -> str | None:
    """The node's folder of results for this run, where the inventory names one."""
    return all_env(resolved(node_of(plan)), plan.run).get(RESULTS) if node_of(plan).results else None


def transport_to(
    node: Node, *, accept_new_host_keys: bool = False, patient: bool = True, connect_s: float = CONNECT_S
) -> Transport:
    """Transport to a node of an inventory. `connect_s`: the time limit of `connect`; `patient`: a refused connection
    is tried again within it. Raise InventoryError where a reference cannot be resolved."""
    if node.is_here:
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


def transport_of(plan: NodePlan, *, accept_new_host_keys: bool = False) -> Transport:
    """Transport to a plan's node, as `transport_to` makes it."""
    return transport_to(node_of(plan), accept_new_host_keys=accept_new_host_keys)


def login_line(node: Node) -> str:
    """Command that logs in to the node as the inventory describes it; a reference becomes a shell variable."""
    flags = (("-F", node.ssh_config), ("-p", node.port), ("-i", node.identity), ("-J", node.proxy_jump))
    words = [w for flag, value in flags if value is not None for w in (flag, _typed(str(value)))]
    user = f"{_typed(node.user)}@" if node.user else ""
    return " ".join(["ssh", *words, f"{user}{_typed(node.host or node.name)}", "true"])


def _typed(text: str) -> str:
    shown, n = REFERENCE_RE.subn(r"${\1}", text)
    plain = text.startswith("~/") and shlex.quote(text[2:]) == text[2:]
    return f'"{shown}"' if n else text if plain else shlex.quote(text)


def engine_of(plan: NodePlan, transport: Transport, *, progress: Callable[[str], None] = lambda text: None) -> Engine:
    """Engine of a plan's node. `progress` is called with the state of an image's pull."""
    return find_engine(plan.engine).create(plan, transport, progress)
