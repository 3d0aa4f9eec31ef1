"""Logins by SSH: host keys on every hop, login keys, and the user's own ssh configuration."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.transport import HostKeyError, LoginError, SshTransport, UnreachableError
from tests.integration.sshd import LightFleet, Sshd, keygen, light_fleet, plain_login, public

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def user() -> Iterator[str]:
    with plain_login() as user:
        yield user


@pytest.fixture
def fleet(user: str) -> Iterator[LightFleet]:
    with light_fleet(user) as fleet:
        yield fleet


REFUSED_S = 4.0
"""So long a host that refuses is tried again."""


def transport(fleet: LightFleet, node: Sshd, **options: object) -> SshTransport:
    values = {"port": node.port, "config": fleet.config, **options}
    return SshTransport(node.name, node.address, **values)  # type: ignore[arg-type]


def who(t: SshTransport) -> str:
    """Log in, ask, close."""
    t.connect()
    try:
        return t.run(["sh", "-c", 'echo "$SSH_CONNECTION"; id -un']).out.decode()
    finally:
        t.close()


# --- host keys --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", ["ed25519", "ecdsa", "rsa"])
def test_the_host_shows_the_kind_of_key_that_is_known(fleet: LightFleet, known: str) -> None:
    node = fleet.add(key_types=("rsa", "ecdsa", "ed25519"), known=False)
    fleet.trust(node, known)
    assert fleet.user in who(transport(fleet, node))


# --- through other hosts ----------------------------------------------------------------------------------------------


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
    t = transport(fleet, node, proxy_jump=f"{jump.address}:{jump.port}", connect_timeout=REFUSED_S)
    with pytest.raises(UnreachableError, match=f"the jump host cannot connect to {node.address}"):
        t.connect()
    t = transport(fleet, node, proxy_jump=f"{shut.address}:{shut.port}", connect_timeout=REFUSED_S)
    with pytest.raises(UnreachableError, match="AllowTcpForwarding"):
        t.connect()


# --- keys to log in with ----------------------------------------------------------------------------------------------


@pytest.fixture
def agent(fleet: LightFleet) -> Iterator[str]:
    """An ssh-agent without keys; its socket."""
    path = str(fleet.folder / "agent")
    with socket.socket(socket.AF_UNIX) as _:
        p = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    while not os.path.exists(path):
        time.sleep(0.01)
    yield path
    p.send_signal(signal.SIGTERM)
    p.wait()


def add_key(agent: str, key: Path, password: str = "") -> None:
    ask = key.with_name("askpass")
    ask.write_text(f"#!/bin/sh\necho {password}\n")
    ask.chmod(0o700)
    env = {**os.environ, "SSH_AUTH_SOCK": agent, "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force"}
    subprocess.run(["ssh-add", "-q", key], env=env, check=True, capture_output=True)


def test_keys_of_an_agent(fleet: LightFleet, agent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    node = fleet.add()
    monkeypatch.setenv("SSH_AUTH_SOCK", agent)
    moved = fleet.key.rename(fleet.folder / "elsewhere")
    fleet.config.write_text(
        f"Host *\n  User {fleet.user}\n  IdentityFile /nonexistent\n  UserKnownHostsFile {fleet.known_hosts}\n"
    )
    with pytest.raises(LoginError, match="there is no key to offer"):
        transport(fleet, node).connect()
    add_key(agent, keygen(fleet.folder / "other", "rsa"))
    with pytest.raises(LoginError, match="not taken: the agent's ssh-rsa SHA256:"):
        transport(fleet, node).connect()
    add_key(agent, moved)
    assert fleet.user in who(transport(fleet, node))


@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
def test_an_encrypted_key_needs_the_agent(
    fleet: LightFleet, agent: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    node = fleet.add()
    key = keygen(fleet.folder / "locked", kind, password="sesame")
    fleet.authorized.write_text(public(key) + "\n")
    monkeypatch.setenv("SSH_AUTH_SOCK", agent)
    fleet.config.write_text(f"Host *\n  User {fleet.user}\n  UserKnownHostsFile {fleet.known_hosts}\n")
    with pytest.raises(LoginError, match=rf"{key} cannot be read here, as it is encrypted.* run ssh-add"):
        transport(fleet, node, identity=str(key)).connect()
    add_key(agent, key, "sesame")
    assert fleet.user in who(transport(fleet, node, identity=str(key)))


def test_a_certificate_beside_its_key(fleet: LightFleet) -> None:
    authority, key = keygen(fleet.folder / "ca"), keygen(fleet.folder / "certified")
    sign = ["ssh-keygen", "-q", "-s", str(authority), "-I", "gf", "-n", fleet.user, f"{key}.pub"]
    subprocess.run(sign, check=True)
    node = fleet.add(f"TrustedUserCAKeys {authority}.pub")
    assert fleet.user in who(transport(fleet, node, identity=str(key)))
