"""Route to a host as OpenSSH itself would take it (`ssh -G`), run once for a fleet where the answer is the same.

So Include, Match, ProxyJump, HostKeyAlias and the rest of the user's configuration hold, and nothing here interprets
that file. What the inventory says is given to `ssh -G` as options, which win over the file as they do for `ssh`. Where
the configuration cannot differ between hosts, one answer serves all (4 ms of CPU each otherwise); anything that is not
plainly harmless counts as different.
"""

from __future__ import annotations

import glob
import os
import pwd
import re
import socket
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.errors import TransportError

SYSTEM = Path("/etc/ssh/ssh_config")
MAX_DEPTH = 16
_SETTING = re.compile(r"\s*([A-Za-z]+)(?:\s*=\s*|\s+)(.*)\Z")
_DIFFERS = ("match", "hostname", "canonicalizehostname", "canonicaldomains", "canonicalizepermittedcnames")

ConfigState = tuple[tuple[str, int, int], ...]
"""(path, mtime in ns, size) of every file that was read."""


def state_if_same(config: Path | None) -> ConfigState | None:
    """ConfigState of the files where they are the same for every host; None where they may differ."""
    found: list[tuple[str, int, int]] = []
    home = Path("~").expanduser()
    files = (
        [(config, home / ".ssh")] if config else [(home / ".ssh" / "config", home / ".ssh"), (SYSTEM, SYSTEM.parent)]
    )
    try:
        for path, base in files:
            if path.exists() and not _same(path, base, found, 0):
                return None
    except OSError:
        return None
    return tuple(found)


def _same(path: Path, base: Path, found: list[tuple[str, int, int]], depth: int) -> bool:
    """`base`: the folder of relative names after Include."""
    if depth > MAX_DEPTH:
        return False
    s = path.stat()
    found.append((str(path), s.st_mtime_ns, s.st_size))
    for line in path.read_text("utf-8", "replace").splitlines():
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        m = _SETTING.match(text)
        if not m:
            return False
        name, value = m[1].lower(), m[2].strip()
        if name == "include":
            if any(c in value for c in "\"'$%~"):
                return False
            for pattern in value.split():
                for file in sorted(glob.glob(os.path.join(base, pattern))):
                    if not _same(Path(file), base, found, depth + 1):
                        return False
        # %-signs stand for the host's name, among other things
        elif name in _DIFFERS or "%" in value or (name == "host" and value != "*"):
            return False
    return True


MAX_HOPS = 8
_sharing = threading.Lock()
_shared: dict[Any, dict[str, list[str]]] = {}
"""Answers that hold for any host, by options and state of the configuration."""
MAX_SHARED = 32
_TOKEN = re.compile(r"%(.)")
_DESTINATION = re.compile(
    r"(?:ssh://)?(?:(?P<user>.+)@)?(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:@\[\]]+|[0-9a-fA-F:]+))(?::(?P<port>[0-9]{1,5}))?/?\Z"
)


@dataclass(frozen=True, slots=True)
class HostRequest:
    """A requested host; None: as in the configuration."""

    host: str
    user: str | None = None
    port: int | None = None
    identity: str | None = None
    proxy_jump: str | None = None
    """Hops as in ssh_config: `[user@]host[:port]`, several separated by commas, or `none`."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One host to log in to, with all that is needed for it."""

    name: str
    """Name as requested."""
    host: str
    port: int
    user: str
    key_names: tuple[str, ...]
    """Names under which known_hosts may hold its key; the first is the one to write."""
    identities: tuple[Path, ...]
    chosen: bool
    """The identity was given by the inventory: it is taken alone."""
    identities_only: bool
    agent: str | None
    user_files: tuple[Path, ...]
    global_files: tuple[Path, ...]
    hash_names: bool
    proxy_command: str | None
    cannot: tuple[str, ...]
    """Settings of the configuration that are not followed here, for an error message."""

    @property
    def place(self) -> str:
        return f"{self.host}:{self.port}" if ":" not in self.host else f"[{self.host}]:{self.port}"

    @property
    def title(self) -> str:
        return f"{self.user}@{self.place}" + (f" ({self.name})" if self.name != self.host else "")


def resolve(node: str, ask: HostRequest, config: Path | None = None) -> list[Hop]:
    """The hosts to go through, the node itself last. Raises TransportError."""
    return _route(node, ask, config, 0)


def _route(node: str, ask: HostRequest, config: Path | None, depth: int) -> list[Hop]:
    if depth > MAX_HOPS:
        raise TransportError(node, f"ProxyJump leads in a circle or through more than {MAX_HOPS} hosts")
    found = _ssh_g(node, ask, config)
    hop = _hop(ask, found)
    jump = found.get("proxyjump", ["none"])[0]
    if jump == "none":
        return [hop]
    first, *others = [_destination(node, text) for text in jump.split(",")]
    if first.host in (ask.host, hop.host):  # `Host *` with ProxyJump holds for the jump host, too: it has none
        return [hop]
    # as OpenSSH: the first host's own ProxyJump holds, the following are reached through the one before
    hops = _route(node, first, config, depth + 1)
    for other in others:
        hops += _route(node, replace(other, proxy_jump="none"), config, depth + 1)
    return [*hops, hop]


def _destination(node: str, text: str) -> HostRequest:
    m = _DESTINATION.match(text.strip())
    if not m or (m["port"] and not 0 < int(m["port"]) < 65536):
        raise TransportError(node, f"ProxyJump {text!r} is not [user@]host[:port]")
    return HostRequest(m["six"] or m["host"], m["user"], int(m["port"]) if m["port"] else None)


