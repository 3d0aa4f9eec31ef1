"""Transports: how files and commands reach a node."""

from __future__ import annotations

from orchestrator.transport.base import Channel, Completed, RemoteFile, Transport, connected
from orchestrator.transport.local import LocalTransport
from orchestrator.transport.ssh import HostKeyError, LoginError, SshTransport, UnreachableError

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
