"""The host that an inventory asks for, and what the user's ssh_config says about it.

`ssh -G` reads the ssh_config, so that it means what it means to ssh. Without an OpenSSH client on this machine paramiko
reads it, and refuses lines that it would read differently. ssh_connection.py connects with these settings.
"""

from __future__ import annotations

import dataclasses
import getpass
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class HostRequest:
    """A host to connect to. None stands for what the ssh_config says."""

    host: str
    user: str | None = None
    port: int | None = None
    identity: str | None = None
    proxy_jump: str | None = None
    """Hops as in ssh_config: `[user@]host[:port]`, several separated by commas, or `none`."""
    config: Path | None = None
    """An ssh_config to read instead of the user's and the system's."""


CONFIGS = (Path("~/.ssh/config"), Path("/etc/ssh/ssh_config"))


IDENTITIES = ("~/.ssh/id_rsa", "~/.ssh/id_ecdsa", "~/.ssh/id_ed25519")


PLAIN_LINE = re.compile(r"\s*(#.*|(?!(include|match|canonical\w*)\b)\w+[ \t=]+[\w.@:,~/%*?!+ \t-]+)?\s*", re.IGNORECASE)
"""A line that paramiko reads as ssh does: without quotes, comments behind values, variables, Include and Match."""


TOKEN = re.compile(r"%(.?)|\$\{(\w*)\}")


JUMP = re.compile(r"(?:ssh://)?(?:(.+)@)?(?:\[([^]]+)\]|([^:/]+))(?::(\d+))?/?")


def ssh_settings(request: HostRequest, seconds: float) -> dict[str, Any]:
    """The ssh configuration for a host: setting in small letters -> value, such as `{"hostname": "10.0.0.7", "port":
    "22", "identityfile": ["~/.ssh/id_rsa"]}`. `seconds`: time limit of ssh. Raises ValueError, OSError."""
    client = shutil.which("ssh")
    if client is None:
        return _plain_settings(request)
    argv = [client, "-G"]
    # the inventory's jumps are followed by `_hops`; those of ssh_config must not count beside them
    jumps = "none" if request.proxy_jump else None
    for option, value in (("-F", request.config), ("-l", request.user), ("-p", request.port), ("-J", jumps)):
        if value is not None:
            argv += [option, str(value)]
    # a command of `Match exec` must not read our terminal
    done = subprocess.run(
        [*argv, request.host], stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
    )
    answer = os.fsdecode(done.stdout)
    errors = os.fsdecode(done.stderr)
    if "jumphost loop" in errors and not request.proxy_jump:
        # `Host *` with ProxyJump holds for the jump host, too: it has none to itself. Older versions of ssh print it
        return ssh_settings(dataclasses.replace(request, proxy_jump="none"), seconds)
    if done.returncode != 0:
        raise ValueError("; ".join(errors.splitlines()))
    settings: dict[str, Any] = {"identityfile": []}
    for line in answer.splitlines():
        name, _, text = line.partition(" ")
        if name == "identityfile":
            settings[name].append(text)
        else:
            settings[name] = text
    return settings


def _plain_settings(request: HostRequest) -> dict[str, Any]:
    """The settings as paramiko reads them, for a machine without an OpenSSH client. Raises ValueError for a line that
    paramiko would read differently."""
    files = [request.config] if request.config else [p for p in map(Path.expanduser, CONFIGS) if p.is_file()]
    # ssh_config uses a setting's first value, so the inventory's values go first
    of_inventory = {"User": request.user, "Port": request.port}
    text = "".join(f"{name} {value}\n" for name, value in of_inventory.items() if value is not None)
    for file in files:
        lines = file.read_text("utf-8", "replace").splitlines()
        for number, line in enumerate(lines, 1):
            if not PLAIN_LINE.fullmatch(line):
                raise ValueError(f"{file}:{number}: {line.strip()[:80]!r} needs an OpenSSH client on this machine")
        text += "\n".join(["Host *", *lines, ""])
    import paramiko  # it takes a tenth of a second

    settings = dict(paramiko.SSHConfig.from_text(text).lookup(request.host))
    names = list(settings)
    # of ProxyCommand and ProxyJump the first one counts; paramiko keeps the order of the file
    if "proxycommand" in names and "proxyjump" in names[names.index("proxycommand") :]:
        del settings["proxyjump"]
    return settings


def expand(value: str, settings: Mapping[str, Any], typed_host: str, *, variables: bool = True) -> str:
    """A setting with its tokens (%h) and ${VARIABLES} replaced, because `ssh -G` leaves some of them to ssh.
    `typed_host`: the name that was asked for (%n). Raises ValueError."""
    host = settings["hostname"]
    user = getpass.getuser()
    tokens: dict[str, str] = {
        "%": "%",
        "d": str(Path.home()),
        "h": host,
        "k": settings.get("hostkeyalias", host),
        "n": typed_host,
        "p": settings.get("port", "22"),
        "r": settings.get("user", user),
        "u": user,
    }

    def value_of(match: re.Match[str]) -> str:
        token, variable = match.groups()
        if variable and not variables:
            return str(match[0])
        text = os.environ.get(variable) if variable else tokens.get(token)
        if text is None:
            raise ValueError(f"{match[0]} in {value!r} is not known here")
        return text

    return TOKEN.sub(value_of, value)


def last_jump(jumps: str) -> tuple[HostRequest, str]:
    """The last host of a ProxyJump, and the text of those before it. Raises ValueError."""
    before, _, last = jumps.rpartition(",")
    match = JUMP.fullmatch(last.strip('" '))
    if match is None:
        raise ValueError(f"ProxyJump {last!r} is not [user@]host[:port], with an IPv6 address in brackets")
    user, address, name, port = match.groups()
    return HostRequest(address or name, user, int(port) if port else None), before
