"""What `docker inspect` says of a container, as a WorkerState."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from orchestrator.engine.base import WorkerState

ALIVE = ("running", "restarting", "paused")
_LAST_SIGNAL = 64


def worker_state(slot: str, inspected: Mapping[str, Any]) -> WorkerState:
    """The state of a slot's container. `restarting` counts as running: Docker is about to start it again."""
    state = inspected.get("State") or {}
    status = str(state.get("Status", ""))
    alive = status in ALIVE
    code = None if alive or not isinstance(state.get("ExitCode"), int) else int(state["ExitCode"])
    return WorkerState(
        slot,
        "running" if alive else "ended",
        code,
        oom_killed=bool(state.get("OOMKilled")),
        signal=code - 128 if code is not None and 128 < code <= 128 + _LAST_SIGNAL else None,
        started_at=epoch(str(state.get("StartedAt", ""))),
        restarts=int(inspected.get("RestartCount") or 0),
        health=str((state.get("Health") or {}).get("Status") or status),
    )


def epoch(stamp: str) -> float | None:
    """Epoch seconds of Docker's RFC 3339 with up to nine decimals; None for "never" (the year 1) or garbage."""
    m = re.match(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)\Z", stamp)
    if not m or m[1].startswith("0001"):
        return None
    whole = datetime.fromisoformat(m[1] + ("+00:00" if m[3] == "Z" else m[3]))
    return whole.timestamp() + float(m[2] or 0)
