"""Engine `docker` as the registry knows it: workers in containers, one a slot, and what is checked before they start.

It is cheap to import: the docker package comes with `docker_containers.py`, when the first engine is created.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from orchestrator.engine.docker_errors import way_out
from orchestrator.engine.docker_options import DockerOptions, container_options
from orchestrator.engines import UNUSABLE, WARNING, Engine, EngineSpec, Finding
from orchestrator.inventory.model import OWN_RENDER_NODE

if TYPE_CHECKING:
    from orchestrator.inventory.model import Node

IMAGE_FREE = 40 * 2**30
"""Bytes that Docker's own disk should have free where the image is still to come."""


def _create(plan: Any, transport: Any, progress: Callable[[str], None]) -> Engine:
    from orchestrator.engine.docker_containers import DockerEngine

    return DockerEngine(transport, plan.folder, plan.run, plan.slots, _resolve_options(plan), progress=progress)


def _resolve_options(plan: Any) -> DockerOptions:
    """Image and mounts resolved, for the engine; files are rendered from the plan as it is."""
    from orchestrator.inventory.load import resolved

    options: DockerOptions = plan.docker
    if not options.private:
        return options
    real = container_options(resolved(plan.source), plan.run)
    return options.model_copy(update={"image": real.image, "volumes": real.volumes, "written": options})


def _conflicts(node: Node) -> Iterator[tuple[tuple[str, ...], str]]:
    if node.image is None:
        yield (), "engine: docker needs an image: add image: NAME:TAG, here or under defaults"
    if node.gpus == 0 and OWN_RENDER_NODE in (node.docker.devices or ()):
        yield ("gpus",), f"0 means no GPU, and docker.devices has {OWN_RENDER_NODE}: drop one of them"


def _check_node(node: Node, facts: Any) -> Iterator[Finding]:
    """Findings on the node's Docker, and on the image if Docker answers."""
    missing_command = facts.values.get("docker.lacks")
    error = facts.values.get("docker.error")
    if "docker.version" in facts.values and not (missing_command or error):
        yield from _check_image(node, facts)
        return
    said = error or "no answer in time"
    if missing_command:
        said = f"{missing_command}: not found"
    way = way_out(container_options(node, ""), said) or "see `systemctl status docker` there"
    yield Finding(UNUSABLE, "docker", f"docker does not answer ({said[-200:]})", way)


def _check_image(node: Node, facts: Any) -> Iterator[Finding]:
    if facts.values.get("image") != "missing":
        return
    if node.docker.pull == "never":
        way = "load it there (docker load), or set docker.pull: missing"
        yield Finding(UNUSABLE, "image", "the image is not there, and pull is never", way)
        return
    yield Finding(WARNING, "image", "the image is not there", "it will be pulled at the start")
    free = facts.number("docker.free_kb")
    if free is not None and free * 1024 < IMAGE_FREE:
        what = f"Docker's disk has {free / 2**20:.0f} GiB free, and the image is still to come"
        yield Finding(WARNING, "disk", what, "free some space there (docker image prune)")


SPEC = EngineSpec(
    name="docker",
    scripts={
        "launch.sh": "launch.docker.sh.j2",
        "tune.sh": "tune.sh.j2",
        "follow.sh": "follow.docker.sh.j2",
        "container.sh": "container.sh.j2",  # read by the others
    },
    create=_create,
    needs=frozenset({"tar", "find", "timeout"}),
    sections=("image", "docker"),
    conflicts=_conflicts,
    preflight=_check_node,
    container=container_options,
    env=lambda node: node.docker.env,
    isolates=lambda node: container_options(node, "").isolates,
)
