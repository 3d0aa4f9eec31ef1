"""The `docker:` section of a node: how the containers of its slots are started."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from orchestrator.inventory.values import (
    Capability,
    ContainerUser,
    Device,
    Env,
    GroupRef,
    Mount,
    Network,
    SecurityOption,
    Size,
    Word,
    listed,
)

OWN_RENDER_NODE = "/dev/dri"
"""This device stands for the render node of the slot's own GPU."""
DEVICE_GROUPS = "auto"
"""This group stands for the groups that own the slot's devices on the node."""


class Strict(BaseModel):
    """Unknown keys are errors, nothing is converted from one type to another, nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class DockerSection(Strict):
    """Options of the containers. What is not said here is Docker's own default, but for network: it has none."""

    devices: Annotated[tuple[Device, ...], BeforeValidator(listed)] = ()
    """Devices of the node. `/dev/dri` alone means the render node of the slot's own GPU; `/dev/dri:/dev/dri` all."""
    group_add: Annotated[tuple[GroupRef, ...], BeforeValidator(listed)] = ()
    """Further groups: `auto` (the numeric groups of the devices, read on the node), numbers, or names of the image."""
    cap_add: Annotated[tuple[Capability, ...], BeforeValidator(listed)] = ()
    """Capabilities on top of Docker's own, such as SYS_PTRACE. Never ALL, and never --privileged."""
    security_opt: Annotated[tuple[SecurityOption, ...], BeforeValidator(listed)] = ()
    """Security options, such as seccomp=unconfined."""
    shm_size: Size | None = None
    """Size of /dev/shm where ipc is private, such as 16G."""
    ipc: Literal["private", "host", "shareable", "none"] = "private"
    """Whose shared memory and semaphores the container sees."""
    network: Network = "none"
    """none, host, bridge, or the name of a network on the node."""
    volumes: Annotated[tuple[Mount, ...], BeforeValidator(listed)] = ()
    """Further mounts, SOURCE:TARGET[:ro]; the node folder is mounted anyway."""
    env: Env = Field(default_factory=dict)
    """Environment of the containers, on top of the node's own `env`."""
    pull: Literal["missing", "always", "never"] = "missing"
    """When the image is pulled."""
    docker_command: Annotated[tuple[Word, ...], BeforeValidator(listed), Field(min_length=1)] = ("docker",)
    """How docker is called on the node, such as [sudo, -n, docker]."""
    user: ContainerUser | None = None
    """USER or UID:GID within the container; default: the owner of the node folder."""
    memory: Size | None = None
    """Limit of a container's memory, such as 200g; what needs more is ended and counts as out of memory."""
