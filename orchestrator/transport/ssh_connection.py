"""Opens the fabric Connections to a node and to every gateway on the way, within a time limit.

`connect` is the way in: it tries `_attempt` until its time is over. An attempt makes the hops of the route (`hops`) and
opens them one after another (`_open`), so that a wrong key or a refusal is reported for the host that it is from.

Only `hops` makes Connections: fabric itself would make the gateways of a ProxyJump and trust any key that they show.
A Connection knows the keys of known_hosts and refuses a host without a key there (`KnownOnly`). It logs in with private
keys from files and from the agent, and never prompts (`Login`). ssh_config.py reads the user's configuration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import fabric
import paramiko
import tenacity
from paramiko.auth_strategy import AuthFailure, AuthStrategy, InMemoryPrivateKey, OnDiskPrivateKey
from paramiko.hostkeys import HostKeyEntry

from orchestrator.errors import HostKeyError, LoginError, TransportError, UnreachableError
from orchestrator.transport.ssh_config import IDENTITIES, HostRequest, expand, last_jump, ssh_settings

USER_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"
MAX_DEPTH = 8
"""Most hosts on the way to a node."""
MAX_OFFERS = 6
"""sshd's default MaxAuthTries: it hangs up after this many keys."""
KEEPALIVE_S = 10
TCP_GIVE_UP_S = 30
"""The kernel drops a connection if the other side acknowledges nothing for this long."""
LOOK_S = 0.1
"""A wait for a connection looks this often whether it was stopped."""
LAST_TRY_S = 0.3
"""No new try is started if less time than this is left."""
NOT_FOLLOWED = ("certificatefile", "identityagent", "knownhostscommand", "pkcs11provider", "securitykeyprovider")
"""Settings of ssh_config that a login may need, and that fabric and paramiko do not support."""

# paramiko's errors come as exceptions; without this handler it would print them as well
logging.getLogger("paramiko").addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True)
class Hop:
    """One host on the way: its fabric Connection, its host key policy and our login."""

    connection: Any
    host_keys: KnownOnly
    login: Login

    @property
    def place(self) -> str:
        """Host and port."""
        return self.host_keys.place


def hops(node: str, request: HostRequest, *, accept_new: bool = False, seconds: float = 60.0) -> list[Hop]:
    """The hosts on the way to a host, ending with that host. Opens nothing. `seconds`: time limit of each later step.

    Raises TransportError.
    """
    try:
        return _hops(node, request, accept_new, seconds, 0)
    except (paramiko.ConfigParseError, subprocess.SubprocessError, OSError, ValueError) as e:
        text = f"the ssh configuration cannot be used: {e}; correct it, or name another file as the node's ssh_config"
        raise TransportError(node, text) from e


def _hops(node: str, request: HostRequest, accept_new: bool, seconds: float, depth: int) -> list[Hop]:
    if depth > MAX_DEPTH:
        raise TransportError(node, f"ProxyJump leads in a circle or through more than {MAX_DEPTH} hosts")
    if request.host.split() != [request.host] or not request.host.isprintable() or request.host.startswith("-"):
        raise TransportError(node, f"{request.host!r} is not a host name")
    settings = ssh_settings(request, seconds)
    settings["identityfile"] = [
        expand(name, settings, request.host) for name in settings.get("identityfile", IDENTITIES)
    ]
    gateways: list[Hop] = []
    proxy: str | bool = False
    jumps = request.proxy_jump or settings.get("proxyjump", "none")
    if jumps.lower() != "none":
        via, before = last_jump(jumps)
        if via.host not in (request.host, settings["hostname"]):
            via = dataclasses.replace(via, proxy_jump=before or None, config=request.config)
            gateways = _hops(node, via, accept_new, seconds, depth + 1)
    if settings.get("proxycommand") and not request.proxy_jump:
        proxy = expand(settings["proxycommand"], settings, request.host, variables=False)
    login = Login(request, settings)
    connection = fabric.Connection(
        settings["hostname"].lower(),
        user=settings.get("user"),
        port=int(settings.get("port", 22)),
        config=fabric.Config(lazy=True, overrides={"load_ssh_configs": False}),
        gateway=gateways[-1].connection if gateways else proxy,
        forward_agent=False,
        connect_timeout=math.ceil(seconds),
        connect_kwargs={
            "auth_strategy": login,
            "banner_timeout": seconds,
            "auth_timeout": seconds,
            "channel_timeout": seconds,
        },
    )
    login.user = connection.user
    return [*gateways, Hop(connection, KnownOnly(node, connection, settings, accept_new), login)]


