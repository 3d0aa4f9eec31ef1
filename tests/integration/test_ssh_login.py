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

from orchestrator.errors import TransportError
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


def test_an_unknown_host_key_is_refused_with_the_way_out(fleet: LightFleet) -> None:
    node = fleet.add(known=False)
    with pytest.raises(HostKeyError) as e:
        transport(fleet, node).connect()
    shown = subprocess.run(["ssh-keygen", "-lf", node.host_key()], capture_output=True, text=True, check=True)
    text = str(e.value)
    assert shown.stdout.split()[1] in text
    assert node.known_name in text
    assert str(fleet.known_hosts) in text
    assert f"ssh-keyscan -p {node.port} {node.address} >>{fleet.known_hosts}" in text
    assert "--accept-new-host-keys" in text
    assert "Accepted" not in node.log
    # the way out works
    command = f"ssh-keyscan -t ed25519 -p {node.port} {node.address} >>{fleet.known_hosts}"
    subprocess.run(["sh", "-c", command], check=True, stderr=subprocess.DEVNULL)
    assert fleet.user in who(transport(fleet, node))


def test_a_changed_host_key_is_refused_even_where_new_ones_are_accepted(fleet: LightFleet) -> None:
    node, other = fleet.add(known=False), fleet.add(known=False, start=False)
    fleet.known_hosts.write_text(f"# ours\n{node.known_name} {public(other.host_key())}\n")
    for accept in (False, True):
        with pytest.raises(HostKeyError, match="has changed") as e:
            transport(fleet, node, accept_new_host_keys=accept).connect()
        assert f"{fleet.known_hosts}:2 holds ssh-ed25519 SHA256:" in str(e.value)
        assert f"ssh-keygen -R '{node.known_name}' -f {fleet.known_hosts}" in str(e.value)
    subprocess.run(["ssh-keygen", "-R", node.known_name, "-f", fleet.known_hosts], check=True, capture_output=True)
    fleet.trust(node)
    assert fleet.user in who(transport(fleet, node))


@pytest.mark.parametrize("hashed", ["yes", "no"])
def test_a_new_host_key_is_accepted_once_and_kept(fleet: LightFleet, hashed: str) -> None:
    node = fleet.add(known=False)
    fleet.known_hosts.unlink()
    deep = fleet.folder / "ssh" / "known_hosts"
    fleet.write_config(f"UserKnownHostsFile {deep}\nHashKnownHosts {hashed}\n")
    who(transport(fleet, node, accept_new_host_keys=True))
    assert deep.stat().st_mode & 0o777 == 0o600
    assert deep.parent.stat().st_mode & 0o777 == 0o700
    line = deep.read_text()
    assert line.count("\n") == 1
    assert line.startswith("|1|") is (hashed == "yes")
    assert public(node.host_key()) in line
    who(transport(fleet, node))  # known from now on
    assert deep.read_text() == line
    # OpenSSH reads what we wrote
    found = subprocess.run(["ssh-keygen", "-F", node.known_name, "-f", deep], capture_output=True, text=True)
    assert public(node.host_key()).split()[1] in found.stdout
    deep.write_text("other.example ssh-ed25519 AAAA")  # no newline at its end
    who(transport(fleet, node, accept_new_host_keys=True))
    assert deep.read_text().splitlines()[0] == "other.example ssh-ed25519 AAAA"


@pytest.mark.parametrize("known", ["ed25519", "ecdsa", "rsa"])
def test_the_host_shows_the_kind_of_key_that_is_known(fleet: LightFleet, known: str) -> None:
    node = fleet.add(key_types=("rsa", "ecdsa", "ed25519"), known=False)
    fleet.trust(node, known)
    assert fleet.user in who(transport(fleet, node))


