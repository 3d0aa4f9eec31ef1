"""The transport `ssh` and a real sshd: host keys, logins, sessions, loss; test_transports.py has what all promise."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import HostKeyError, LoginError, TransportError, UnreachableError
from orchestrator.inventory.model import Node
from orchestrator.machines.node_check import check_nodes
from orchestrator.transport.base import RemoteFile, connected
from orchestrator.transport.ssh import SshTransport
from orchestrator.transport.ssh_config import HostRequest
from orchestrator.transport.ssh_connection import hops
from tests.integration.sshd import SSHD, LightFleet, Sshd, keygen, light_fleet, public
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.skipif(not Path(SSHD).exists(), reason="no sshd here (Debian: openssh-server)")


@pytest.fixture
def fleet() -> Iterator[LightFleet]:
    with light_fleet() as fleet:
        yield fleet


class Way:
    """A node behind a jump host, found by an ssh_config with Include and Match."""

    def __init__(self, fleet: LightFleet, *options: str) -> None:
        """`options`: for the node's sshd_config."""
        self.fleet, self.jump, self.node = fleet, fleet.add(), fleet.add(*options)
        self.write_config()

    def write_config(self, node: str = "ProxyJump jump") -> None:
        (self.fleet.folder / "hosts.conf").write_text(
            f"Host jump\n  HostName {self.jump.address}\n  Port {self.jump.port}\n"
            f"Host node\n  HostName {self.node.address}\n  Port {self.node.port}\n"
            f'Match host {self.node.address} exec "test %n = node"\n  {node}\n'
        )
        self.fleet.write_config(f"Include {self.fleet.folder}/hosts.c*f\n")

    def transport(self, host: str = "node", **options: Any) -> SshTransport:
        return SshTransport("n1", host, **{"config": self.fleet.config, "connect_timeout": PATIENCE_S, **options})

    def who(self, **options: Any) -> str:
        """Log in, ask, close."""
        with connected(self.transport(**options)) as t:
            return t.run(["sh", "-c", "hostname; id -un"]).out.decode()


@pytest.fixture
def way(fleet: LightFleet) -> Way:
    return Way(fleet)


def logins(node: Sshd) -> int:
    return node.log.count("Accepted publickey")


@pytest.mark.parametrize("accept_new", [False, True])
@pytest.mark.parametrize("wrong", ["jump", "node"])
def test_a_wrong_key_of_any_hop_is_refused_before_a_login(way: Way, wrong: str, accept_new: bool) -> None:
    way.who()
    node: Sshd = getattr(way, wrong)
    known = way.fleet.known_hosts
    right = way.node.known_line() if wrong == "jump" else way.jump.known_line()
    for lines, why in (
        (
            f"{node.known_name} {public(way.fleet.key)}\n",
            rf"has changed: the key that {node.place} shows .*{known}:2 holds .*ssh-keygen -R",
        ),
        (f"@revoked {node.known_line()}{node.known_line()}", rf"{node.place} shows .* is revoked in .*{known}"),
    ):
        known.write_text(right + lines)
        before = logins(node)
        with pytest.raises(HostKeyError, match=why):
            way.who(accept_new_host_keys=accept_new)
        assert logins(node) == before
        assert known.read_text() == right + lines


@pytest.mark.parametrize("unknown", ["jump", "node"])
def test_an_unknown_key_of_any_hop_is_refused_or_kept_once(way: Way, unknown: str) -> None:
    node: Sshd = getattr(way, unknown)
    known = way.fleet.known_hosts
    right = (way.node.known_line() if unknown == "jump" else way.jump.known_line()).rstrip("\n")  # cut off
    known.write_text(right)
    with pytest.raises(HostKeyError, match=rf"{node.place} shows .*SHA256:.* is not known; .*{known}.*--accept-new-"):
        way.who()
    assert logins(node) == 0
    for _ in range(2):
        way.who(accept_new_host_keys=True)
    assert known.read_text() == f"{right}\n{node.known_line()}"
    way.who()


