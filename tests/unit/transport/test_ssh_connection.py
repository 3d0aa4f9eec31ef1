"""Every hop proves its identity before it is shown a key of ours: real connections to SSH servers of this process."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest

from orchestrator.errors import HostKeyError, LoginError, TransportError, UnreachableError
from orchestrator.transport.ssh import SshTransport
from orchestrator.transport.ssh.connection import hops
from orchestrator.transport.ssh.link import HostRequest
from tests.waiting import PATIENCE_S


class Server(paramiko.ServerInterface):  # type: ignore[misc]
    """An SSH server on a loopback address that lets in who has `wanted`, and passes connections on; it runs nothing."""

    def __init__(self, wanted: paramiko.PKey) -> None:
        self.key = paramiko.ECDSAKey.generate()
        self.wanted, self.methods = wanted, "publickey"
        self.logins = 0
        """Keys that it was shown."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._transports: list[paramiko.Transport] = []
        self._channels: dict[int, socket.socket] = {}
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def line(self, key: paramiko.PKey | None = None, marker: str = "") -> str:
        """Its line of a known_hosts file."""
        key = key or self.key
        return f"{marker} [127.0.0.1]:{self.port} {key.get_name()} {key.get_base64()}\n".lstrip()

    def _serve(self) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            while True:
                transport = paramiko.Transport(self._listener.accept()[0])
                transport.add_server_key(self.key)
                self._transports.append(transport)
                transport.start_server(event=threading.Event(), server=self)
                threading.Thread(target=self._forward, args=(transport,), daemon=True).start()

    def _forward(self, transport: paramiko.Transport) -> None:
        near = transport.accept(PATIENCE_S)
        if near is None:
            return
        with contextlib.suppress(OSError), contextlib.closing(near), self._channels.pop(near.get_id()) as far:
            ends: dict[Any, Any] = {near: far, far: near}
            while ready := select.select([near, far], [], [])[0]:
                for end in ready:
                    data = end.recv(65536)
                    if not data:
                        return
                    ends[end].sendall(data)

    def get_allowed_auths(self, username: str) -> str:
        return self.methods

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> Any:
        self.logins += 1
        if key.asbytes() != self.wanted.asbytes():
            return paramiko.AUTH_FAILED
        return paramiko.AUTH_PARTIALLY_SUCCESSFUL if "," in self.methods else paramiko.AUTH_SUCCESSFUL

    def check_channel_direct_tcpip_request(self, chanid: int, origin: Any, destination: tuple[str, int]) -> Any:
        self._channels[chanid] = socket.create_connection(destination)
        return paramiko.OPEN_SUCCEEDED

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # or its thread would wait on
        self._listener.close()
        for transport in self._transports:
            transport.close()


class Way:
    """A node behind a jump host, and what a client has: a key, known_hosts, an ssh_config."""

    def __init__(self, folder: Path) -> None:
        self.key = paramiko.RSAKey.generate(2048)
        self.key.write_private_key_file(str(folder / "id"))
        self.jump, self.node = Server(self.key), Server(self.key)
        self.known_hosts, self.config = folder / "known_hosts", folder / "config"
        self.known_hosts.write_text(self.jump.line() + self.node.line())
        self.write_config()

    def write_config(self, node: str = "ProxyJump jump") -> None:
        (self.config.parent / "hosts").write_text(
            f"Host jump node\n  HostName 127.0.0.1\nHost jump\n  Port {self.jump.port}\n"
            f'Host node\n  Port {self.node.port}\nMatch host 127.0.0.1 exec "test %n = node"\n  {node}\n'
        )
        self.config.write_text(
            f"Include {self.config.parent}/h*s\nUser me\nIdentityFile {self.config.parent}/id\nIdentityAgent none\n"
            f"UserKnownHostsFile {self.known_hosts}\nGlobalKnownHostsFile /dev/null\n"
        )

    def connect(self, host: str = "node", **options: Any) -> None:
        transport = SshTransport("n1", host, config=self.config, connect_timeout=PATIENCE_S, **options)
        with contextlib.closing(transport):
            transport.connect()


@pytest.fixture
def way(tmp_path: Path) -> Iterator[Way]:
    made = Way(tmp_path)
    with contextlib.closing(made.jump), contextlib.closing(made.node):
        yield made


@pytest.mark.parametrize("accept_new", [False, True])
@pytest.mark.parametrize("wrong", ["jump", "node"])
def test_a_wrong_key_of_any_hop_is_refused_before_a_login(way: Way, wrong: str, accept_new: bool) -> None:
    way.connect()
    server: Server = getattr(way, wrong)
    right = way.node.line() if wrong == "jump" else way.jump.line()
    place = rf"127\.0\.0\.1:{server.port} shows"
    for lines, why in (
        (
            server.line(paramiko.ECDSAKey.generate()),
            rf"has changed: the key that {place} .*{way.known_hosts}:2 holds .*ssh-keygen -R",
        ),
        (server.line(marker="@revoked") + server.line(), rf"{place} .* is revoked in .*{way.known_hosts}"),
    ):
        way.known_hosts.write_text(right + lines)
        before = server.logins
        with pytest.raises(HostKeyError, match=why):
            way.connect(accept_new_host_keys=accept_new)
        assert server.logins == before
        assert way.known_hosts.read_text() == right + lines


