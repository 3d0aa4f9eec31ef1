"""Errors of Docker in the user's words: what happened on which node, and the way out for the messages that we know."""

from __future__ import annotations

import re

from orchestrator.engine.docker_options import DockerOptions
from orchestrator.errors import EngineError

MAX_MESSAGE = 600
"""Characters of Docker's message that are shown: its end, where the cause stands."""

_WAYS_OUT = (
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
    (
        r"lookup .*: (no such host|i/o timeout)|tls handshake timeout|client\.timeout",
        "the node cannot reach the registry of {image}: load the image by hand (docker save, docker load)",
    ),
    (
        r"error gathering device information|there is no /dev/",
        "a device of the inventory is not on the node: correct `devices:`, or load the GPU's driver",
    ),
    (r"already in use by container", "another run has a container of this name: is a second controller at work?"),
)
"""(pattern of a message in small letters, what to do); the first that matches counts."""


def way_out(options: DockerOptions, message: str) -> str:
    """Way out of a message of docker, sudo or the daemon; "" where none is known."""
    for pattern, text in _WAYS_OUT:
        if re.search(pattern, message.lower(), re.MULTILINE):
            image = (options.written or options).image  # never a private value
            return text.format(image=image, command=" ".join(options.docker_command), pull=options.pull)
    return ""


def engine_error(node: str, options: DockerOptions, message: str) -> EngineError:
    """EngineError with the way out. `message`: of docker, sudo or the daemon."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip() and "--help'" not in line]
    short = " / ".join(lines[-3:]) or "it gave no message"
    if len(short) > MAX_MESSAGE:
        short = f"... {short[-MAX_MESSAGE:].partition(' ')[2]}"
    hint = way_out(options, message)
    return EngineError(node, f"{hint} ({short})" if hint else f"Docker: {short}")
