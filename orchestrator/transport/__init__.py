"""How files and commands reach a node."""

from __future__ import annotations

from orchestrator.transport.base import Channel, Completed, RemoteFile, Transport
from orchestrator.transport.local import LocalTransport

__all__ = ["Channel", "Completed", "LocalTransport", "RemoteFile", "Transport"]
