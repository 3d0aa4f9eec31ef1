"""The transport `ssh`: fabric connections, names by `ssh -G`, strict host keys on every hop."""

from __future__ import annotations

from orchestrator.errors import HostKeyError, LoginError, UnreachableError
from orchestrator.transport.ssh.ssh import SshTransport

__all__ = ["HostKeyError", "LoginError", "SshTransport", "UnreachableError"]
