"""The transport `ssh` and a real sshd: sessions, loss, logins; test_transports.py has what every transport promises."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.transport import HostKeyError, LoginError, RemoteFile, SshTransport, UnreachableError, connected
from tests.integration.sshd import LightFleet, Sshd, keygen, light_fleet, plain_login, public
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def user() -> Iterator[str]:
    with plain_login() as user:
        yield user


@pytest.fixture
def fleet(user: str) -> Iterator[LightFleet]:
    with light_fleet(user) as fleet:
        yield fleet


def transport(fleet: LightFleet, node: Sshd, **options: object) -> SshTransport:
    values = {"port": node.port, "config": fleet.config, "connect_timeout": PATIENCE_S, **options}
    return SshTransport(node.name, node.address, **values)  # type: ignore[arg-type]


def who(t: SshTransport) -> str:
    """Log in, ask, close."""
    with connected(t):
        return t.run(["sh", "-c", 'echo "$SSH_CONNECTION"; id -un']).out.decode()


# --- the connection ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sessions", [2, 4])
def test_a_host_with_few_sessions_is_used_with_fewer(fleet: LightFleet, sessions: int) -> None:
    home = fleet.folder / "home"
    home.mkdir()
    home.chmod(0o777)
    with connected(transport(fleet, fleet.add(f"MaxSessions {sessions}"))) as t:
        stream = t.open(["sh", "-c", "echo there; cat"])
        assert stream.read(100) == b"there\n"
        with ThreadPoolExecutor(16 if sessions > 2 else 1) as pool:
            out = list(pool.map(lambda i: t.run(["sh", "-c", f"sleep 0.05; echo {i}"]).out, range(24)))
        assert out == [f"{i}\n".encode() for i in range(24)]
        t.put(f"{home}/work", {"a": RemoteFile(b"1")})
        assert t.run(["cat", f"{home}/work/a"]).out == b"1"
        stream.close()


def test_connect_waits_for_a_server_that_comes_back_and_stops_at_once(fleet: LightFleet) -> None:
    node = fleet.add()
    with connected(transport(fleet, node)) as t:
        node.kill()
        threading.Timer(1.0, lambda: node.start(wait=False)).start()
        t.connect()
        assert t.run(["echo", "again"]).out == b"again\n"
    node.pause()
    threading.Timer(0.3, t.close).start()
    with pytest.raises(UnreachableError, match="stopped"):
        t.connect()
    node.resume()


# --- host keys, and hosts on the way ----------------------------------------------------------------------------------


def test_the_host_shows_the_kind_of_key_that_is_known(fleet: LightFleet) -> None:
    node = fleet.add(key_types=("rsa", "ecdsa", "ed25519"))
    for known in node.key_types:
        fleet.known_hosts.write_text(node.known_line(known))
        assert fleet.user in who(transport(fleet, node))


def test_jumps_from_include_and_match_hold_and_every_hop_is_checked(fleet: LightFleet) -> None:
    outer, inner, node = fleet.add(), fleet.add(), fleet.add()
    fleet.folder.joinpath("hosts.conf").write_text(
        f"Host inner\n  HostName {inner.address}\n  Port {inner.port}\n"
        f"Host outer\n  HostName {outer.address}\n  Port {outer.port}\n"
    )
    fleet.write_config(
        f"Include {fleet.folder}/hosts.conf\n"
        f"Host gpu\n  HostName {node.address}\n  Port {node.port}\n"
        'Match host * exec "test %n = gpu"\n  ProxyJump outer,inner\n'
    )
    t = SshTransport("gpu", "gpu", config=fleet.config, connect_timeout=60.0)
    # inner dials the node, outer dials inner
    assert who(t).split()[0] == "127.0.0.1"
    assert [n.log.count("Accepted publickey") for n in (outer, inner, node)] == [1, 1, 1]
    # the same by the inventory
    jumps = f"{outer.address}:{outer.port},{fleet.user}@{inner.address}:{inner.port}"
    assert fleet.user in who(transport(fleet, node, proxy_jump=jumps))
    # a wrong key on any of them ends it there
    for wrong in (outer, inner, node):
        lines = [n.known_line() for n in (outer, inner, node) if n is not wrong]
        fleet.known_hosts.write_text("".join([*lines, f"{wrong.known_name} {public(fleet.key)}\n"]))
        before = wrong.log.count("Accepted publickey")
        with pytest.raises(HostKeyError, match="has changed") as e:
            t.connect()
        assert wrong.known_name.replace("[", "").replace("]", "") in str(e.value)
        assert wrong.log.count("Accepted publickey") == before


def test_what_is_behind_a_jump_host_may_be_refused_or_forbidden(fleet: LightFleet) -> None:
    jump, shut, node = fleet.add(), fleet.add("AllowTcpForwarding no"), fleet.add()
    node.kill()
    for via, says in ((jump, f"the jump host cannot connect to {node.address}"), (shut, "AllowTcpForwarding")):
        with pytest.raises(UnreachableError, match=says):
            transport(fleet, node, proxy_jump=f"{via.address}:{via.port}", connect_timeout=4.0).connect()


# --- keys to log in with ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def agent(socket: Path) -> Iterator[None]:
    """An ssh-agent without keys."""
    process = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL)
    wait_until(socket.exists, "the agent listens")
    yield
    process.terminate()
    process.wait()


def add_key(key: Path, password: str = "") -> None:
    ask = key.with_name("askpass")
    ask.write_text(f"#!/bin/sh\necho {password}\n")
    ask.chmod(0o700)
    env = {**os.environ, "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force"}
    subprocess.run(["ssh-add", "-q", key], env=env, check=True, capture_output=True)


def test_keys_of_an_agent(fleet: LightFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encrypted key works through it alone."""
    node, key = fleet.add(), keygen(fleet.folder / "locked", password="sesame")
    fleet.authorized.write_text(public(key) + "\n")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(fleet.folder / "agent"))
    config = f"Host *\n  User {fleet.user}\n  IdentityFile /nonexistent\n  UserKnownHostsFile {fleet.known_hosts}\n"
    fleet.config.write_text(config)
    with agent(fleet.folder / "agent"):
        with pytest.raises(LoginError, match=rf"{key} cannot be read here, as it is encrypted.* run ssh-add"):
            transport(fleet, node, identity=str(key)).connect()
        with pytest.raises(LoginError, match="there is no key to offer"):
            transport(fleet, node).connect()
        add_key(keygen(fleet.folder / "other", "rsa"))
        with pytest.raises(LoginError, match="not taken: the agent's ssh-rsa SHA256:"):
            transport(fleet, node).connect()
        add_key(key, "sesame")
        assert fleet.user in who(transport(fleet, node))
        assert fleet.user in who(transport(fleet, node, identity=str(key)))


def test_a_certificate_beside_its_key(fleet: LightFleet) -> None:
    authority, key = keygen(fleet.folder / "ca"), keygen(fleet.folder / "certified")
    sign = ["ssh-keygen", "-q", "-s", str(authority), "-I", "gf", "-n", fleet.user, f"{key}.pub"]
    subprocess.run(sign, check=True)
    node = fleet.add(f"TrustedUserCAKeys {authority}.pub")
    assert fleet.user in who(transport(fleet, node, identity=str(key)))