def test_the_check_of_a_node_says_once_what_to_do_about_an_unknown_key(fleet: LightFleet) -> None:
    place = fleet.add()
    fleet.known_hosts.write_text("")
    way = {"transport": "ssh", "host": place.address, "port": place.port, "ssh_config": str(fleet.config)}
    (report,) = check_nodes([Node.model_validate({"name": "n1", **way})])
    (problem,) = report.problems()
    assert problem.endswith("; or trust what comes first with --accept-new-host-keys")


def test_the_inventory_wins_over_the_ssh_config(way: Way) -> None:
    config, jump, node = way.fleet.config, way.jump, way.node
    made = [hop.connection for hop in hops("n1", HostRequest("node", "tuner", 2222, "/k", "root@gate:23,jump", config))]
    places = [("root", "gate", 23), (way.fleet.user, jump.address, jump.port), ("tuner", node.address, 2222)]
    assert [(c.user, c.host, c.port) for c in made] == places
    assert [c.gateway for c in made] == [False, *made[:2]]
    way.write_config("ProxyCommand nc -X %r %h %p")
    (hop,) = hops("n1", HostRequest("node", "tuner", 2222, config=config))
    assert hop.connection.gateway == f"nc -X tuner {node.address} 2222"
    (hop,) = hops("n1", HostRequest("node", proxy_jump="none", config=config))
    assert hop.connection.gateway is False


