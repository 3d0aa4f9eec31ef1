"""Files of a node: what is deployed to it, and the reproductions of faults that are fetched from it."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import worker
from orchestrator import __version__
from orchestrator.engine.docker import RESTARTS, DockerOptions
from orchestrator.engines import find_engine
from orchestrator.errors import InputError
from orchestrator.inventory.model import Node
from orchestrator.templating import render
from orchestrator.transport import RemoteFile, Transport
from worker.protocol import ATTEMPT_RE, CPUS, DEVICE_LOCK, LOCKS, InboxName, NodeConfig, NodePaths
from worker.tuners.catalog import GROUP, recorded_tuner

TEXTS = NodePaths(Path()).texts.name
CODE_MARKER = "/complete"
"""The last file of a code folder: where it is, the folder is whole."""

LARGEST_PACKAGE = 16 << 20
"""Bytes of a package with a tuner."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Plan of one node of a run, ready to be deployed. `devices`: environment of each slot (which GPU it may use)."""

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
    """The inventory's node that the plan was made of, its references unresolved."""
    run: str = ""
    docker: DockerOptions | None = None
    """Options of the containers, with engine docker."""
    switches: tuple[str, ...] = ()
    """Names of the tuners' switches that the inventory sets: they are not cleared. Their values may be in no file."""
    cache: str = "../../.cache"
    """Path from the node folder to what outlives a run on the node (modules that a tuner built)."""


@cache
def worker_code(tuner_package: str = "") -> tuple[str, dict[str, bytes]]:
    """(sha, files) of the worker package as it is here; paths relative to the code folder.

    `tuner_package`: a package with a tuner, which goes along with its entry points (TunerSpec.worker_package). Raises
    InputError where it is no folder here, or too large.
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
    """All files of an installed package, and what importlib.metadata needs to find its tuners."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations or not found.origin:
        raise InputError(f"the package {name} of the tuner is no folder with an __init__.py that can be sent to nodes")
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
    """Files of a node folder, by path relative to it. `texts`: a folder of long texts that the options refer to."""
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
    """Copy every attempt's `repro/` of a node folder below `attempts`; the files. Raises TransportError, OSError."""
    done = transport.run(["sh", "-c", _PACK, "sh", folder], timeout=TIMEOUT_S)
    return unpack(done.out, attempts)


def unpack(data: bytes, attempts: Path) -> list[Path]:
    """The files of an archive that are what they should be: `attempts/ID/repro/NAME/FILE`. The rest is passed over."""
    out: list[Path] = []
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r|") as archive:
            for member in archive:
                parts = member.name.split("/")
                if len(out) == MAX_FILES:
                    break
                if not (member.isreg() and member.size <= MAX_FILE and _expected(parts)):
                    continue
                found = archive.extractfile(member)
                content = found.read() if found else b""
                path = attempts.joinpath(*parts[1:])
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.write_bytes(content)
                path.chmod(0o700 if path.suffix == ".sh" else 0o600)
                out.append(path)
    except tarfile.TarError:  # nothing, or cut off at the limit
        pass
    return out


def _expected(parts: list[str]) -> bool:
    if len(parts) != 5 or (parts[0], parts[2]) != ("attempts", "repro"):
        return False
    return bool(ATTEMPT_RE.match(parts[1])) and all(_NAME.match(p) for p in parts[3:])


def missing_files(transport: Transport, folder: str, files: Mapping[str, RemoteFile]) -> dict[str, RemoteFile]:
    """Files to deploy, without the code where a marker shows that this code is there completely."""
    marker = next((n for n in files if n.endswith(CODE_MARKER)), None)
    if marker is None or transport.run(["test", "-e", f"{folder}/{marker}"], timeout=20.0).code:
        return dict(files)
    return {n: f for n, f in files.items() if not n.startswith("code/")}


def attempts_in(transport: Transport, folder: str, *below: str) -> set[str]:
    """Attempts that have a spec in, or a folder under, these folders of a node folder."""
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
    """Names of the files that `find` prints."""
    done = transport.run(["find", *found], timeout=60.0)
    return [line.rsplit("/", 1)[-1] for line in done.out.decode("utf-8", "replace").splitlines()]
