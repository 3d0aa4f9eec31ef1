"""Plans nodes from an inventory (slots, devices, folders, environment). Makes the transport and engine of a planned
node, and the values that its workers get from our environment.

A plan keeps references (`${env:NAME}`) as they are written, because it is rendered into files that stay. They are
resolved when they are used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import re
import shlex
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import worker
from orchestrator import __version__
from orchestrator.archives import read_files
from orchestrator.engine.docker import RESTARTS, DockerOptions
from orchestrator.engines import Engine, find_engine
from orchestrator.errors import InputError
from orchestrator.inventory.load import resolved
from orchestrator.inventory.model import Inventory, LoginHost, Node
from orchestrator.inventory.values import REFERENCE_RE, has_reference, resolve
from orchestrator.machines.facts import DEFAULT_WORKDIR, NodeFacts, facts_here, from_home, load_facts, python_of
from orchestrator.machines.occupancy import device_lock
from orchestrator.templating import render
from orchestrator.transport.base import RemoteFile, Transport
from orchestrator.transport.local import LocalTransport
from worker.protocol import ATTEMPT_RE, CPUS, DEVICE_LOCK, DEVICE_SHARED, LOCKS, InboxName, NodeConfig, NodePaths
from worker.protocol.paths import AITER_SWITCHES
from worker.tuners.catalog import GROUP, recorded_tuner

if TYPE_CHECKING:  # paramiko takes long to import
    from orchestrator.transport.ssh import SshTransport

TEXTS = NodePaths(Path()).texts.name
CODE_MARKER = "/complete"
"""The last file written to a code folder. If it exists, the folder is complete."""

LARGEST_PACKAGE = 16 << 20
"""Most bytes of a tuner's package."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """The plan of one node of a run, ready to deploy. `devices`: environment of each slot (which GPU it may use)."""

    node: str
    folder: str
    slots: tuple[str, ...]
    transport: str
    engine: str
    python: str | None
    env: dict[str, str]
    devices: dict[str, dict[str, str]]
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


@cache
def worker_code(tuner_package: str = "") -> tuple[str, dict[str, bytes]]:
    """(sha, files) of the worker package on this machine; paths are relative to the code folder.

    `tuner_package`: a tuner's package to send too, with its entry points (TunerSpec.worker_package). Raises InputError
    if it is not a folder here, or too large.
    """
    root = Path(worker.__file__).resolve().parent
    files = {
        f"worker/{p.relative_to(root).as_posix()}": p.read_bytes()
        for p in sorted(root.rglob("*.py"))
        if "__pycache__" not in p.parts
    }
    if tuner_package:
        files |= _package_files(tuner_package)
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()[:16], files


