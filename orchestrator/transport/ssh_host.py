"""The host that an inventory asks for, as the SSH transport and its connection code pass it on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HostRequest:
    """A host to connect to. None stands for what the ssh_config says."""

    host: str
    user: str | None = None
    port: int | None = None
    identity: str | None = None
    proxy_jump: str | None = None
    """Hops as in ssh_config: `[user@]host[:port]`, several separated by commas, or `none`."""
    config: Path | None = None
    """An ssh_config to read instead of the user's and the system's."""
