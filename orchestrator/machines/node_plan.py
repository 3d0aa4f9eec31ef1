"""Plans the nodes of a run from its inventory: slots, devices, folders and environment.

A plan keeps references (`${env:NAME}`) as they are written, because it is rendered into files that stay
(node_files.py). They are resolved when they are used (node_link.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.engine.docker_options import DockerOptions
from orchestrator.engines import find_engine
from orchestrator.inventory.model import Inventory, Node
from orchestrator.inventory.references import has_reference, resolve
from orchestrator.machines.check_script import DEFAULT_WORKDIR, from_home, python_of
from orchestrator.machines.facts import NodeFacts, facts_here, load_facts
from orchestrator.machines.occupancy import device_lock
from worker.protocol import CPUS, DEVICE_LOCK, DEVICE_SHARED
from worker.protocol.paths import AITER_SWITCHES


@dataclass(frozen=True, slots=True)
class NodePlan:
    """The plan of one node of a run, ready to deploy."""

    node: str
    folder: str
    """The node folder (worker/protocol/paths.py) on the node."""
    slots: tuple[str, ...]
    """The number of each slot's GPU, or `0` for a node that computes on its cores; () if they are not known."""
    transport: str
    engine: str
    python: str | None
    """The Python of the workers; None for the first that is found on the node."""
    env: dict[str, str]
    """Variables of all workers, without those whose values are references."""
    devices: dict[str, dict[str, str]]
    """Slot -> its own variables, such as `{"HIP_VISIBLE_DEVICES": "3"}`."""
    gfx: str | None = None
    cu_num: int | None = None
    source: Node | None = None
    """The inventory's node that the plan was made from, with references unresolved."""
    run: str = ""
    docker: DockerOptions | None = None
    """Options of the containers, if the engine is docker."""
    switches: tuple[str, ...] = ()
    """Names of the tuners' switches that the inventory sets; we do not clear them. No file may hold their values."""
    cache: str = "../../.cache"
    """Path from the node folder to the files that outlive a run on the node (modules that a tuner built)."""


RESULTS = "GEMMFLEET_RESULTS"
"""The variable that names a node's folder of results to its workers."""
GRANTED = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""The variables in which schedulers name the GPUs of a lease."""


def plan_nodes(
    inventory: Inventory, run: str, run_folder: Path, facts: Mapping[str, NodeFacts] | None = None
) -> list[NodePlan]:
    """One NodePlan for each machine. Pools of leases get no plan.

    `gpus: auto` means one slot for each GPU found, or one slot with all cores.

    `facts`: of the nodes (`check_nodes`); by default those that the run stored (`save_facts`).
    A remote node whose GPUs are neither listed nor known gets no slots: leave it out until it answers.
    """
    known = load_facts(run_folder, inventory.nodes) if facts is None else facts
    plans = []
    for node in inventory.nodes.values():
        if node.lease is None:
            node_facts = known.get(node.name) or (facts_here() if node.is_here else None)
            plans.append(_plan(node, run, run_folder, node_facts))
    return plans


def _plan(node: Node, run: str, run_folder: Path, facts: NodeFacts | None) -> NodePlan:
    engine = find_engine(node.engine)
    env = all_env(node, run)
    gpus = _gpus_of_slots(node, facts)
    slots: tuple[str, ...] = ()
    devices = {}
    if facts is not None or node.gpus != "auto":
        slots = tuple(map(str, gpus)) or ("0",)
        devices = dict(_devices(node, gpus, facts))
    return NodePlan(
        node=node.name,
        folder=_folder(node, run, run_folder),
        slots=slots,
        transport=node.transport,
        engine=node.engine,
        python=python_of(node),
        env={name: value for name, value in env.items() if not has_reference(value)},
        devices=devices,
        gfx=node.gfx or (facts.gfx if facts else None),
        cu_num=node.cu_num or (facts.cu_num if facts else None),
        source=node,
        run=run,
        docker=engine.container(node, run) if engine.container else None,
        switches=tuple(name for name in sorted(env) if AITER_SWITCHES.fullmatch(name)),
        cache=_cache(node),
    )


def _gpus_of_slots(node: Node, facts: NodeFacts | None) -> tuple[int, ...]:
    """The number of each slot's GPU; () for a node that computes on its cores, or whose GPUs are not known."""
    if isinstance(node.gpus, tuple):
        return node.gpus
    if isinstance(node.gpus, int):
        return tuple(range(node.gpus))
    return () if facts is None else tuple(range(len(facts.gpus)))