def _package_files(name: str) -> dict[str, bytes]:
    """All files of an installed package, and the metadata by which importlib.metadata finds its tuners."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations or not found.origin:
        raise InputError(f"the package {name} of the tuner is not a folder with an __init__.py, so we cannot send it")
    root = Path(found.origin).resolve().parent
    files: dict[str, bytes] = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
            files[f"{name}/{path.relative_to(root).as_posix()}"] = path.read_bytes()
    if sum(map(len, files.values())) > LARGEST_PACKAGE:
        raise InputError(f"the package {name} of the tuner has more than {LARGEST_PACKAGE >> 20} MiB")
    points = [e for e in entry_points(group=GROUP) if e.value.partition(":")[0].partition(".")[0] == name]
    lines = "".join(f"{e.name} = {e.value}\n" for e in points)
    files[f"{name}-0.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n".encode()
    files[f"{name}-0.dist-info/entry_points.txt"] = f"[{GROUP}]\n{lines}".encode()
    return files


def node_files(
    plan: NodePlan, run: str, tuner: str, options: dict[str, Any], idle_exit_s: float, texts: Path | None = None
) -> dict[str, RemoteFile]:
    """The files of a node folder, by relative path. `texts`: folder of the long texts that options refer to."""
    spec = recorded_tuner(tuner)
    sha, code = worker_code(spec.worker_package)
    values = {
        "run": run,
        "node": plan.node,
        "slots": plan.slots,
        "restarts": RESTARTS,
        "env": dict(plan.docker.env if plan.docker else {}) | plan.env,
        "switches": plan.switches,
        "python": plan.python,
        "code_sha": sha,
        "docker": _docker_values(plan, run),
        "locks": LOCKS if any(DEVICE_LOCK in env for env in plan.devices.values()) else "",
        "enter": enter(plan.source) if (enter := find_engine(plan.engine).enter) and plan.source else "",
        "engine_options": plan.source.engine_options if plan.source else {},
        "cache": plan.cache if spec.keeps_cache else "",
        "leased": plan.source is not None and plan.source.lease is not None,
    }
    config = NodeConfig(
        run=run,
        node=plan.node,
        tuner=tuner,
        options=options,
        slots={slot: plan.devices.get(slot, {}) for slot in plan.slots},
        idle_exit_s=idle_exit_s,
    )
    if spec.start_limits:
        ready, canary = spec.start_limits
        config = replace(config, start_timeout_s=ready, canary_timeout_s=canary)
    scripts = find_engine(plan.engine).scripts
    files = {name: RemoteFile(render(t, values).encode(), 0o700) for name, t in scripts.items()}
    files["node.json"] = RemoteFile(config.dumps())
    for name, data in code.items():
        files[f"code/{sha}/{name}"] = RemoteFile(data)
    for path in sorted(texts.iterdir()) if texts is not None and texts.is_dir() else ():
        files[f"code/{TEXTS}/{path.name}"] = RemoteFile(path.read_bytes())
    files[f"code/{sha}{CODE_MARKER}"] = RemoteFile(b"")
    return files


def _docker_values(plan: NodePlan, run: str) -> dict[str, Any] | None:
    if plan.docker is None:
        return None
    cpus = {slot: env.get(CPUS, "") for slot, env in plan.devices.items()}
    gpus = [slot for slot, env in plan.devices.items() if env.get("HIP_VISIBLE_DEVICES")]
    return plan.docker.values(run, plan.node, plan.slots, __version__, cpus, gpus)


def node_folders(slots: tuple[str, ...]) -> list[str]:
    """Folders that must exist before a worker starts."""
    return [*NodePaths(Path()).folders(), *(f"claimed/{s}" for s in slots), "supervisor"]


MAX_BYTES = 16 * 2**20
MAX_FILE = 2**20
MAX_FILES = 1000
TIMEOUT_S = 30.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\Z")
_PACK = f"""\
cd -- "$1" || exit 0
set -- attempts/*/repro
[ -d "$1" ] || exit 0
tar -cf - -- "$@" | head -c {MAX_BYTES}
"""


def bring_home(transport: Transport, folder: str, attempts: Path) -> list[Path]:
    """Copy every attempt's `repro/` from a node folder below `attempts`. Return the files. Raises TransportError,
    OSError."""
    done = transport.run(["sh", "-c", _PACK, "sh", folder], timeout=TIMEOUT_S)
    return unpack(done.out, attempts)


def unpack(data: bytes, attempts: Path) -> list[Path]:
    """Unpack the files of an archive that have an expected path, `attempts/ID/repro/NAME/FILE`. Skip the rest. Raises
    OSError."""
    files: dict[Path, bytes] = {}
    with suppress(tarfile.TarError):  # nothing, damaged, or cut off at the limit
        for name, content in read_files(io.BytesIO(data), MAX_BYTES):
            parts = name.split("/")
            if len(files) < MAX_FILES and len(content) <= MAX_FILE and _expected(parts):
                files[attempts.joinpath(*parts[1:])] = content
    for path, content in files.items():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o700 if path.suffix == ".sh" else 0o600)
    return list(files)


def _expected(parts: list[str]) -> bool:
    if len(parts) != 5 or (parts[0], parts[2]) != ("attempts", "repro"):
        return False
    return bool(ATTEMPT_RE.match(parts[1])) and all(_NAME.match(p) for p in parts[3:])


def missing_files(transport: Transport, folder: str, files: Mapping[str, RemoteFile]) -> dict[str, RemoteFile]:
    """The files to deploy. The code is left out if its marker shows that it is there completely."""
    marker = next((n for n in files if n.endswith(CODE_MARKER)), None)
    if marker is None or transport.run(["test", "-e", f"{folder}/{marker}"], timeout=20.0).code:
        return dict(files)
    return {n: f for n, f in files.items() if not n.startswith("code/")}


def attempts_in(transport: Transport, folder: str, *below: str) -> set[str]:
    """Attempts with a spec or a folder in these folders of a node folder."""
    paths = [f"{folder}/{f}" for f in below]
    names = set()
    for base in _listed(transport, [*paths, "-mindepth", "1", "-maxdepth", "2"]):
        spec = InboxName.parse(base)
        names.add(spec.attempt if spec else base)
    return names


def take_back_all(transport: Transport, folder: str) -> None:
    """Take every unclaimed spec out of a node folder's inbox."""
    for base in _listed(transport, [f"{folder}/inbox", "-maxdepth", "1", "-name", "*.json"]):
        if InboxName.parse(base):
            transport.rename(f"{folder}/inbox/{base}", f"{folder}/taken/{base}")


def _listed(transport: Transport, found: Sequence[str]) -> list[str]:
    """Names of the files that a `find` prints."""
    done = transport.run(["find", *found], timeout=60.0)
    return [line.rsplit("/", 1)[-1] for line in done.out.decode("utf-8", "replace").splitlines()]


# A login is slow on a busy node, or if the account comes from a directory service.
CONNECT_S = 15.0
RESULTS = "GEMMFLEET_RESULTS"
# The variables in which schedulers name the GPUs of a lease.
GRANTED = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def plan_nodes(
    inventory: Inventory, run: str, run_folder: Path, facts: Mapping[str, NodeFacts] | None = None
) -> list[NodePlan]:
    """One NodePlan for each machine. Pools of leases get no plan.

    `gpus: auto` means one slot for each GPU found, or one slot with all cores.

    `facts`: of the nodes (`check_nodes`); by default those that the run stored (`save_facts`).
    A remote node whose GPUs are neither listed nor known gets no slots: leave it out until it answers.
    """
    known = load_facts(run_folder, inventory.nodes) if facts is None else facts
    machines = [n for n in inventory.nodes.values() if n.lease is None]
    return [_plan(n, run, run_folder, known.get(n.name) or (facts_here() if n.is_here else None)) for n in machines]


def _plan(node: Node, run: str, run_folder: Path, facts: NodeFacts | None) -> NodePlan:
    found = range(node.gpus) if isinstance(node.gpus, int) else () if facts is None else range(len(facts.gpus))
    gpus = node.gpus if isinstance(node.gpus, tuple) else tuple(found)
    known = facts is not None or node.gpus != "auto"
    spec = find_engine(node.engine)
    whole_env = all_env(node, run)
    env = {name: value for name, value in whole_env.items() if not has_reference(value)}
    return NodePlan(
        node=node.name,
        folder=_folder(node, run, run_folder),
        slots=tuple(map(str, gpus)) or (("0",) if known else ()),
        transport=node.transport,
        engine=node.engine,
        python=python_of(node),
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
    """The plan of a leased node, and the id of each slot's GPU on its host. `granted`: the GRANTED variables that its
    scheduler set.

    The granted devices become slots. HIP numbers devices within ROCR_VISIBLE_DEVICES, so we do not change that.
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
    """The plan with a lock for each slot's device. Its worker holds the lock on the host. `shared`: do not wait for
    other runs."""
    share = {DEVICE_SHARED: "1"} if shared else {}
    locks = {s: device_lock(int(s) if env["HIP_VISIBLE_DEVICES"] else None) for s, env in plan.devices.items()}
    return replace(plan, devices={s: {**env, DEVICE_LOCK: locks[s], **share} for s, env in plan.devices.items()})


def device_memory(nodes: Sequence[NodePlan], facts: Mapping[str, NodeFacts]) -> int | None:
    """Memory in bytes of the largest device of the nodes' slots; None if one of them is unknown.

    A slot without a GPU has its machine's memory.
    """
    sizes: list[int | None] = []
    for n in nodes:
        known = facts.get(n.node) or (facts_here() if n.transport == "local" else NodeFacts({}))
        on_gpus = any(env["HIP_VISIBLE_DEVICES"] for env in n.devices.values())
        sizes += [g.memory_total for g in known.gpus] if on_gpus else [(known.number("memory_kb") or 0) * 1024 or None]
    return None if None in sizes else max((s for s in sizes if s), default=None)


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
    alone = find_engine(node.engine).isolates(node)
    there = dict(enumerate(facts.gpus)) if facts is not None else {}
    for i, gpu in enumerate(gpus):
        seen = "0" if alone else str(gpu)  # a GPU that is alone in its container has number 0
        if isinstance(node.numa, tuple):
            wanted = node.numa[i] if i < len(node.numa) else None
            cpus = next((g.cpus for g in there.values() if g.numa == wanted and g.cpus), "")
        else:
            cpus = there[gpu].cpus if node.numa == "auto" and gpu in there else ""
        yield str(gpu), {"HIP_VISIBLE_DEVICES": seen, "CUDA_VISIBLE_DEVICES": seen, **({CPUS: cpus} if cpus else {})}
    if not gpus:
        yield "0", {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": ""}


def all_env(node: Node, run: str) -> dict[str, str]:
    """The environment of a node's workers, with references unresolved. `aiter:` and `vllm:` win over `env:`."""
    env = {**node.env, **find_engine(node.engine).env(node), **node.variables()}
    env |= {**node.aiter.variables(), **node.aiter.compilers, **node.vllm.variables()}
    return {**env, RESULTS: f"{node.results}/{run}/{node.name}"} if node.results else env


def node_of(plan: NodePlan) -> Node:
    """The inventory's node that a plan was made from, with references unresolved."""
    assert plan.source is not None
    return plan.source


def private_env(plan: NodePlan) -> dict[str, str]:
    """The workers' variables whose values come from our environment. Only for `Engine.start`, never for a file. Raises
    InventoryError that names file, line, node and variable."""
    private = [name for name, value in all_env(node_of(plan), plan.run).items() if has_reference(value)]
    real = all_env(resolved(node_of(plan)), plan.run) if private else {}
    return {name: real[name] for name in private}


def results_folder(plan: NodePlan) -> str | None:
    """The node's folder of results for this run, if the inventory names one."""
    return all_env(resolved(node_of(plan)), plan.run).get(RESULTS) if node_of(plan).results else None


def transport_to(
    node: Node, *, accept_new_host_keys: bool = False, patient: bool = True, connect_s: float = CONNECT_S
) -> Transport:
    """The transport to a node of an inventory. `connect_s`: time limit of `connect`. `patient`: try a refused
    connection again within that time. Raise InventoryError if a reference cannot be resolved."""
    if node.is_here:
        return LocalTransport(node.name)
    limits = {"connect_timeout": connect_s, "patient": patient}
    return ssh_transport(resolved(node), node.name, node.name, accept_new_host_keys=accept_new_host_keys, **limits)


def ssh_transport(way: Node | LoginHost, host: str, name: str, **options: Any) -> SshTransport:
    """The SSH transport for an inventory's entry with resolved references. `host`: used if the entry names none.
    `name`: the name in messages. `options`: see SshTransport."""
    from orchestrator.transport.ssh import SshTransport

    return SshTransport(
        name,
        way.host or host,
        user=way.user,
        port=way.port,
        identity=os.path.expanduser(way.identity) if way.identity else None,
        proxy_jump=way.proxy_jump,
        config=Path(way.ssh_config).expanduser() if way.ssh_config else None,
        **options,
    )


def transport_of(plan: NodePlan, *, accept_new_host_keys: bool = False) -> Transport:
    """The transport to a plan's node, made by `transport_to`."""
    return transport_to(node_of(plan), accept_new_host_keys=accept_new_host_keys)


def login_line(node: Node) -> str:
    """The command that logs in to the node as the inventory describes it. A reference becomes a shell variable."""
    flags = (("-F", node.ssh_config), ("-p", node.port), ("-i", node.identity), ("-J", node.proxy_jump))
    words = [w for flag, value in flags if value is not None for w in (flag, _typed(str(value)))]
    user = f"{_typed(node.user)}@" if node.user else ""
    return " ".join(["ssh", *words, f"{user}{_typed(node.host or node.name)}", "true"])


def _typed(text: str) -> str:
    shown, n = REFERENCE_RE.subn(r"${\1}", text)
    plain = text.startswith("~/") and shlex.quote(text[2:]) == text[2:]
    return f'"{shown}"' if n else text if plain else shlex.quote(text)


def engine_of(plan: NodePlan, transport: Transport, *, progress: Callable[[str], None] = lambda text: None) -> Engine:
    """The engine of a plan's node. `progress` is called with the state of an image's pull."""
    return find_engine(plan.engine).create(plan, transport, progress)
