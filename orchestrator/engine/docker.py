"""Engine `docker` as the registry knows it: workers in containers, one a slot, and the options of such a container."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from orchestrator.engines import UNUSABLE, WARNING, Engine, EngineSpec, Finding
from orchestrator.errors import EngineError
from orchestrator.inventory.model import DEVICE_GROUPS, OWN_RENDER_NODE, DockerSection
from orchestrator.inventory.values import has_reference

if TYPE_CHECKING:
    from orchestrator.inventory.model import Node
    from orchestrator.transport.base import Transport

INSIDE = "/gemmfleet"
"""Path of the node folder within a container."""
PRIVATE = "GEMMFLEET_PRIVATE_"
"""Lines of this beginning are for launch.sh itself and not for the containers' environment."""
RESTARTS = 5
LOG_OPTIONS = ("max-size=10m", "max-file=3")
CLI_TIMEOUT_S = 60
"""Limit of one docker command in launch.sh; a pull has none."""


class DockerOptions(DockerSection):
    """The `docker:` section of a node with its image. `volumes` has the folder of results too. `env` has plain values
    only, because they are written into tune.sh; private ones are given to `DockerEngine.start`."""

    image: str
    written: DockerOptions | None = Field(default=None, repr=False)
    """The same with its references to the environment as they are written, where image or volumes have any."""

    @property
    def isolates(self) -> bool:
        """A container sees its slot's GPU alone, under the number 0: no *_VISIBLE_DEVICES must name another."""
        return self.devices is None or OWN_RENDER_NODE in self.devices

    def flags(self) -> list[str]:
        """Arguments of `docker run` that are the same for every slot."""
        out = [f"--network={self.network}", f"--ipc={self.ipc}"]
        out += [f"--shm-size={self.shm_size}"] if self.shm_size else []
        out += [f"--memory={self.memory}", f"--memory-swap={self.memory}"] if self.memory else []
        out += [f"--device={d}" for d in self.devices or () if d != OWN_RENDER_NODE]
        out += [f"--group-add={g}" for g in self.group_add if g != DEVICE_GROUPS]
        out += [f"--cap-add={c}" for c in self.cap_add]
        out += [f"--security-opt={s}" for s in self.security_opt]
        out += [] if self.private else [f"--volume={v}" for v in self.volumes]
        return out

    @property
    def private(self) -> bool:
        """Image or volumes refer to the environment: scripts hold the references, launch.sh gets the values."""
        return any(map(has_reference, (self.image, *self.volumes)))

    def private_lines(self) -> list[str]:
        """Lines that launch.sh reads on its standard input where the scripts were rendered from `written`."""
        lines = [f"{PRIVATE}IMAGE={self.image}", *(f"{PRIVATE}VOLUME={v}" for v in self.volumes)]
        return [] if self.written is None else lines

    def values(
        self, run: str, node: str, slots: tuple[str, ...], version: str, cpus: Mapping[str, str], gpus: Sequence[str]
    ) -> dict[str, Any]:
        """Values for launch.sh, tune.sh, follow.sh and container.sh, under the name `docker`.

        `cpus`: the cores of each slot that is pinned, as the kernel lists them (`0-7,64-71`). `gpus`: the slots that
        are a GPU.
        """
        devices = [d for d in self.devices or () if d != OWN_RENDER_NODE]
        return {
            "image": self.image,
            "private": self.private,
            "command": list(self.docker_command),
            "flags": self.flags(),
            "slot_flags": {s: [f"--cpuset-cpus={cpus[s]}"] if cpus.get(s) else [] for s in slots},
            "hostnames": {s: hostname(node, s) for s in slots},
            "names": {s: container_name(run, node, s) for s in slots},
            "follower": container_name(run, node, "follow"),
            "labels": labels(run, node) | {"gemmfleet.version": version},
            "own_gpus": list(gpus) if self.devices is None else [],
            "own_render_node": OWN_RENDER_NODE in (self.devices or ()),
            "groups_of": [d.partition(":")[0] for d in devices] if DEVICE_GROUPS in self.group_add else [],
            "device_groups": DEVICE_GROUPS in self.group_add,
            "user": self.user,
            "may_pull": self.pull != "never",
            "inside": INSIDE,
            "restarts": RESTARTS,
            "log_options": LOG_OPTIONS,
            "timeout_s": CLI_TIMEOUT_S,
        }


def labels(run: str, node: str) -> dict[str, str]:
    """Labels that show whose a container is."""
    return {"gemmfleet.run": run, "gemmfleet.node": node}