@pytest.mark.parametrize(
    ("text", "host", "says"),
    [
        ("Host *\n  ProxyJump node", "node", ""),  # which has none to itself
        ("Host a\n  ProxyJump b\nHost b\n  ProxyJump a", "a", "in a circle"),
        ("NoValue", "a", "cannot be used: .*line 1: .*novalue.*; correct it"),
        (None, "a", "cannot be used: .*config: No such file"),
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
    assert way.fleet.user in way.who()
    way.write_config("ProxyCommand false")
    with pytest.raises(UnreachableError, match=rf"{way.node.place} (broke off|did not answer)"):
        way.transport(connect_timeout=1.0).connect()


def test_who_is_not_there_or_not_reached_is_named(fleet: LightFleet) -> None:
    def fault(seconds: float, host: str, port: int | None = None, via: Sshd | None = None) -> UnreachableError:
        with pytest.raises(UnreachableError) as e:
            SshTransport(
                "n1", host, port=port, config=fleet.config, connect_timeout=seconds, patient=False,
                proxy_jump=via.place if via else None,
            ).connect()  # fmt: skip
        return e.value

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        silent = fault(1.0, "127.0.0.1", port)
        assert f"127.0.0.1:{port} did not answer within" in str(silent)
        assert (silent.silent, silent.greeted) == (True, False)
    assert fault(PATIENCE_S, "127.0.0.1", port).refused
    assert any(x in str(fault(1.0, "no-such-host.invalid")) for x in ("invalid cannot be resolved", "did not answer"))
    jump, shut = fleet.add(), fleet.add("AllowTcpForwarding no")
    assert "the jump host cannot connect to 127.0.0.1" in str(fault(4.0, "127.0.0.1", port, jump))
    assert "AllowTcpForwarding" in str(fault(4.0, "127.0.0.1", port, shut))


def test_a_refused_login_says_what_was_tried_and_the_way_out(fleet: LightFleet) -> None:
    none, other = fleet.folder / "none", keygen(fleet.folder / "other")
    none.write_text("no key\n")
    for options, identity, says in (
        ((), none, rf"{none} cannot be read here"),
        (("AuthorizedKeysFile none",), None, rf"not taken: {fleet.key}; .*not supported: pkcs11provider.*ssh-agent"),
        ((), other, rf"not taken: {other}"),
        (("PubkeyAuthentication no", "PasswordAuthentication yes"), None, "Passwords are never asked for"),
        (
            ("PasswordAuthentication yes", "AuthenticationMethods publickey,password"), None,
            "is taken, but the host asks for more",
        ),
    ):  # fmt: skip
        way = Way(fleet, *options)
        way.write_config("PKCS11Provider /lib/token.so")
        with pytest.raises(LoginError, match=f"{fleet.user}@{way.node.place} did not let us in: .*{says}"):
            way.who(identity=identity and str(identity))


def add_key(key: Path, password: str = "") -> None:
    ask = key.with_name("askpass")
    ask.write_text(f"#!/bin/sh\necho {password}\n")
    ask.chmod(0o700)
    env = {**os.environ, "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force"}
    subprocess.run(["ssh-add", "-q", key], env=env, check=True, capture_output=True)


def test_keys_of_an_agent(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encrypted key works through it alone."""
    fleet, listens = way.fleet, way.fleet.folder / "agent"
    key = keygen(fleet.folder / "locked", password="sesame")
    fleet.authorized.write_text(public(key) + "\n")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(listens))
    config = f"Host *\n  User {fleet.user}\n  IdentityFile /nonexistent\n  UserKnownHostsFile {fleet.known_hosts}\n"
    fleet.config.write_text(config)
    to = {"host": way.node.address, "port": way.node.port}
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", listens], stdout=subprocess.DEVNULL)
    try:
        wait_until(listens.exists, "the agent listens")
        with pytest.raises(LoginError, match=rf"{key} cannot be read here: it is encrypted.* run ssh-add"):
            way.who(**to, identity=str(key))
        with pytest.raises(LoginError, match="there is no key to offer"):
            way.who(**to)
        add_key(keygen(fleet.folder / "other", "rsa"))
        with pytest.raises(LoginError, match="not taken: the agent's ssh-rsa SHA256:"):
            way.who(**to)
        add_key(key, "sesame")
        for identity in (None, str(key)):
            assert fleet.user in way.who(**to, identity=identity)
    finally:
        agent.terminate()
        agent.wait()


def test_a_certificate_beside_its_key(fleet: LightFleet) -> None:
    authority, key = keygen(fleet.folder / "ca"), keygen(fleet.folder / "certified")
    sign = ["ssh-keygen", "-q", "-s", str(authority), "-I", "gf", "-n", fleet.user, f"{key}.pub"]
    subprocess.run(sign, check=True)
    assert fleet.user in Way(fleet, f"TrustedUserCAKeys {authority}.pub").who(identity=str(key), proxy_jump="none")


def test_output_that_comes_while_standard_error_is_emptied_is_not_waited_for(
    fleet: LightFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = fleet.add()
    transport = SshTransport("n1", place.address, port=place.port, config=fleet.config, connect_timeout=PATIENCE_S)
    command = "echo noise >&2; read go; echo out; read end"
    with connected(transport), contextlib.closing(transport.open(["sh", "-c", command])) as channel:
        raw: Any = channel._raw
        wait_until(raw.recv_stderr_ready, "it says something on standard error")
        empty = raw.recv_stderr

        def late(size: int) -> bytes:
            channel.send(b"go\n")
            wait_until(raw.recv_ready, "it answers on standard output meanwhile")
            return bytes(empty(size))

        monkeypatch.setattr(raw, "recv_stderr", late)
        monkeypatch.setattr(channel._ready, "wait", lambda seconds: pytest.fail("output is there, and it waits"))
        assert channel.read(100) == b"out\n"
        assert channel.stderr == b"noise\n"


def test_a_host_with_few_sessions_is_used_with_fewer(fleet: LightFleet) -> None:
    with connected(Way(fleet, "MaxSessions 4").transport()) as t:
        stream = t.open(["sh", "-c", "echo there; cat"])
        assert stream.read(100) == b"there\n"
        with ThreadPoolExecutor(16) as pool:
            out = list(pool.map(lambda i: t.run(["sh", "-c", f"sleep 0.05; echo {i}"]).out, range(24)))
        assert out == [f"{i}\n".encode() for i in range(24)]
        t.put(f"{fleet.folder}/work", {"a": RemoteFile(b"1")})
        assert t.run(["cat", f"{fleet.folder}/work/a"]).out == b"1"
        stream.close()