def _ssh_g(node: str, ask: HostRequest, config: Path | None) -> dict[str, list[str]]:
    """Every setting of `ssh -G`, by its lower-case name; settings that come several times keep their order."""
    if not ask.host or ask.host.startswith("-") or not ask.host.isprintable() or " " in ask.host:
        raise TransportError(node, f"{ask.host!r} is not a host name")
    argv = ["ssh", "-G"]
    argv += ["-F", str(config)] if config else []
    argv += ["-J", ask.proxy_jump] if ask.proxy_jump else []
    state = state_if_same(config)
    if state is None:
        argv += ["-l", ask.user] if ask.user else []
        argv += ["-p", str(ask.port)] if ask.port else []
        return _answer(node, argv, ask.host)
    key = (tuple(argv), state)
    with _sharing:  # one thread runs ssh -G, the other nodes of the fleet wait for its answer
        if key not in _shared:
            if len(_shared) >= MAX_SHARED:
                _shared.clear()
            _shared[key] = _answer(node, argv, ask.host)
        found = dict(_shared[key])
    found["hostname"] = [ask.host.lower()]
    found |= {"user": [ask.user]} if ask.user else {}
    found |= {"port": [str(ask.port)]} if ask.port else {}
    return found


def _answer(node: str, argv: list[str], host: str) -> dict[str, list[str]]:
    try:
        done = subprocess.run(
            [*argv, "--", host], stdin=subprocess.DEVNULL, capture_output=True, timeout=10, start_new_session=True
        )
    except FileNotFoundError as e:
        raise TransportError(
            node, "the ssh client is not installed here (Debian: apt-get install openssh-client)"
        ) from e
    except (OSError, subprocess.TimeoutExpired) as e:
        raise TransportError(node, f"ssh -G {host} did not answer (a `Match exec` that hangs?): {e}") from e
    if done.returncode:
        words = done.stderr.decode("utf-8", "replace").strip()[-500:]
        raise TransportError(node, f"ssh -G {host} ended with code {done.returncode}: {words}")
    found: dict[str, list[str]] = {}
    for line in done.stdout.decode("utf-8", "surrogateescape").splitlines():
        name, _, value = line.partition(" ")
        found.setdefault(name.lower(), []).append(value)
    return found


def _hop(ask: HostRequest, found: Mapping[str, list[str]]) -> Hop:
    def one(name: str, default: str = "") -> str:
        value = found.get(name, [default])[0]
        return default if value == "none" else value

    host, port, user = one("hostname", ask.host), int(one("port", "22")), one("user")
    home = Path.home()
    tokens = {
        "%": "%", "d": str(home), "h": host, "n": ask.host, "p": str(port), "r": user, "u": _local_user(),
        "l": socket.gethostname(), "L": socket.gethostname().split(".")[0], "i": str(os.getuid()), "k": "",
    }  # fmt: skip

    def path(text: str) -> Path:
        text = _expand(text, tokens)
        return home / text[2:] if text.startswith("~/") else Path(text)

    if ask.identity:
        identities = [path(ask.identity)]
    else:
        identities = [path(i) for i in found.get("identityfile", []) if i != "none"]
    alias = one("hostkeyalias")
    plain = host.lower()
    command = one("proxycommand")
    return Hop(
        name=ask.host,
        host=host,
        port=port,
        user=user,
        # a key that is known for the host is known for its other ports, too: OpenSSH looks there as well
        key_names=(alias,) if alias else (plain,) if port == 22 else (f"[{plain}]:{port}", plain),
        identities=tuple(identities),
        chosen=ask.identity is not None,
        identities_only=one("identitiesonly") == "yes" or ask.identity is not None,
        agent=_agent(found),
        user_files=tuple(path(f) for f in one("userknownhostsfile").split()),
        global_files=tuple(path(f) for f in one("globalknownhostsfile").split()),
        hash_names=one("hashknownhosts") == "yes",
        proxy_command=_expand(command, tokens) if command else None,
        cannot=tuple(_cannot(found)),
    )


def _expand(text: str, tokens: Mapping[str, str]) -> str:
    return _TOKEN.sub(lambda m: tokens.get(m[1], m[0]), text)


def _local_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _agent(found: Mapping[str, list[str]]) -> str | None:
    """The agent's socket: IdentityAgent, else the environment's."""
    name = found.get("identityagent", ["SSH_AUTH_SOCK"])[0]
    if name == "none":
        return None
    if name == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK")
    if name.startswith("$"):
        return os.environ.get(name[1:].strip("{}"))
    return str(Path(name).expanduser())


def _cannot(found: Mapping[str, list[str]]) -> list[str]:
    out = []
    if found.get("pkcs11provider", ["none"])[0] != "none":
        out.append("PKCS11Provider (put the key into ssh-agent: ssh-add -s PROVIDER)")
    if "certificatefile" in found:
        out.append("CertificateFile (a certificate is taken only where it lies beside its key as KEY-cert.pub)")
    if "knownhostscommand" in found:
        out.append("KnownHostsCommand (only files are read)")
    if found.get("controlpath", ["none"])[0] != "none":
        out.append("ControlPath (a connection that ssh keeps open is not shared)")
    if found.get("pubkeyauthentication", ["true"])[0] in ("false", "no"):
        out.append("PubkeyAuthentication no (keys are all that is used here)")
    return out