@pytest.mark.parametrize("unknown", ["jump", "node"])
def test_an_unknown_key_of_any_hop_is_refused_or_kept_once(way: Way, unknown: str) -> None:
    server: Server = getattr(way, unknown)
    right = (way.node.line() if unknown == "jump" else way.jump.line()).rstrip("\n")  # a last line without its end
    way.known_hosts.write_text(right)
    says = rf"127\.0\.0\.1:{server.port} shows .* is not known; .*{way.known_hosts}.*--accept-new-host-keys"
    with pytest.raises(HostKeyError, match=says) as e:
        way.connect()
    assert server.key.fingerprint in str(e.value)
    assert server.logins == 0
    for _ in range(2):
        way.connect(accept_new_host_keys=True)
    assert way.known_hosts.read_text() == f"{right}\n{server.line()}"
    way.connect()


def test_an_alias_a_hash_and_lines_that_are_none(way: Way) -> None:
    key = f"{way.node.key.get_name()} {way.node.key.get_base64()}"
    hashed = paramiko.HostKeys.hash_host(f"[127.0.0.1]:{way.node.port}")
    for line, setting in ((f"{hashed} {key}", ""), (f"box {key} a comment", "HostKeyAlias box")):
        way.write_config(setting)
        way.known_hosts.write_text(f"\n# ours\nnothing\nx ssh-rsa !\nx ssh-ed25519 AAAA\n{line}\n")
        way.connect()


def test_a_refused_login_says_what_was_tried_and_the_way_out(way: Way, tmp_path: Path) -> None:
    locked, none = tmp_path / "locked", tmp_path / "none"
    way.key.write_private_key_file(str(locked), password="sesame")
    none.write_text("no key\n")
    other = paramiko.ECDSAKey.generate()
    for identity, wanted, methods, says in (
        (locked, way.key, "publickey", rf"{locked} cannot be read here.*encrypted.*ssh-add"),
        (none, way.key, "publickey", rf"{none} cannot be read here"),
        ("/nonexistent", way.key, "publickey", "the identity /nonexistent does not exist"),
        (None, other, "publickey", rf"not taken: {tmp_path}/id; .*not followed: pkcs11provider.*ssh-agent"),
        (None, other, "password", r"Passwords are never asked for"),
        (None, way.key, "publickey,password", r"the host asks for more \(publickey, password\)"),
    ):
        way.write_config("" if identity else "PKCS11Provider /lib/token.so")
        way.node.wanted, way.node.methods = wanted, methods
        with pytest.raises(LoginError, match=f"me@127.0.0.1:{way.node.port} did not let us in: .*{says}"):
            way.connect(identity=identity and str(identity))


def test_the_inventory_wins_over_the_ssh_config(way: Way) -> None:
    ask = HostRequest("node", "tuner", 2222, "/k", "root@gate:23,jump", way.config)
    made = [hop.connection for hop in hops("n1", ask)]
    places = [("root", "gate", 23), ("me", "127.0.0.1", way.jump.port), ("tuner", "127.0.0.1", 2222)]
    assert [(c.user, c.host, c.port) for c in made] == places
    assert [c.gateway for c in made] == [False, *made[:2]]
    way.write_config("ProxyCommand nc -X %r %h %p")
    (hop,) = hops("n1", HostRequest("node", "tuner", 2222, config=way.config))
    assert hop.connection.gateway == "nc -X tuner 127.0.0.1 2222"
    (hop,) = hops("n1", HostRequest("node", proxy_jump="none", config=way.config))
    assert hop.connection.gateway is False


@pytest.mark.parametrize(
    ("text", "host", "says"),
    [
        ("Host *\n  ProxyJump node", "node", ""),  # which has none to itself
        ("Host a\n  ProxyJump b\nHost b\n  ProxyJump a", "a", "in a circle"),
        ("NoValue", "a", "cannot be used: Unparsable line NoValue; correct it"),
        ("Port many", "a", "cannot be used: invalid literal"),
        (None, "a", "config cannot be used: .*No such file"),
        *(("", host, "is not a host name") for host in ("-oProxyCommand=true", "a b", "", "a\nb")),
    ],
)
def test_a_configuration_that_leads_nowhere(tmp_path: Path, text: str | None, host: str, says: str) -> None:
    config = tmp_path / "config"
    if text is not None:
        config.write_text(text)
    expected = pytest.raises(TransportError, match=says) if says else contextlib.nullcontext()
    with expected:
        assert len(hops("n1", HostRequest(host, config=config))) == 1


def test_a_proxy_command_carries_the_connection_or_is_named(way: Way) -> None:
    way.write_config("ProxyCommand bash -c 'exec 3<>/dev/tcp/%h/%p; cat <&3 & exec cat >&3'")
    way.connect()
    way.write_config("ProxyCommand false")
    transport = SshTransport("n1", "node", config=way.config, connect_timeout=1.0)
    with pytest.raises(UnreachableError, match=rf"127\.0\.0\.1:{way.node.port} (broke off|did not answer)"):
        transport.connect()


def test_who_is_not_there_is_named() -> None:
    def fault(seconds: float, host: str, port: int | None = None) -> UnreachableError:
        with pytest.raises(UnreachableError) as e:
            SshTransport(
                "n1", host, port=port, config=Path(os.devnull), connect_timeout=seconds, patient=False
            ).connect()
        return e.value

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        silent = fault(1.0, "127.0.0.1", port)
        assert f"127.0.0.1:{port} did not answer within" in str(silent)
        assert (silent.silent, silent.greeted) == (True, False)
    assert fault(PATIENCE_S, "127.0.0.1", port).refused
    assert any(x in str(fault(1.0, "no-such-host.invalid")) for x in ("invalid cannot be resolved", "did not answer"))