def test_known_names_may_be_patterns_aliases_and_without_the_port(fleet: LightFleet) -> None:
    node = fleet.add(known=False)
    key = public(node.host_key())
    for names in (f"other,[127.0.*]:{node.port}", node.address, f"[127.0.1?.*]:{node.port},!nothing"):
        fleet.known_hosts.write_text(f"{names} {key} a comment\n")
        who(transport(fleet, node))
    for names in (f"[127.0.*]:{node.port},![{node.address}]:{node.port}", f"@cert-authority [127.*]:{node.port}"):
        fleet.known_hosts.write_text(f"{names} {key}\n")
        with pytest.raises(HostKeyError, match="is not known"):
            transport(fleet, node).connect()
    fleet.known_hosts.write_text(f"{node.known_line()}@revoked * {key}\n")
    with pytest.raises(HostKeyError, match="is revoked in"):
        transport(fleet, node).connect()
    fleet.write_config(f"Host {node.address}\n  HostKeyAlias gpu-box\n")
    fleet.known_hosts.write_text(f"gpu-box {key}\n")
    who(transport(fleet, node))


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


def test_a_jump_host_for_all_hosts_does_not_jump_to_itself(fleet: LightFleet) -> None:
    jump, node = fleet.add(), fleet.add()
    fleet.write_config(f"Host jump\n  HostName {jump.address}\n  Port {jump.port}\nHost *\n  ProxyJump jump\n")
    assert fleet.user in who(transport(fleet, node))
    assert jump.log.count("Accepted publickey") == 1
    assert fleet.user in who(SshTransport("jump", "jump", config=fleet.config))
    assert fleet.user in who(transport(fleet, node, proxy_jump="none"))
    assert jump.log.count("Accepted publickey") == 2
    fleet.write_config("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    with pytest.raises(TransportError, match="circle"):
        SshTransport("a", "a", config=fleet.config).connect()


def test_what_is_behind_a_jump_host_may_be_refused_or_forbidden(fleet: LightFleet) -> None:
    jump, shut, node = fleet.add(), fleet.add("AllowTcpForwarding no"), fleet.add()
    node.kill()
    t = transport(fleet, node, proxy_jump=f"{jump.address}:{jump.port}", connect_timeout=REFUSED_S)
    with pytest.raises(UnreachableError, match=f"the jump host cannot connect to {node.address}"):
        t.connect()
    t = transport(fleet, node, proxy_jump=f"{shut.address}:{shut.port}", connect_timeout=REFUSED_S)
    with pytest.raises(UnreachableError, match="AllowTcpForwarding"):
        t.connect()


def test_a_link_cut_at_the_jump_host_breaks_the_connection(fleet: LightFleet) -> None:
    jump, node = fleet.add(), fleet.add()
    t = transport(fleet, node, proxy_jump=f"{jump.address}:{jump.port}")
    t.connect()
    c = t.open(["cat"])
    jump.drop()
    assert c.read(1) == b""
    assert "the connection broke" in c.error()
    t.connect()
    assert t.run(["echo", "x"]).out == b"x\n"
    jump.pause()
    t.close()


def test_a_proxy_command(fleet: LightFleet) -> None:
    node = fleet.add()
    relay = fleet.folder / "relay.py"
    relay.write_text(
        "import os, socket, sys, threading\n"
        "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "def up():\n    while d := os.read(0, 65536): s.sendall(d)\n    s.shutdown(1)\n"
        "threading.Thread(target=up, daemon=True).start()\n"
        "while d := s.recv(65536): os.write(1, d)\n"
    )
    fleet.write_config(
        f"Host gpu\n  HostName {node.address}\n  Port {node.port}\n  ProxyCommand python3 {relay} %h %p\n"
    )
    assert fleet.user in who(SshTransport("gpu", "gpu", config=fleet.config))
    fleet.write_config("Host gpu\n  ProxyCommand false\n")
    with pytest.raises(UnreachableError, match="gpu"):
        SshTransport("gpu", "gpu", config=fleet.config, connect_timeout=REFUSED_S).connect()


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
    with pytest.raises(LoginError, match="there is no key to log in"):
        transport(fleet, node).connect()
    add_key(agent, keygen(fleet.folder / "other", "rsa"))
    with pytest.raises(LoginError, match="not taken: ssh-agent's ssh-rsa SHA256:"):
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
    key.with_name("locked.pub").unlink()  # the file itself tells which key it is
    with pytest.raises(LoginError, match=rf"{key} is encrypted and ssh-agent does not hold it\. Run: ssh-add {key}"):
        transport(fleet, node, identity=str(key)).connect()
    add_key(agent, key, "sesame")
    assert fleet.user in who(transport(fleet, node, identity=str(key)))


def test_a_certificate_beside_its_key(fleet: LightFleet) -> None:
    authority, key = keygen(fleet.folder / "ca"), keygen(fleet.folder / "certified")
    sign = ["ssh-keygen", "-q", "-s", str(authority), "-I", "gf", "-n", fleet.user, f"{key}.pub"]
    subprocess.run(sign, check=True)
    node = fleet.add(f"TrustedUserCAKeys {authority}.pub")
    assert fleet.user in who(transport(fleet, node, identity=str(key)))


def test_a_refused_key_says_what_was_tried(fleet: LightFleet) -> None:
    node = fleet.add()
    fleet.authorized.write_text("")
    with pytest.raises(LoginError) as e:
        transport(fleet, node).connect()
    text = str(e.value)
    assert f"{fleet.user}@{node.address}:{node.port}" in text
    assert f"not taken: {fleet.key}" in text
    assert "authorized_keys" in text
    with pytest.raises(LoginError, match=r"the identity /nonexistent for .* does not exist"):
        transport(fleet, node, identity="/nonexistent").connect()
    bad = fleet.folder / "bad"
    bad.write_text("no key\n")
    with pytest.raises(LoginError, match=f"{bad} is no private key that can be used here"):
        transport(fleet, node, identity=str(bad)).connect()


def test_a_host_that_wants_more_than_a_key_is_not_asked_for_a_password(fleet: LightFleet) -> None:
    node = fleet.add("PasswordAuthentication yes", "AuthenticationMethods publickey,password")
    with pytest.raises(LoginError, match=r"the host asks for more \(password\).*Passwords are never asked for"):
        transport(fleet, node).connect()
    node = fleet.add("PasswordAuthentication yes", "PubkeyAuthentication no")
    with pytest.raises(LoginError, match="only password"):
        transport(fleet, node).connect()


# --- no connection ----------------------------------------------------------------------------------------------------


def test_each_way_of_not_getting_there_has_its_words(fleet: LightFleet) -> None:
    node = fleet.add()
    port = node.port
    node.kill()
    with pytest.raises(UnreachableError, match=f"{node.address}:{port} refused the connection"):
        transport(fleet, node, connect_timeout=REFUSED_S).connect()
    with pytest.raises(UnreachableError, match=r"the name no-such-host\.invalid cannot be resolved|did not answer"):
        SshTransport("n", "no-such-host.invalid", config=fleet.config, connect_timeout=2.0).connect()
    for host in ("-oProxyCommand=true", "a b", ""):
        with pytest.raises(TransportError, match="is not a host name"):
            SshTransport("n", host, config=fleet.config).connect()
    fleet.write_config("NoSuchSetting yes\n")
    with pytest.raises(TransportError, match=r"(?s)ssh -G .* ended with code .*NoSuchSetting|nosuchsetting"):
        transport(fleet, node).connect()


def test_a_server_that_is_no_sshd(fleet: LightFleet) -> None:
    with socket.create_server(("127.0.10.200", 0)) as server:
        server.settimeout(5)
        t = SshTransport("n", "127.0.10.200", port=server.getsockname()[1], config=fleet.config, connect_timeout=1.0)
        with pytest.raises(UnreachableError, match=r"did not answer within 1 s"):
            t.connect()
        assert t.node == "n"
