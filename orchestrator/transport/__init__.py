"""Transports: how files and commands reach a node."""

from __future__ import annotations

from orchestrator.errors import HostKeyError, LoginError, UnreachableError
from orchestrator.transport.base import Channel, Completed, RemoteFile, Transport, connected
from orchestrator.transport.local import LocalTransport
from orchestrator.transport.ssh import SshTransport

__all__ = [
    "Channel",
    "Completed",
    "HostKeyError",
    "LocalTransport",
    "LoginError",
    "RemoteFile",
    "SshTransport",
    "Transport",
    "UnreachableError",
    "connected",
]
