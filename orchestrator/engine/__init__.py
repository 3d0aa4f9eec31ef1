"""Engines: how workers are started, listed and stopped on a node."""

from __future__ import annotations

from orchestrator.engine.base import Engine, WorkerState
from orchestrator.engine.process import ProcessEngine

__all__ = ["Engine", "ProcessEngine", "WorkerState"]