def plan_lease(node: Node, run: str, facts: NodeFacts, granted: Mapping[str, str]) -> tuple[NodePlan, tuple[str, ...]]:
    """The plan of a leased node, and the id of each slot's GPU on its host. `granted`: the GRANTED variables that its
    scheduler set.

    The granted devices become slots. HIP numbers devices within ROCR_VISIBLE_DEVICES, so we do not change that.
    """
    rocr, hip, cuda = (_device_list(granted.get(name, "")) for name in GRANTED)
    on_host = rocr or hip or cuda
    count = node.gpus if isinstance(node.gpus, int) else len(on_host) or len(facts.gpus)
    plan = _plan(node.model_copy(update={"gpus": count}), run, Path(), facts)
    if count == 0:
        return plan, ("",)
    hip_devices = _fill_up([] if rocr else hip, count)
    cuda_devices = _fill_up(cuda, count)
    devices = {}
    for slot, hip_device, cuda_device in zip(plan.slots, hip_devices, cuda_devices, strict=False):
        visible = {"HIP_VISIBLE_DEVICES": hip_device, "CUDA_VISIBLE_DEVICES": cuda_device}
        devices[slot] = {**plan.devices[slot], **visible}
    gpu_ids = {str(number): gpu.id for number, gpu in enumerate(facts.gpus)}
    host_devices = _fill_up(on_host, count)[:count]
    return replace(plan, devices=devices), tuple(gpu_ids.get(device) or device for device in host_devices)


def _device_list(variable: str) -> list[str]:
    return [device for device in variable.split(",") if device]


def _fill_up(devices: list[str], count: int) -> list[str]:
    """At least `count` devices: after the given ones, each has its place as its number."""
    return [*devices, *map(str, range(len(devices), count))]


def with_device_locks(plan: NodePlan, *, shared: bool) -> NodePlan:
    """The plan with a lock for each slot's device. Its worker holds the lock on the host. `shared`: do not wait for
    other runs."""
    devices = {}
    for slot, env in plan.devices.items():
        devices[slot] = {**env, DEVICE_LOCK: device_lock(int(slot) if env["HIP_VISIBLE_DEVICES"] else None)}
        if shared:
            devices[slot][DEVICE_SHARED] = "1"
    return replace(plan, devices=devices)


def device_memory(nodes: Sequence[NodePlan], facts: Mapping[str, NodeFacts]) -> int | None:
    """Memory in bytes of the largest device of the nodes' slots; None if one of them is unknown.

    A slot without a GPU has its machine's memory.
    """
    sizes: list[int | None] = []
    for plan in nodes:
        known = facts.get(plan.node) or (facts_here() if plan.transport == "local" else NodeFacts({}))
        if any(env["HIP_VISIBLE_DEVICES"] for env in plan.devices.values()):
            sizes += [gpu.memory_total for gpu in known.gpus]
        else:
            sizes.append((known.number("memory_kb") or 0) * 1024 or None)
    if None in sizes:
        return None
    return max((size for size in sizes if size), default=None)


def _cache(node: Node) -> str:
    """Path from the node folder to the files that outlive a run; "" if the node has no such folder."""
    if node.lease is not None:
        return node.cache or ""
    return "../../.cache" if not node.is_here or node.workdir else "../../../.cache"


def _folder(node: Node, run: str, run_folder: Path) -> str:
    """The node folder. On a remote node it is absolute, or relative to the folder where commands start: the home
    folder, or the lease's folder."""
    if node.lease is not None:
        return node.name
    workdir = resolve({"workdir": node.workdir}, node.name, node.origin)["workdir"]
    if node.is_here:
        folder = Path(workdir).expanduser() / run / node.name if workdir else run_folder / "work" / node.name
        return str(folder.absolute())
    return f"{from_home(workdir or DEFAULT_WORKDIR).rstrip('/')}/{run}/{node.name}"


def _devices(node: Node, gpus: Sequence[int], facts: NodeFacts | None) -> Iterator[tuple[str, dict[str, str]]]:
    """The environment of each slot: the GPU that it sees, and the cores near it, as the kernel lists them."""
    is_isolated = find_engine(node.engine).isolates(node)
    for index, gpu in enumerate(gpus):
        visible = "0" if is_isolated else str(gpu)  # a GPU that is alone in its container has number 0
        env = {"HIP_VISIBLE_DEVICES": visible, "CUDA_VISIBLE_DEVICES": visible}
        cpus = _cpus_of_slot(node, index, gpu, facts)
        if cpus:
            env[CPUS] = cpus
        yield str(gpu), env
    if not gpus:
        yield "0", {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": ""}


def _cpus_of_slot(node: Node, index: int, gpu: int, facts: NodeFacts | None) -> str:
    """The cores near a slot's GPU, or those of the NUMA node that the inventory names for it; "" for all."""
    known_gpus = facts.gpus if facts is not None else ()
    if isinstance(node.numa, tuple):
        numa = node.numa[index] if index < len(node.numa) else None
        return next((known.cpus for known in known_gpus if known.numa == numa and known.cpus), "")
    if node.numa == "auto" and gpu < len(known_gpus):
        return known_gpus[gpu].cpus
    return ""


def all_env(node: Node, run: str) -> dict[str, str]:
    """The environment of a node's workers, with references unresolved. The sections of software win over `env:`."""
    env = {**node.env, **find_engine(node.engine).env(node), **node.variables()}
    env |= {**node.aiter.variables(), **node.aiter.compilers, **node.vllm.variables(), **node.sglang.variables()}
    if node.results:
        env[RESULTS] = f"{node.results}/{run}/{node.name}"
    return env


def node_of(plan: NodePlan) -> Node:
    """The inventory's node that a plan was made from, with references unresolved."""
    assert plan.source is not None
    return plan.source