def container_name(run: str, node: str, slot: str) -> str:
    """The name of a slot's container."""
    return f"gemmfleet-{run}-{node}-{slot}"


def hostname(node: str, slot: str) -> str:
    """A legal host name of at most 63 characters."""
    plain = "".join(c if c.isalnum() or c in "-." else "-" for c in node)
    return f"{plain[:57].rstrip('-.')}-{slot}"


def way_out(options: DockerOptions, message: str) -> str:
    """Way out of a message of docker, sudo or the daemon; "" where none is known."""
    text = next((text for pattern, text in _TABLE if re.search(pattern, message.lower(), re.MULTILINE)), "")
    image, command = (options.written or options).image, " ".join(options.docker_command)
    return text.format(image=image, command=command, pull=options.pull)


LONGEST = 600
"""Characters of Docker's message that are shown: its end, where the cause stands."""


def engine_error(node: str, options: DockerOptions, message: str) -> EngineError:
    """EngineError with the way out. `message`: of docker, sudo or the daemon."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip() and "--help'" not in line]
    short = " / ".join(lines[-3:]) or "it gave no message"
    if len(short) > LONGEST:
        short = f"... {short[-LONGEST:].partition(' ')[2]}"
    hint = way_out(options, message)
    return EngineError(node, f"{hint} ({short})" if hint else f"Docker: {short}")


_TABLE = (
    (
        r"permission denied while trying to connect|dial unix .*permission denied",
        "this user may not use Docker: add it to the group of /var/run/docker.sock on the node (sudo usermod -aG docker"
        " USER, then log in again), or set docker_command: [sudo, -n, docker] in the inventory",
    ),
    (
        r"a password is required|sudo: .*not allowed|is not in the sudoers",
        "{command} asks for a password or is not allowed: allow it without one in the node's sudoers, or add the user"
        " to the group docker",
    ),
    (
        r"cannot connect to the docker daemon|is the docker daemon running|"
        r"dial unix .*(no such file|connection refused)",
        "Docker does not run there: start it (sudo systemctl start docker)",
    ),
    (
        r"no space left on device",
        "no space left on the node: docker system df shows what takes it, docker system prune frees it",
    ),
    (
        r"no such image|manifest unknown|pull access denied|repository does not exist|not found: manifest|"
        r"unable to find image|manifest for .* not found",
        "the image {image} is not there (pull: {pull}): correct `image:`, load it on the node (docker load), or set"
        " pull: missing",
    ),
    (
        r"\S+: (command )?not found$|failed to run command .*no such file|ended with code 127",
        "there is no {command} on the node: install Docker, or say docker_command in the inventory",
    ),
    (r"lookup .*: (no such host|i/o timeout)|tls handshake timeout|client\.timeout",
     "the node cannot reach the registry of {image}: load the image by hand (docker save, docker load)"),
    (
        r"error gathering device information|there is no /dev/",
        "a device of the inventory is not on the node: correct `devices:`, or load the GPU's driver",
    ),
    (r"already in use by container", "another run has a container of this name: is a second controller at work?"),
)  # fmt: skip


IMAGE_FREE = 40 * 2**30
"""Bytes that Docker's own disk should have free where the image is still to come."""


def container_options(node: Node, run: str) -> DockerOptions:
    """Options of a node's containers, references as they are written."""
    section = node.docker
    mounts = (*section.volumes, f"{node.results}:{node.results}") if node.results else section.volumes
    plain = {name: value for name, value in section.env.items() if not has_reference(value)}
    values = {**dict(section), "image": node.image or "", "volumes": mounts, "env": plain}
    return DockerOptions.model_construct(**values)  # the inventory has checked them


def _create(plan: Any, transport: Transport, progress: Callable[[str], None]) -> Engine:
    from orchestrator.engine.docker_containers import DockerEngine

    return DockerEngine(transport, plan.folder, plan.run, plan.slots, _real_options(plan), progress=progress)


def _real_options(plan: Any) -> DockerOptions:
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


def _preflight(node: Node, facts: Any) -> Iterator[Finding]:
    lacking, error = facts.values.get("docker.lacks"), facts.values.get("docker.error")
    said = f"{lacking}: not found" if lacking else error or "no answer in time"
    if "docker.version" in facts.values and not (lacking or error):
        yield from _image(node, facts)
    else:
        way = way_out(container_options(node, ""), said) or "see `systemctl status docker` there"
        yield Finding(UNUSABLE, "docker", f"docker does not answer ({said[-200:]})", way)


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
    env=lambda node: node.docker.env,
    isolates=lambda node: container_options(node, "").isolates,
)
