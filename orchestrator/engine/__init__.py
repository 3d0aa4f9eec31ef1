"""How workers are started on a node."""

from __future__ import annotations

from orchestrator.engine.process import Engine, ProcessEngine, WorkerState

__all__ = ["Engine", "ProcessEngine", "WorkerState"]
