"""What is put on a node: rendered scripts, the worker's code by content hash, its configuration."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import worker
from orchestrator import __version__
from orchestrator.engine.docker.options import DockerOptions
from orchestrator.templating import render
from orchestrator.transport import RemoteFile
from worker.agent.cpu_affinity import CPUS
from worker.protocol import NodeConfig, NodePaths

TEXTS = NodePaths(Path()).texts.name
CODE_MARKER = "/complete"
"""The last file of a code folder: where it is, the folder is whole."""

RESTARTS = 5
KEEPS = ("aiter",)
"""Tuners that keep something on the node beyond the run."""
START_LIMITS_S = {"aiter": (7200.0, 900.0), "bench": (900.0, 300.0)}
"""(until ready, until the canary answered) where they are longer than usual: AITER's first start builds for minutes,
a bench asks every environment what it is."""
SCRIPTS = {name: f"{name}.j2" for name in ("launch.sh", "tune.sh", "follow.sh")}
DOCKER_SCRIPTS = {
    "launch.sh": "launch.docker.sh.j2",
    "tune.sh": "tune.sh.j2",
    "follow.sh": "follow.docker.sh.j2",
    "container.sh": "container.sh.j2",
}
"""Where workers run in containers; container.sh is read by the others."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node of a run, ready to be deployed. `devices` are a slot's own environment (which GPU it may use)."""

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
    extra: dict[str, Any] = field(default_factory=dict)
    docker: DockerOptions | None = None
    """Where the engine is docker."""
    switches: tuple[str, ...] = ()
    """Names of the tuners' switches that the inventory sets: they are not cleared. Their values may be in no file."""
    cache: str = "../../.cache"
    """From the node folder to what outlives a run on the node (modules that a tuner built)."""


@cache
def worker_code() -> tuple[str, dict[str, bytes]]:
    """(sha, files) of the worker package as it is here; paths relative to the code folder."""
    root = Path(worker.__file__).resolve().parent
    files = {
        f"worker/{p.relative_to(root).as_posix()}": p.read_bytes()
        for p in sorted(root.rglob("*.py"))
        if "__pycache__" not in p.parts
    }
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()[:16], files


def node_files(
    plan: NodePlan, run: str, tuner: str, options: dict[str, Any], idle_exit_s: float, texts: Path | None = None
) -> dict[str, RemoteFile]:
    """Every file of a node folder, paths relative to it. `texts`: a folder of long texts that the options refer to."""
    sha, code = worker_code()
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
        "cache": plan.cache if tuner in KEEPS else "",
    }
    config = NodeConfig(
        run=run,
        node=plan.node,
        tuner=tuner,
        options=options,
        slots={slot: plan.devices.get(slot, {}) for slot in plan.slots},
        idle_exit_s=idle_exit_s,
    )
    if tuner in START_LIMITS_S:
        ready, canary = START_LIMITS_S[tuner]
        config = replace(config, start_timeout_s=ready, canary_timeout_s=canary)
    scripts = DOCKER_SCRIPTS if plan.docker else SCRIPTS
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
    return plan.docker.values(run, plan.node, plan.slots, __version__, cpus)


def node_folders(slots: tuple[str, ...]) -> list[str]:
    """The folders that must exist before a worker starts."""
    return [*NodePaths(Path()).folders(), *(f"claimed/{s}" for s in slots), "supervisor"]