def _read_known_hosts(path: Path) -> tuple[paramiko.HostKeys, frozenset[str]]:
    """Keys in a file, and the keys that it revokes."""
    status = path.stat()
    return _known_hosts(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=16)
def _known_hosts(path: Path, mtime_ns: int, size: int) -> tuple[paramiko.HostKeys, frozenset[str]]:
    """Keys in a file of that age and size, and the keys that it revokes. The whole fleet shares one reading."""
    keys = paramiko.HostKeys()
    revoked: set[str] = set()
    for line in path.read_text("utf-8", "replace").splitlines():
        words = line.split()
        if words[:1] == ["@revoked"]:
            revoked.update(words[3:4])
        elif words and words[0][0] not in "#@":
            with contextlib.suppress(Exception):  # skip a malformed line, as OpenSSH does
                entry = HostKeyEntry.from_line(" ".join(words))
                for name in entry.hostnames:
                    keys.add(name, entry.key.get_name(), entry.key)
    return keys, frozenset(revoked)


class KnownOnly(paramiko.RejectPolicy):  # type: ignore[misc]
    """Gives a Connection the known keys of its host. Refuses a new key, or stores it if the user asked for that."""

    def __init__(self, node: str, connection: Any, settings: Mapping[str, Any], accept_new: bool) -> None:
        self._node = node
        self._accept_new = accept_new
        self._host = connection.host
        self._port = connection.port
        self._behind_gateway = bool(connection.gateway)
        shown = self._host if self._port == 22 else f"[{self._host}]:{self._port}"
        self._name = settings.get("hostkeyalias", shown)
        users = settings.get("userknownhostsfile", USER_KNOWN_HOSTS)
        systems = settings.get("globalknownhostsfile", SYSTEM_KNOWN_HOSTS)
        names = [name for name in (*users.split(), *systems.split()) if name != "none"]
        self._files = [Path(name).expanduser() for name in names or USER_KNOWN_HOSTS.split()]
        known = [_read_known_hosts(file) for file in self._files if file.is_file()]
        self._revoked = frozenset[str]().union(*(revoked for _, revoked in known))
        for keys, _ in reversed(known):  # if two files have a key of a kind, the first file wins
            for kind, key in (keys.lookup(self._name) or {}).items():
                if key.get_base64() not in self._revoked:
                    connection.client.get_host_keys().add(shown, kind, key)
        connection.client.set_missing_host_key_policy(self)

    @property
    def place(self) -> str:
        """Host and port."""
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    def missing_host_key(self, client: object, hostname: str, key: paramiko.PKey) -> None:
        """Called by paramiko for a host without a known key. Store the key if the user asked for that, else raise
        HostKeyError."""
        files = ", ".join(map(str, self._files))
        shows = f"the key that {self.place} shows ({key.get_name()} {key.fingerprint})"
        if key.get_base64() in self._revoked:
            raise HostKeyError(self._node, f"{shows} is revoked in one of {files}")
        if not self._accept_new:
            raise HostKeyError(
                self._node,
                f"{shows} is not known; looked for {self._name} in {files}. Compare the fingerprint with the host's own"
                f" (ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub there), then add it: {self._scan()}; or trust what comes"
                " first with --accept-new-host-keys",
            )
        path = self._files[0]
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            line = f"{self._name} {key.get_name()} {key.get_base64()}\n"
            if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
                line = f"\n{line}"  # the last line has no end
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w") as f:
                f.write(line)
        except OSError as e:
            raise HostKeyError(self._node, f"{shows} cannot be kept in {path}: {e.strerror or e}") from e

    def changed(self, e: paramiko.BadHostKeyException) -> HostKeyError:
        """The error for a host whose key differs from the known one."""
        file, line = self._place_of(e.expected_key.get_base64())
        return HostKeyError(
            self._node,
            f"the host key has changed: the key that {self.place} shows ({e.key.get_name()} {e.key.fingerprint}) is not"
            f" the known one ({file}:{line} holds {e.expected_key.get_name()} {e.expected_key.fingerprint}). Somebody"
            " may be listening in, or the host was set up anew. If it really has a new key, remove the old line"
            f" (ssh-keygen -R {shlex.quote(self._name)} -f {shlex.quote(str(file))}) and add the new key"
            f" ({self._scan()})",
        )

    def _place_of(self, key: str) -> tuple[Path, int]:
        """The file and line that hold a key."""
        for file in self._files:
            text = file.read_text("utf-8", "replace") if file.is_file() else ""
            if key in text:
                return file, text[: text.find(key)].count("\n") + 1
        return self._files[0], 1

    def _scan(self) -> str:
        """The command that adds the key."""
        if self._behind_gateway:
            return f"log in once with ssh {shlex.quote(self._host)} in the same way"
        port = f"-p {self._port} " if self._port != 22 else ""
        return f"ssh-keyscan {port}{shlex.quote(self._host)} >>{shlex.quote(str(self._files[0]))}"


