"""What Docker and its command line say when they cannot, as EngineErrors that name the way out."""

from __future__ import annotations

import re
from collections.abc import Callable

from orchestrator.engine.docker.options import DockerOptions
from orchestrator.errors import EngineError


def engine_error(
    node: str, options: DockerOptions, said: str, group: Callable[[], str] = lambda: "docker"
) -> EngineError:
    """`said`: words of docker, sudo or the daemon. `group` finds who may use Docker's socket, where that matters."""
    lowered = said.lower()
    command = " ".join(options.docker_command)
    for pattern, text in _TABLE:
        if re.search(pattern, lowered, re.MULTILINE):
            hint = text.format(
                image=(options.written or options).image,
                command=command,
                group=group() if "{group}" in text else "",
                pull=options.pull,
            )
            return EngineError(node, f"{hint} ({_short(said)})")
    return EngineError(node, f"Docker: {_short(said)}")


_TABLE = (
    (
        r"permission denied while trying to connect|dial unix .*permission denied",
        "this user may not use Docker: add it to the group {group} on the node (sudo usermod -aG {group} USER, then log"
        " in again), or set docker_command: [sudo, -n, docker] in the inventory",
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


def _short(said: str) -> str:
    lines = [line.strip() for line in said.strip().splitlines() if line.strip() and "--help'" not in line]
    return " / ".join(lines[-3:])[-600:] or "it said nothing"
