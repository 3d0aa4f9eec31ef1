"""Connecting to a node: its hops dialled within a time limit, again where that may help, until it is stopped.

Errors of sockets and paramiko become TransportErrors.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tenacity

from orchestrator.errors import UnreachableError
from orchestrator.transport.ssh import hostkeys
from orchestrator.transport.ssh.link import Link, close_connection, left
from orchestrator.transport.ssh.login import Login
from orchestrator.transport.ssh.resolve import Hop

KEX = ("curve25519-sha256@libssh.org", "ecdh-sha2-nistp256")
CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr")
KEEPALIVE_S = 10
TCP_GIVE_UP_S = 30
"""The kernel breaks a connection on which nothing was confirmed for so long."""
MSG_CHANNEL_REQUEST = 98
_SILENT = logging.NullHandler()


class Dialer:
    """Opens the connections of one node, hop by hop. `abandon` may be called from another thread at any time."""

    def __init__(self, node: str, hops: Sequence[Hop], *, accept_new: bool, deadline: float) -> None:
        self._node, self._hops, self._accept_new, self._deadline = node, hops, accept_new, deadline
        self.connections: list[Any] = []
        """Open fabric connections, the node's own last."""
        self._sockets: list[Any] = []
        self._abandoned = False
        self.at = hops[0].place
        """The host that is being connected to."""

    def dial(self) -> None:
        """Raises TransportError; nothing is left open then."""
        try:
            for hop in self._hops:
                self.at = hop.place
                with _in_words(self._node, hop, lambda: self.greeted):
                    self._open(hop)
                if self._abandoned:
                    raise UnreachableError(self._node, "connecting was given up")
        except BaseException:
            self.abandon()
            raise

    @property
    def greeted(self) -> bool:
        """Return whether the sshd of the last hop has sent its version: the host is there and answers."""
        if len(self.connections) < len(self._hops):
            return False
        transport = self.connections[-1].client.get_transport()
        return bool(transport is not None and transport.remote_version)

    def abandon(self) -> None:
        """Close whatever is open so far."""
        self._abandoned = True
        for connection in self.connections:
            close_connection(connection)
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.close()

    def _open(self, hop: Hop) -> None:
        connection_class, config = _fabric()
        options: dict[str, Any] = {
            "auth_strategy": Login(self._node, hop),
            "transport_factory": functools.partial(_transport, hop, self._deadline),
            "compress": False,
        }
        gateway = self.connections[-1] if self.connections else None
        if gateway is None:
            options["sock"] = self._command(hop.proxy_command) if hop.proxy_command else self._socket(hop)
        connection = connection_class(
            host=hop.host,
            user=hop.user,
            port=hop.port,
            config=config,
            gateway=gateway if gateway is not None else False,
            forward_agent=False,
            connect_kwargs=options,
        )
        connection.client.set_missing_host_key_policy(_Policy(self._node, hop, self._accept_new))
        self.connections.append(connection)
        connection.open()
        connection.transport.set_keepalive(KEEPALIVE_S)

    def _socket(self, hop: Hop) -> socket.socket:
        addresses = socket.getaddrinfo(hop.host, hop.port, socket.AF_UNSPEC, socket.SOCK_STREAM)
        for i, (family, kind, number, _, address) in enumerate(addresses):
            sock = socket.socket(family, kind, number)
            self._sockets.append(sock)
            try:
                # several addresses share the time that is left
                sock.settimeout((left(self._deadline) or 0) / (len(addresses) - i))
                sock.connect(address)
            except OSError:
                sock.close()
                if i + 1 == len(addresses):
                    raise
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_GIVE_UP_S * 1000)
            return sock
        raise OSError("the name has no address")

    def _command(self, command: str) -> socket.socket:
        """ProxyCommand on a socket pair: paramiko's own never sees the command's end."""
        ours, theirs = socket.socketpair()
        self._sockets.append(ours)
        with theirs:
            process = subprocess.Popen(
                [os.environ.get("SHELL") or "/bin/sh", "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        # it ends with its input, when our end is closed; a thread reaps it
        threading.Thread(target=process.wait, name="ssh ProxyCommand", daemon=True).start()
        return ours


class _Policy:
    """Host key policy that paramiko calls for every key, as it gets no known_hosts of its own."""

    def __init__(self, node: str, hop: Hop, accept_new: bool) -> None:
        self._node, self._hop, self._accept_new = node, hop, accept_new

    def missing_host_key(self, client: object, hostname: str, key: Any) -> None:
        hostkeys.check(self._node, self._hop, key.get_name(), key.asbytes(), accept_new=self._accept_new)


def _transport(hop: Hop, deadline: float, sock: Any, **options: Any) -> Any:
    """A paramiko transport with our choice of algorithms and time limits."""
    import paramiko

    transport = paramiko.Transport(sock, **options)
    security = transport.get_security_options()
    security.key_types = hostkeys.algorithms(hop)
    security.kex = _first(KEX, security.kex)
    security.ciphers = _first(CIPHERS, security.ciphers)
    seconds = left(deadline) or 0.0
    transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = seconds
    transport.channel_timeout = seconds  # for the way on to the next hop; later calls name their own
    transport._channel_handler_table = {
        **transport._channel_handler_table,
        MSG_CHANNEL_REQUEST: _note_signal,
    }
    return transport


def _note_signal(channel: Any, message: Any) -> None:
    """paramiko drops `exit-signal` (RFC 4254, 6.10): keep the signal's name."""
    at = message.packet.tell()
    if message.get_text() == "exit-signal":
        message.get_boolean()
        channel.exit_signal = message.get_text()
    message.packet.seek(at)
    channel._handle_request(message)


def _first(wanted: Sequence[str], there: Sequence[str]) -> list[str]:
    return [*(w for w in wanted if w in there), *(t for t in there if t not in wanted)]


def _fabric() -> tuple[Callable[..., Any], Any]:
    """fabric's Connection, and a Config that reads no file: `ssh -G` has read them.

    A Config of its own for every connection, which writes attributes of its own into it.
    """
    import fabric

    # its errors come as exceptions; without a handler of their own they would be printed as well
    for name in ("paramiko", "invoke"):
        logging.getLogger(name).addHandler(_SILENT)
    return fabric.Connection, fabric.Config(lazy=True, overrides={"load_ssh_configs": False})


@contextlib.contextmanager
def _in_words(node: str, hop: Hop, greeted: Callable[[], bool]) -> Iterator[None]:
    """Raise the errors of sockets and paramiko while a hop is opened as TransportErrors."""
    import paramiko

    began = time.monotonic()
    try:
        yield
    except socket.gaierror as e:
        again = e.errno == socket.EAI_AGAIN
        raise UnreachableError(
            node, f"the name {hop.host} cannot be resolved ({e.strerror}); set host: of the node", transient=again
        ) from e
    except paramiko.ChannelException as e:
        raise UnreachableError(node, _forwarding(hop, e), transient=e.code == 2) from e
    except paramiko.ssh_exception.IncompatiblePeer as e:
        raise UnreachableError(node, f"{hop.place} and we have no algorithm in common: {e}", transient=False) from e
    except TimeoutError as e:
        raise UnreachableError(
            node,
            f"{hop.place} did not answer within {time.monotonic() - began:.0f} s",
            silent=True,
            greeted=greeted(),
        ) from e
    except ConnectionRefusedError as e:
        text = f"{hop.place} refused the connection: is sshd running there, on that port?"
        raise UnreachableError(node, text, refused=True) from e
    except OSError as e:
        raise UnreachableError(node, f"no connection to {hop.place}: {e.strerror or e}") from e
    except (paramiko.SSHException, EOFError) as e:
        text = str(e)
        if "Indecipherable" in text or "Incompatible version" in text:
            raise UnreachableError(node, f"{hop.place} does not speak SSH: {text}", transient=False) from e
        raise UnreachableError(node, f"{hop.place} broke off while connecting: {text or 'hung up'}") from e


def _forwarding(hop: Hop, e: Any) -> str:
    if e.code == 1:
        return f"the jump host does not let us through to {hop.place} (AllowTcpForwarding in its sshd_config)"
    return f"the jump host cannot connect to {hop.place} ({e.text})"


LOOK_S = 0.1
LAST_TRY_S = 0.3
"""Time left below which no other try is begun."""


class StopSignal:
    """A transport's own end or that of whoever uses it: an Event as tenacity wants it."""

    def __init__(self, outer: threading.Event | None) -> None:
        self._own = threading.Event()
        self._outer = outer

    def set(self) -> None:
        self._own.set()

    def clear(self) -> None:
        """Forget our own end; the other stays."""
        self._own.clear()

    def is_set(self) -> bool:
        return self._own.is_set() or (self._outer is not None and self._outer.is_set())

    def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`, or until it is set."""
        until = time.monotonic() + seconds
        while not self.is_set() and (rest := until - time.monotonic()) > 0:
            self._own.wait(min(rest, LOOK_S))


def connect(
    node: str,
    resolve: Callable[[], Sequence[Hop]],
    *,
    accept_new: bool,
    timeout: float,
    stop: StopSignal,
    patient: bool = True,
) -> Link:
    """An open link; what is refused, reset or silent is tried again, with growing pauses, while there is time.

    Not `patient`: what is refused is refused.

    Raises TransportError.
    """
    deadline = time.monotonic() + timeout

    def may_help(e: BaseException) -> bool:
        if not isinstance(e, UnreachableError) or not e.transient or (e.refused and not patient):
            return False
        return time.monotonic() < deadline - LAST_TRY_S

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(may_help),
        wait=tenacity.wait_exponential(multiplier=0.1, max=1.0) + tenacity.wait_random(0, 0.1),
        stop=tenacity.stop_when_event_set(stop),  # type: ignore[arg-type]
        sleep=stop.sleep,
        reraise=True,
    )
    errors: list[UnreachableError] = []

    def once() -> Link:
        try:
            return _ConnectAttempt(node, resolve, accept_new, deadline).run(stop)
        except UnreachableError as e:
            if e.silent and errors and not e.greeted:  # cut short by our own limit: the error before is the reason
                raise errors[-1] from e
            errors.append(e)
            raise

    return retrying(once)


class _ConnectAttempt:
    """One try in a thread of its own: looking a name up, or a `Match exec`, cannot be interrupted, only left behind."""

    def __init__(self, node: str, resolve: Callable[[], Sequence[Hop]], accept_new: bool, deadline: float) -> None:
        self._node, self._resolve, self._accept_new, self._deadline = node, resolve, accept_new, deadline
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._left = False
        self._dialer: Dialer | None = None
        self._link: Link | None = None
        self._error: BaseException | None = None

    def run(self, stop: StopSignal) -> Link:
        if stop.is_set():
            raise UnreachableError(self._node, "connecting was stopped", transient=False)
        began = time.monotonic()
        threading.Thread(target=self._work, name=f"connect {self._node}", daemon=True).start()
        while not self._done.wait(min(LOOK_S, max(0.001, self._deadline - time.monotonic()))):
            if stop.is_set():
                self._leave()
                raise UnreachableError(self._node, "connecting was stopped", transient=False)
            if time.monotonic() >= self._deadline:
                greeted = self._dialer is not None and self._dialer.greeted
                at = self._leave()
                raise UnreachableError(
                    self._node,
                    f"{at} did not answer within {time.monotonic() - began:.0f} s",
                    silent=True,
                    greeted=greeted,
                )
        if self._error is not None:
            raise self._error
        assert self._link is not None
        return self._link

    def _work(self) -> None:
        try:
            hops = self._resolve()
            with self._lock:
                if self._was_left():
                    return
                self._dialer = Dialer(self._node, hops, accept_new=self._accept_new, deadline=self._deadline)
            self._dialer.dial()
            link = Link(self._node, self._dialer.connections)
            with self._lock:
                self._link = link
                if self._was_left():
                    link.close()
        except BaseException as e:  # noqa: BLE001  raised again in the thread that waits
            self._error = e
        finally:
            self._done.set()

    def _was_left(self) -> bool:
        return self._left

    def _leave(self) -> str:
        """StopSignal caring; what is open is closed. Returns the name of the host that kept us waiting."""
        with self._lock:
            self._left = True
            dialer = self._dialer
            if self._link is not None:
                self._link.close()
        if dialer is None:
            return "the ssh configuration"
        at = dialer.at
        dialer.abandon()
        return at
