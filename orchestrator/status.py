"""Status of a run as the live view, `status` and `status --json` show it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from worker.tuners.catalog import recorded_tuner


@dataclass(slots=True)
class SlotStatus:
    """One slot: `doing` is what it measures now (a shape) since `since` (epoch seconds)."""

    slot: str
    state: str = "starting"
    attempt: str | None = None
    doing: str = ""
    since: float = 0.0
    device: str = ""
    gpu: dict[str, Any] | None = None
    """Reading of its GPU from the live poll (docs/explanation/measurement.md), None where nothing is known."""


@dataclass(slots=True)
class NodeStatus:
    """One node. state: preparing, ready, busy, draining, slow (it is there and has not answered in time),
    unreachable or quarantined; of a lease also queued or ended."""

    name: str
    state: str = "preparing"
    slots: list[SlotStatus] = field(default_factory=list)
    tuned: int = 0
    failed: int = 0
    detail: str = ""
    log: list[str] = field(default_factory=list)
    """Its last log lines."""
    lease: str = ""
    """Of a node that is one: its id with the scheduler, the machine that it is on, its end by its time limit."""
    host: str = ""
    ends_at: float = 0.0
    """Epoch seconds, 0 for never."""
    live: dict[str, Any] | None = None
    """Answer of the live poll: `at` (epoch seconds), `error`, `slow`, `load`, `containers`, `gpus`; None: not polled.
    """

    @property
    def running(self) -> int:
        """Slots that work on an attempt."""
        return sum(1 for s in self.slots if s.attempt)


@dataclass(slots=True)
class RunStatus:
    """One run. state: planned, preparing, running, finished, interrupted or cancelled."""

    run: str
    state: str
    total: int = 0
    tuned: int = 0
    skipped: int = 0
    failed: int = 0
    running: int = 0
    nodes: list[NodeStatus] = field(default_factory=list)
    rate_per_min: float | None = None
    """Shapes tuned a minute, over the last minutes."""
    eta_s: float | None = None
    eta_range_s: tuple[float, float] | None = None
    """Nine times of ten the end comes between these."""
    started: float | None = None
    """Time of the request."""
    worked_s: float | None = None
    """Seconds in which a controller was at it; the while between two sessions is none of its time."""
    worked: str = ""
    """`worked_s` as text."""
    sessions: int = 0
    controller: str = ""
    family: str = ""
    tuner: str = ""
    standing_out: list[str] = field(default_factory=list)
    """Sentences on slots that are slow, hot or power-capped beside the others."""
    files: list[dict[str, Any]] = field(default_factory=list)
    """Result files: path, bytes, when written (epoch seconds)."""

    @property
    def done(self) -> str:
        """The word for a shape that has a result: a bench tunes nothing."""
        return "measured" if self.tuner and recorded_tuner(self.tuner).side_by_side else "tuned"

    @property
    def settled(self) -> int:
        return self.tuned + self.skipped + self.failed

    @property
    def pending(self) -> int:
        """Shapes neither settled nor in flight."""
        return max(0, self.total - self.settled - self.running)

    def to_json(self) -> dict[str, Any]:
        """The document of `status --json`."""
        nodes = []
        for n in self.nodes:
            raw = asdict(n)
            raw["slots"], raw["slot_states"] = len(n.slots), raw["slots"]
            raw["running"] = n.running
            nodes.append(raw)
        return {
            "run": self.run,
            "state": self.state,
            "shapes": {
                "total": self.total,
                "tuned": self.tuned,
                "skipped": self.skipped,
                "failed": self.failed,
                "running": self.running,
                "pending": self.pending,
            },
            "nodes": nodes,
            "eta_s": None if self.eta_s is None else round(self.eta_s, 1),
            "eta_range_s": None if self.eta_range_s is None else [round(x, 1) for x in self.eta_range_s],
            "rate_per_min": None if self.rate_per_min is None else round(self.rate_per_min, 2),
            "started": self.started,
            "worked_s": None if self.worked_s is None else round(self.worked_s, 1),
            "sessions": self.sessions,
            "controller": self.controller,
            "family": self.family,
            "tuner": self.tuner,
            "standing_out": self.standing_out,
            "files": self.files,
        }


def duration(seconds: float | None) -> str:
    """Duration as text: 8 s, 2 min 05 s, 3 h 10 min."""
    if seconds is None:
        return "unknown"
    s = max(0, round(seconds))
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60:02d} s"
    return f"{s // 3600} h {s % 3600 // 60:02d} min"
