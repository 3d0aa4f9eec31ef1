"""An ssh_config means what it means to `ssh -G`; without an OpenSSH client it means the same or is refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import TransportError
from orchestrator.transport.ssh_config import HostRequest
from orchestrator.transport.ssh_connection import Hop, hops

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh here (Debian: openssh-client)")

HOME = str(Path.home())
# lines below `Host node`, and what they must come to
ODDITIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("HostName 10.0.0.1 # the rack's first", {"host": "10.0.0.1"}),
    ("HostName 10.0.0.1#a", {"host": "10.0.0.1#a"}),
    ('HostName "10.0.0.1"\nUser "me" # c', {"host": "10.0.0.1", "user": "me"}),
    ("HostName=10.0.0.1\nPort = 2222\r", {"host": "10.0.0.1", "port": 2222}),
    ("\tHOSTNAME\t10.0.0.1\t", {"host": "10.0.0.1"}),
    ("HostName %h.example.com", {"host": "node.example.com"}),
    ("HostName fe80::1", {"host": "fe80::1"}),
    ("Port 23 # c\nPort 24", {"port": 23}),
    ('User "DOMAIN\\\\me"', {"user": "DOMAIN\\me"}),
    ("ProxyJump ssh://me@gate:2200", {"jumps": [("me", "gate", 2200)]}),
    ("ProxyJump ssh://me@first:24,ssh://last:7", {"jumps": [("me", "first", 24), (None, "last", 7)]}),
    ("ProxyJump [fe80::1]:2222", {"jumps": [(None, "fe80::1", 2222)]}),
    ("ProxyJump me@[fe80::1]", {"jumps": [("me", "fe80::1", 22)]}),
    ("ProxyJump fe80::1", {}),
    ("ProxyJump gate # c", {"jumps": [(None, "gate", 22)]}),
    ("ProxyJump None\nProxyCommand nc %h %p", {"proxy": "nc node 22"}),
    ("ProxyJump NONE\nHost *\nProxyJump gate", {}),
    ("ProxyCommand None\nHost *\nProxyJump gate", {}),
    ("ProxyCommand nc %n %p\nProxyJump gate", {"proxy": "nc node 22"}),
    ("ProxyJump gate\nHost *\nProxyJump gate", {"jumps": [(None, "gate", 22)]}),
    ("IdentityFile ${HOME}/.ssh/id_x", {"keys": [f"{HOME}/.ssh/id_x"]}),
    ("IdentityFile ${GEMMFLEET_UNSET}/id_x", {}),
    ("IdentityFile %d/%r@%h:%p-%%x\nUser z\nPort 5", {"keys": [f"{HOME}/z@node:5-%x"], "user": "z", "port": 5}),
    ("IdentityFile '~/my keys/id'\nIdentityFile ~root/id", {"keys": [f"{HOME}/my keys/id", "/root/id"]}),
    ("UserKnownHostsFile ${HOME}/known-%h", {"known": f"{HOME}/known-node"}),
    ("UserKnownHostsFile %d/known # c", {"known": f"{HOME}/known"}),
    ("HostKeyAlias box # c", {"alias": "box"}),
    ("Host n[o]de\nHostName 10.0.0.1", {}),
    ("Match host=node\nHostName 10.0.0.1", {"host": "10.0.0.1"}),
    ("Match host node user me\nHostName 10.0.0.1\nMatch all\nUser me", {"user": "me"}),
    ("HostName 10.0.0.1 10.0.0.2", {}),
    ("HostName", {}),
    ("Port 70000", {}),
    ("Frobnicate yes", {}),
)


def login(hop: Hop) -> tuple[str, str, int]:
    return hop.connection.user, hop.connection.host, hop.connection.port


@pytest.mark.parametrize(("lines", "expected"), ODDITIES, ids=[lines for lines, _ in ODDITIES])
def test_an_ssh_config_is_read_as_ssh_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, expected: dict[str, Any]
) -> None:
    config = tmp_path / "config"
    config.write_text(f"Host node\n{lines}\n")
    ask = HostRequest("node", config=config)
    asked = subprocess.run(
        ["ssh", "-G", "-F", str(config), "node"], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if asked.returncode or "UNSET" in lines:  # ssh expands variables of an identity when it needs them
        with pytest.raises(TransportError, match="the ssh configuration cannot be used"):
            hops("n1", ask)
        return
    theirs = dict(line.partition(" ")[::2] for line in asked.stdout.splitlines())
    *gateways, node = hops("n1", ask)
    assert login(node) == (theirs["user"], theirs["hostname"], int(theirs["port"]))
    whole = {"user": theirs["user"], "host": "node", "port": 22, "jumps": [], "proxy": False, **expected}
    assert login(node) == (whole["user"], whole["host"], whole["port"])
    places = [(user or theirs["user"], host, port) for user, host, port in whole["jumps"]]
    assert [login(hop) for hop in gateways] == places
    assert bool(gateways) == ("proxyjump" in theirs)
    assert gateways or node.connection.gateway == whole["proxy"]
    if "keys" in whole:
        assert [str(path) for path in node.login._identities] == whole["keys"]
    assert str(node.host_keys._files[0]) == whole.get("known", f"{HOME}/.ssh/known_hosts")
    assert node.host_keys._name == whole.get("alias", node.host_keys._name)

    monkeypatch.setattr(shutil, "which", lambda name: None)
    try:
        plain = hops("n1", ask)
    except TransportError as e:
        assert "needs an OpenSSH client on this machine" in str(e)  # noqa: PT017
    else:
        assert [login(hop) for hop in plain] == [login(hop) for hop in (*gateways, node)]
        assert plain[-1].connection.gateway == node.connection.gateway or gateways


def test_plain_files_need_no_openssh_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    config = tmp_path / "config"
    config.write_text(
        "# mine\nHost n*de !other\n  HostName 10.0.0.1\n  ProxyJump me@gate:24\n  IdentityFile ~/.ssh/id_x\n"
    )
    first, last = hops("n1", HostRequest("node", user="tuner", config=config))
    assert (login(first), login(last)) == (("me", "gate", 24), ("tuner", "10.0.0.1", 22))
    assert [str(path) for path in last.login._identities] == [f"{HOME}/.ssh/id_x"]