@lru_cache(maxsize=64)
def _private_key(path: Path, mtime_ns: int) -> paramiko.PKey:
    """The key in a file of that age, with the certificate beside it. Read once for the fleet, because RSA is slow."""
    return paramiko.PKey.from_path(path)


class Login(AuthStrategy):  # type: ignore[misc]
    """Offers keys from files, then keys from the agent; or only the inventory's identity, if it can be read."""

    def __init__(self, request: HostRequest, settings: Mapping[str, Any]) -> None:
        super().__init__(ssh_config=settings)
        self.user = ""
        self._chosen = request.identity is not None
        names = [request.identity] if request.identity else settings["identityfile"]
        self._identities = [Path(name).expanduser() for name in names]
        self._notes: list[str] = []

    def get_sources(self) -> Iterator[Any]:
        """Yield the keys in the order in which they are offered."""
        for path in self._identities:
            try:
                key = _private_key(path, path.stat().st_mtime_ns)
            except FileNotFoundError:
                if self._chosen:
                    self._notes.append(f"the identity {path} does not exist")
                    return
            except Exception as e:  # noqa: BLE001  paramiko and cryptography raise many kinds
                self._notes.append(f"{path} cannot be read here: it is encrypted or of another kind ({e})")
            else:
                yield OnDiskPrivateKey(self.user, "ssh-config", path, key)
        alone = self._chosen or self.ssh_config.get("identitiesonly") == "yes"
        if self.ssh_config.get("identityagent") != "none" and (self._notes or not alone):
            with contextlib.closing(paramiko.Agent()) as agent:
                for key in agent.get_keys():
                    yield InMemoryPrivateKey(self.user, key)

    def refused(self, node: str, place: str, tried: Sequence[Any]) -> LoginError:
        """The error for a host that accepted no key."""
        said = [*self._notes]
        for source, result in tried:
            where = getattr(source, "path", f"the agent's {source.pkey.get_name()} {source.pkey.fingerprint}")
            if isinstance(result, paramiko.BadAuthenticationType):
                said.append(f"the host takes no keys, only {', '.join(result.allowed_types)}")
            elif isinstance(result, list):
                said.append(f"{where} is taken, but the host asks for more ({', '.join(result)})")
            elif isinstance(result, paramiko.AuthenticationException):
                said.append(f"not taken: {where}")
            else:
                said.append(f"cannot be used: {where} ({result})")
        unknown = [s for s in NOT_FOLLOWED if self.ssh_config.get(s, "none") not in ("none", "internal")]
        if unknown:
            said.append(f"these settings of your ssh configuration are not supported: {', '.join(unknown)}")
        return LoginError(
            node,
            f"{self.user}@{place} did not let us in: {'; '.join(said) or 'there is no key to offer'}. Put the public"
            f" key into ~/.ssh/authorized_keys of {self.user} there, or set user or identity of the node. Encrypted"
            " keys, security keys, PKCS11 and odd certificates work through ssh-agent: run ssh-add, and see that"
            " SSH_AUTH_SOCK names the agent. Passwords are never asked for",
        )


def hang_up(route: Sequence[Hop]) -> None:
    """Close the connections of a route, the first one first: it has the socket, and once that is closed, no packet of
    the others can block."""
    for hop in route:
        transport = hop.connection.client.get_transport()
        with contextlib.suppress(Exception):
            hop.connection.client.close()
        proxy = getattr(transport, "sock", None)
        if isinstance(proxy, paramiko.ProxyCommand):
            transport.join(TCP_GIVE_UP_S)  # its thread signals the process, so the process must exist until then
            proxy.process.kill()
            proxy.process.wait()
            for pipe in (proxy.process.stdin, proxy.process.stdout, proxy.process.stderr):
                pipe.close()  # do not read to the end: a process that the command started may hold the pipe open


