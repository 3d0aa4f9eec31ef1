"""Registry entry of the engine `docker`: workers in containers, one a slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestrator.engine.docker.options import DockerOptions
from orchestrator.engines import UNUSABLE, WARNING, EngineSpec, Finding
from orchestrator.inventory.model import OWN_RENDER_NODE

if TYPE_CHECKING:
    from orchestrator.engine.base import Engine
    from orchestrator.inventory import Node
    from orchestrator.transport import Transport

IMAGE_FREE = 40 * 2**30
"""Bytes that Docker's own disk should have free where the image is still to come."""


def container_options(node: Node, run: str) -> DockerOptions:
    """Options of a node's containers, references as they are written."""
    from orchestrator.inventory.references import has_reference

    section = node.docker
    mounts = (*section.volumes, f"{node.results}:{node.results}") if node.results else section.volumes
    options = section.model_dump(exclude={"volumes", "env"})
    plain = {name: value for name, value in section.env.items() if not has_reference(value)}
    return DockerOptions(image=node.image or "", volumes=mounts, env=plain, **options)


def _create(plan: Any, transport: Transport, progress: Callable[[str], None]) -> Engine:
    from orchestrator.engine.docker.engine import DockerEngine

    return DockerEngine(transport, plan.folder, plan.run, plan.slots, _real_options(plan), progress=progress)


def _real_options(plan: Any) -> DockerOptions:
    """Image and mounts resolved, for the engine; files are rendered from the plan as it is."""
    from orchestrator.inventory import resolved

    options: DockerOptions = plan.docker
    if not options.private:
        return options
    real = container_options(resolved(plan.source), plan.run)
    return replace(options, image=real.image, volumes=real.volumes, written=options)


def _conflicts(node: Node) -> Iterator[tuple[tuple[str, ...], str]]:
    if node.image is None:
        yield (), "engine: docker needs an image: add image: NAME:TAG, here or under defaults"
    if node.gpus == 0 and OWN_RENDER_NODE in node.docker.devices:
        yield ("gpus",), f"0 means no GPU, and docker.devices has {OWN_RENDER_NODE}: drop one of them"


def _preflight(node: Node, facts: Any) -> Iterator[Finding]:
    error = facts.values.get("docker.error")
    if lacking := facts.values.get("docker.lacks"):
        yield Finding(UNUSABLE, "docker", f"there is no `{lacking}`", "install Docker, or set docker.docker_command")
    elif error is not None:
        yield Finding(UNUSABLE, "docker", f"docker does not answer ({error[-200:]})", _way_out(error))
    elif "docker.version" in facts.values:
        yield from _image(node, facts)
    else:
        yield Finding(UNUSABLE, "docker", "docker did not answer in time", "see `systemctl status docker` there")


def _way_out(error: str) -> str:
    if "permission denied" in error.lower():
        return "add the user to the group docker, or set docker.docker_command: [sudo, -n, docker]"
    if "sudo" in error and "password" in error:
        return "allow sudo without a password for docker, or add the user to the group docker"
    return "start it: systemctl start docker"


def _image(node: Node, facts: Any) -> Iterator[Finding]:
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


def _env(node: Node) -> Mapping[str, str]:
    return node.docker.env


def _isolates(node: Node) -> bool:
    return OWN_RENDER_NODE in node.docker.devices


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
    preflight=_preflight,
    container=container_options,
    env=_env,
    isolates=_isolates,
)
