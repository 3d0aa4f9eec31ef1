"""Host keys: an unknown, changed or revoked key is refused, on each hop."""

from __future__ import annotations

import base64
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.errors import HostKeyError
from orchestrator.transport.ssh import connecting, hostkeys
from orchestrator.transport.ssh.resolve import Hop

TYPE, OURS, OTHER = "ssh-ed25519", b"the key", b"another key"


def hop(known_hosts: Path, host: str = "gpu1") -> Hop:
    return Hop(
        name=host, host=host, port=22, user="me", key_names=(host,), identities=(), chosen=False,
        identities_only=False, agent=None, user_files=(known_hosts,), global_files=(), hash_names=False,
        proxy_command=None, cannot=(),
    )  # fmt: skip


def line(host: str, key: bytes, marker: str = "") -> str:
    return f"{marker} {host} {TYPE} {base64.b64encode(key).decode()}\n".lstrip()


@pytest.mark.parametrize("accept_new", [False, True])
def test_a_changed_or_revoked_key_is_refused_whatever_is_wanted(tmp_path: Path, accept_new: bool) -> None:
    known_hosts = tmp_path / "known_hosts"
    for text, why in ((line("gpu1", OTHER), "has changed"), (line("*", OURS, "@revoked"), "is revoked")):
        known_hosts.write_text(text)
        with pytest.raises(HostKeyError, match=why):
            hostkeys.check("n1", hop(known_hosts), TYPE, OURS, accept_new=accept_new)
        assert known_hosts.read_text() == text


def test_an_unknown_key_is_refused_or_added_once(tmp_path: Path) -> None:
    known_hosts = tmp_path / "known_hosts"
    with pytest.raises(HostKeyError, match="is not known"):
        hostkeys.check("n1", hop(known_hosts), TYPE, OURS, accept_new=False)
    assert not known_hosts.exists()
    for _ in range(2):
        hostkeys.check("n1", hop(known_hosts), TYPE, OURS, accept_new=True)
    assert known_hosts.read_text() == line("gpu1", OURS)
    hostkeys.check("n1", hop(known_hosts), TYPE, OURS, accept_new=False)


class Connection:
    """Stands in for fabric's connection, to a host that shows OURS."""

    def __init__(self, **options: Any) -> None:
        self.client, self.transport = self, self
        self._host = options["host"]

    def set_missing_host_key_policy(self, policy: Any) -> None:
        self._policy = policy

    def open(self) -> None:
        self._policy.missing_host_key(self, self._host, SimpleNamespace(get_name=lambda: TYPE, asbytes=lambda: OURS))

    def get_transport(self) -> None:
        """The host has no transport."""

    def set_keepalive(self, seconds: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


@pytest.mark.parametrize("unknown", [None, "jump", "gpu1"])
def test_each_hop_is_checked_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unknown: str | None
) -> None:
    known_hosts = tmp_path / "known_hosts"
    known_hosts.write_text("".join(line(host, OURS) for host in ("jump", "gpu1") if host != unknown))
    monkeypatch.setattr(connecting, "_fabric", lambda: (Connection, None))
    monkeypatch.setattr(connecting.Dialer, "_socket", lambda self, hop: None)
    hops = [hop(known_hosts, "jump"), hop(known_hosts, "gpu1")]
    dialer = connecting.Dialer("n1", hops, accept_new=False, deadline=time.monotonic() + 60)
    if unknown is None:
        dialer.dial()
        assert len(dialer.connections) == 2
        return
    with pytest.raises(HostKeyError, match=f"{unknown}:22 shows .* is not known"):
        dialer.dial()
