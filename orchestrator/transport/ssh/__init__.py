"""The transport `ssh`: fabric connections, strict host keys on every hop."""

from __future__ import annotations

from orchestrator.errors import HostKeyError, LoginError, UnreachableError
from orchestrator.transport.ssh.link import SshTransport

__all__ = ["HostKeyError", "LoginError", "SshTransport", "UnreachableError"]
