"""Time accounting of a search: spans on one monotonic clock, and idle times from them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Span = tuple[float, float]


@dataclass(slots=True)
class TimeAccount:
    """Spans of one search in seconds of CLOCK_MONOTONIC, which all processes of a machine share."""

    start: float
    end: float = 0.0
    compiled: list[Span] = field(default_factory=list)
    """Intervals of the compile jobs in their processes."""
    measuring: list[Span] = field(default_factory=list)
    """Intervals in which the GPU's process checked, timed or ranked."""
    ready: list[Span] = field(default_factory=list)
    """Intervals from the end of a candidate's compile to the begin of its measuring."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the GPU's process by kind (inputs, load, check, measure)."""

    def add(self, kind: str, seconds: float) -> None:
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    @property
    def wall_s(self) -> float:
        return max(0.0, self.end - self.start)

    @property
    def idle_s(self) -> float:
        """Seconds in which the GPU's process did nothing although a compiled candidate waited."""
        return length([*self.ready, *self.measuring]) - length(self.measuring)

    @property
    def starved_s(self) -> float:
        """Seconds in which it did nothing because nothing was compiled."""
        return max(0.0, self.wall_s - length(clip([*self.ready, *self.measuring], (self.start, self.end))))

    def spent(self) -> dict[str, float]:
        """Wall seconds by kind: inputs, check, measure, compile (the GPU had nothing to measure), wait."""
        own = {k: self.seconds.get(k, 0.0) for k in ("inputs", "check", "measure")}
        return {**own, "compile": self.starved_s, "wait": self.idle_s}

    def summary(self) -> str:
        """One line for the log."""
        jobs = sum(b - a for a, b in self.compiled)
        return (
            f"{self.wall_s:.2f} s: {len(self.compiled)} compiled in {jobs:.1f} process seconds; "
            f"GPU idle beside a compiled candidate {self.idle_s:.3f} s "
            f"({100 * self.idle_s / max(self.wall_s, 1e-9):.1f} %), without one {self.starved_s:.2f} s; "
            f"loading took {self.seconds.get('load', 0.0):.2f} s beside that"
        )


def clip(spans: Iterable[Span], to: Span) -> list[Span]:
    """The parts of the spans within one."""
    cut = [(max(a, to[0]), min(b, to[1])) for a, b in spans]
    return [(a, b) for a, b in cut if b > a]


def length(spans: Iterable[Span]) -> float:
    """Seconds of the union."""
    total, until = 0.0, float("-inf")
    for a, b in sorted(spans):
        if b > until:
            total += b - max(a, until)
            until = b
    return total
