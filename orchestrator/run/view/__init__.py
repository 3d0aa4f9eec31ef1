"""View of a run: one projection of the journal for live view, `status`, `explain` and page."""

from __future__ import annotations

from orchestrator.run.view.run_view import RunView

__all__ = ["RunView"]
