"""The files that a run deploys to a node: the worker's code, the rendered scripts, and the node's configuration.

What lies in the node folder later (specs, attempts, reproductions) is in node_folder.py.
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import worker
from orchestrator import __version__
from orchestrator.engine.docker_options import RESTARTS
from orchestrator.engines import find_engine
from orchestrator.errors import InputError
from orchestrator.machines.node_plan import NodePlan
from orchestrator.templating import render
from orchestrator.transport.base import RemoteFile
from worker.protocol import CPUS, DEVICE_LOCK, LOCKS, NodeConfig, NodePaths
from worker.tuners.catalog import GROUP, recorded_tuner

TEXTS = NodePaths(Path()).texts.name
CODE_MARKER = "/complete"
"""The last file written to a code folder. If it exists, the folder is complete."""

LARGEST_PACKAGE = 16 << 20
"""Most bytes of a tuner's package."""


@cache
def worker_code(tuner_package: str = "") -> tuple[str, dict[str, bytes]]:
    """(sha, files) of the worker package on this machine; paths are relative to the code folder.

    `tuner_package`: a tuner's package to send too, with its entry points (TunerSpec.worker_package). Raises InputError
    if it is not a folder here, or too large.
    """
    root = Path(worker.__file__).resolve().parent
    sources = [path for path in sorted(root.rglob("*.py")) if "__pycache__" not in path.parts]
    files = {f"worker/{path.relative_to(root).as_posix()}": path.read_bytes() for path in sources}
    if tuner_package:
        files |= _package_files(tuner_package)
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()[:16], files


def _package_files(name: str) -> dict[str, bytes]:
    """All files of an installed package, and the metadata by which importlib.metadata finds its tuners."""
    package = importlib.util.find_spec(name)
    if package is None or not package.submodule_search_locations or not package.origin:
        raise InputError(f"the package {name} of the tuner is not a folder with an __init__.py, so we cannot send it")
    root = Path(package.origin).resolve().parent
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
    values = _template_values(plan, run, sha, keeps_cache=spec.keeps_cache)
    scripts = find_engine(plan.engine).scripts
    files = {name: RemoteFile(render(template, values).encode(), 0o700) for name, template in scripts.items()}
    config = NodeConfig(
        run=run,
        node=plan.node,
        tuner=tuner,
        options=options,
        slots={slot: plan.devices.get(slot, {}) for slot in plan.slots},
        idle_exit_s=idle_exit_s,
    )
    if spec.start_limits:
        start_s, canary_s = spec.start_limits
        config = replace(config, start_timeout_s=start_s, canary_timeout_s=canary_s)
    files["node.json"] = RemoteFile(config.dumps())
    for name, data in code.items():
        files[f"code/{sha}/{name}"] = RemoteFile(data)
    if texts is not None and texts.is_dir():
        for path in sorted(texts.iterdir()):
            files[f"code/{TEXTS}/{path.name}"] = RemoteFile(path.read_bytes())
    files[f"code/{sha}{CODE_MARKER}"] = RemoteFile(b"")
    return files


def _template_values(plan: NodePlan, run: str, code_sha: str, *, keeps_cache: bool) -> dict[str, Any]:
    """The values of an engine's script templates (launch.sh, tune.sh, follow.sh)."""
    node = plan.source
    enter = find_engine(plan.engine).enter
    has_locks = any(DEVICE_LOCK in env for env in plan.devices.values())
    return {
        "run": run,
        "node": plan.node,
        "slots": plan.slots,
        "restarts": RESTARTS,
        "env": {**(plan.docker.env if plan.docker else {}), **plan.env},
        "switches": plan.switches,
        "python": plan.python,
        "code_sha": code_sha,
        "docker": _docker_values(plan, run),
        "locks": LOCKS if has_locks else "",
        "enter": enter(node) if enter and node else "",
        "engine_options": node.engine_options if node else {},
        "cache": plan.cache if keeps_cache else "",
        "leased": node is not None and node.lease is not None,
    }


def _docker_values(plan: NodePlan, run: str) -> dict[str, Any] | None:
    if plan.docker is None:
        return None
    cpus = {slot: env.get(CPUS, "") for slot, env in plan.devices.items()}
    gpus = [slot for slot, env in plan.devices.items() if env.get("HIP_VISIBLE_DEVICES")]
    return plan.docker.values(run, plan.node, plan.slots, __version__, cpus, gpus)


def node_folders(slots: tuple[str, ...]) -> list[str]:
    """Folders that must exist before a worker starts."""
    return [*NodePaths(Path()).folders(), *(f"claimed/{s}" for s in slots), "supervisor"]
