"""The options, names and labels of the containers that run workers, one container a slot.

`container_options` makes the options from a node of the inventory. The scripts are rendered from
`DockerOptions.values`, and `docker_containers.py` talks to Docker with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from orchestrator.inventory.model import DEVICE_GROUPS, OWN_RENDER_NODE, DockerSection, Node
from orchestrator.inventory.references import has_reference

INSIDE = "/gemmfleet"
"""Path of the node folder within a container."""
PRIVATE = "GEMMFLEET_PRIVATE_"
"""Lines of this beginning are for launch.sh itself and not for the containers' environment."""
RESTARTS = 5
"""Docker starts a worker that failed again this many times."""
LOG_OPTIONS = ("max-size=10m", "max-file=3")
CLI_TIMEOUT_S = 60
"""Limit of one docker command in launch.sh; a pull has none."""
MAX_HOST_NAME = 57
"""Characters of a node's name in a host name. With the slot it has at most 63, the limit of Linux."""


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

    @property
    def shared_devices(self) -> list[str]:
        """The devices that the container of each slot gets, whichever its GPU is."""
        return [device for device in self.devices or () if device != OWN_RENDER_NODE]

    def flags(self) -> list[str]:
        """Arguments of `docker run` that are the same for every slot."""
        flags = [f"--network={self.network}", f"--ipc={self.ipc}"]
        if self.shm_size:
            flags.append(f"--shm-size={self.shm_size}")
        if self.memory:
            flags += [f"--memory={self.memory}", f"--memory-swap={self.memory}"]
        flags += [f"--device={device}" for device in self.shared_devices]
        flags += [f"--group-add={group}" for group in self.group_add if group != DEVICE_GROUPS]
        flags += [f"--cap-add={capability}" for capability in self.cap_add]
        flags += [f"--security-opt={option}" for option in self.security_opt]
        if not self.private:
            flags += [f"--volume={volume}" for volume in self.volumes]
        return flags

    @property
    def private(self) -> bool:
        """Image or volumes refer to the environment: scripts hold the references, launch.sh gets the values."""
        return any(map(has_reference, (self.image, *self.volumes)))

    def private_lines(self) -> list[str]:
        """Lines that launch.sh reads on its standard input where the scripts were rendered from `written`."""
        if self.written is None:
            return []
        return [f"{PRIVATE}IMAGE={self.image}", *(f"{PRIVATE}VOLUME={volume}" for volume in self.volumes)]

    def values(
        self, run: str, node: str, slots: tuple[str, ...], version: str, cpus: Mapping[str, str], gpus: Sequence[str]
    ) -> dict[str, Any]:
        """Values for launch.sh, tune.sh, follow.sh and container.sh, under the name `docker`.

        `cpus`: the cores of each slot that is pinned, as the kernel lists them (`0-7,64-71`). `gpus`: the slots that
        are a GPU.
        """
        has_device_groups = DEVICE_GROUPS in self.group_add
        slot_flags: dict[str, list[str]] = {slot: [] for slot in slots}
        for slot in slots:
            if cpus.get(slot):
                slot_flags[slot].append(f"--cpuset-cpus={cpus[slot]}")
        return {
            "image": self.image,
            "private": self.private,
            "command": list(self.docker_command),
            "flags": self.flags(),
            "slot_flags": slot_flags,
            "hostnames": {slot: host_name(node, slot) for slot in slots},
            "names": {slot: container_name(run, node, slot) for slot in slots},
            "follower": container_name(run, node, "follow"),
            "labels": container_labels(run, node) | {"gemmfleet.version": version},
            "own_gpus": list(gpus) if self.devices is None else [],
            "own_render_node": OWN_RENDER_NODE in (self.devices or ()),
            "groups_of": [device.partition(":")[0] for device in self.shared_devices] if has_device_groups else [],
            "device_groups": has_device_groups,
            "user": self.user,
            "may_pull": self.pull != "never",
            "inside": INSIDE,
            "restarts": RESTARTS,
            "log_options": LOG_OPTIONS,
            "timeout_s": CLI_TIMEOUT_S,
        }


def container_options(node: Node, run: str) -> DockerOptions:
    """Options of a node's containers, references as they are written."""
    section = node.docker
    volumes = section.volumes
    if node.results:
        volumes = (*volumes, f"{node.results}:{node.results}")
    plain_env = {name: value for name, value in section.env.items() if not has_reference(value)}
    values = {**dict(section), "image": node.image or "", "volumes": volumes, "env": plain_env}
    return DockerOptions.model_construct(**values)  # the inventory has checked them


def container_labels(run: str, node: str) -> dict[str, str]:
    """Labels that show whose a container is."""
    return {"gemmfleet.run": run, "gemmfleet.node": node}


def container_name(run: str, node: str, slot: str) -> str:
    """The name of a slot's container."""
    return f"gemmfleet-{run}-{node}-{slot}"


def host_name(node: str, slot: str) -> str:
    """A legal host name of at most 63 characters."""
    plain = "".join(c if c.isalnum() or c in "-." else "-" for c in node)
    return f"{plain[:MAX_HOST_NAME].rstrip('-.')}-{slot}"