def _open(node: str, hop: Hop) -> None:
    """Connect to one host and log in. Raises TransportError."""
    try:
        tried = hop.connection.open()
    except paramiko.BadHostKeyException as e:
        raise hop.host_keys.changed(e) from e
    except AuthFailure as e:
        if len(e.result) < MAX_OFFERS and e.result and not hop.connection.client.get_transport().is_active():
            raise UnreachableError(node, f"the connection broke while logging in to {hop.place}") from e
        raise hop.login.refused(node, hop.place, e.result) from e
    except socket.gaierror as e:
        text = f"the name {hop.connection.host} cannot be resolved ({e.strerror}); set host: of the node"
        raise UnreachableError(node, text, transient=e.errno == socket.EAI_AGAIN) from e
    except paramiko.ChannelException as e:
        text = f"the jump host cannot connect to {hop.place} ({e.text})"
        if e.code == 1:
            text = f"the jump host does not let us through to {hop.place} (AllowTcpForwarding in its sshd_config)"
        raise UnreachableError(node, text, transient=e.code == 2) from e
    except paramiko.ssh_exception.IncompatiblePeer as e:
        raise UnreachableError(node, f"{hop.place} and we share no algorithm: {e}", transient=False) from e
    except OSError as e:
        refused = [*getattr(e, "errors", {}).values(), e][0]
        if isinstance(refused, ConnectionRefusedError):
            text = f"{hop.place} refused the connection: is sshd running there, on that port?"
            raise UnreachableError(node, text, refused=True) from e
        raise UnreachableError(node, f"no connection to {hop.place}: {e.strerror or e}") from e
    except (paramiko.SSHException, EOFError) as e:
        raise UnreachableError(node, f"{hop.place} broke off while connecting: {e or 'it hung up'}") from e
    transport = hop.connection.transport
    if not transport.is_authenticated():
        raise hop.login.refused(node, hop.place, tried)
    transport.set_keepalive(KEEPALIVE_S)
    if isinstance(transport.sock, socket.socket):
        transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_GIVE_UP_S * 1000)


def _attempt(node: str, request: HostRequest, accept_new: bool, deadline: float, stop: threading.Event) -> list[Hop]:
    """The open hops, after one try. Raises TransportError.

    The work runs in a thread, because a name look-up or a `Match exec` cannot be interrupted, only abandoned.
    """
    began = time.monotonic()
    done = threading.Event()
    abandoned = threading.Event()
    route: list[Hop] = []
    errors: list[BaseException] = []
    steps = ["the ssh configuration"]
    """The steps so far; the last one is the one that did not answer."""

    def work() -> None:
        try:
            # the waiting thread's limit is shorter; these limits end the thread that it abandoned
            route.extend(
                hops(node, request, accept_new=accept_new, seconds=max(1.0, deadline - time.monotonic()) + 5.0)
            )
            for hop in route:
                steps.append(hop.place)
                _open(node, hop)
        except BaseException as e:  # noqa: BLE001  raised again in the thread that waits
            errors.append(e)
        done.set()
        if abandoned.is_set():
            hang_up(route)

    threading.Thread(target=work, name=f"connect {node}", daemon=True).start()
    while not done.wait(LOOK_S) and not stop.is_set() and time.monotonic() < deadline:
        pass
    if done.is_set() and not errors:
        return route
    abandoned.set()
    transport = route[-1].connection.client.get_transport() if route else None
    hang_up(route)
    if errors:
        raise errors[0]
    if stop.is_set():
        raise UnreachableError(node, "connecting was stopped", transient=False)
    greeted = bool(transport is not None and transport.remote_version)
    text = f"{steps[-1]} did not answer within {time.monotonic() - began:.0f} s"
    raise UnreachableError(node, text, silent=True, greeted=greeted)


def connect(
    node: str, request: HostRequest, *, accept_new: bool, timeout: float, patient: bool, stop: threading.Event
) -> list[Hop]:
    """The open hops to a host. A refused, reset or silent connection is tried again while there is time.

    Without `patient` a refusal is final. Raises TransportError.
    """
    deadline = time.monotonic() + timeout
    errors: list[UnreachableError] = []

    def may_help(e: BaseException) -> bool:
        if not isinstance(e, UnreachableError) or not e.transient or (e.refused and not patient):
            return False
        return time.monotonic() < deadline - LAST_TRY_S

    def once() -> list[Hop]:
        try:
            return _attempt(node, request, accept_new, deadline, stop)
        except UnreachableError as e:
            if e.silent and errors and not e.greeted:  # our limit cut this try short: the error before it counts
                raise errors[-1] from e
            errors.append(e)
            raise

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(may_help),
        wait=tenacity.wait_exponential(multiplier=0.1, max=1.0) + tenacity.wait_random(0, 0.1),
        stop=tenacity.stop_when_event_set(stop),
        sleep=tenacity.sleep_using_event(stop),
        reraise=True,
    )
    return retrying(once)
