"""Time accounting of a search: spans on one monotonic clock, idle time and utilisation from them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Span = tuple[float, float]


@dataclass(slots=True)
class TimeAccount:
    """Spans of one search in seconds of CLOCK_MONOTONIC, which all processes of a machine share."""

    start: float
    compilers: int
    end: float = 0.0
    compiled: list[Span] = field(default_factory=list)
    """Intervals of the compile jobs in their processes."""
    needed_until: float = 0.0
    """Time at which the last compile ended whose candidate was measured."""
    rested: list[Span] = field(default_factory=list)
    """Intervals in which a process had no job, as all that were wanted were done or at other processes."""
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
        return length(self.ready) - overlap(self.ready, self.measuring)

    @property
    def starved_s(self) -> float:
        """Seconds in which it did nothing because nothing was compiled."""
        return max(0.0, self.wall_s - length(clip([*self.ready, *self.measuring], (self.start, self.end))))

    @property
    def compile_busy(self) -> float:
        """Share of the compile processes' time at work, until the last candidate that is needed is compiled.

        Of the time for which there was work: a process that has no job counts as idle unless every kernel that the
        search and the shapes after it want is compiled or at another process (a search may want fewer kernels than
        there are processes).
        """
        return self._busy(self.rested)

    @property
    def compile_busy_of_all(self) -> float:
        """The same with nothing left out: of all processes' time."""
        return self._busy(())

    def _busy(self, rested: Iterable[Span]) -> float:
        until = (self.start, self.needed_until)
        whole = (until[1] - until[0]) * self.compilers - sum(b - a for a, b in clip(rested, until))
        return sum(b - a for a, b in clip(self.compiled, until)) / whole if whole > 0 else 1.0

    def spent(self) -> dict[str, float]:
        """Wall seconds by kind: inputs, load, check, measure, compile (the GPU had nothing to measure), wait."""
        own = {k: self.seconds.get(k, 0.0) for k in ("inputs", "check", "measure")}
        return {**own, "compile": self.starved_s, "wait": self.idle_s}

    def summary(self) -> str:
        """One line for the log."""
        jobs = sum(b - a for a, b in self.compiled)
        return (
            f"{self.wall_s:.2f} s: {len(self.compiled)} compiled in {jobs:.1f} process seconds, "
            f"processes {100 * self.compile_busy:.0f} % busy until the last needed; "
            f"GPU idle beside a compiled candidate {self.idle_s:.3f} s "
            f"({100 * self.idle_s / max(self.wall_s, 1e-9):.1f} %), without one {self.starved_s:.2f} s; "
            f"loading took {self.seconds.get('load', 0.0):.2f} s beside that"
        )


def clip(spans: Iterable[Span], to: Span) -> list[Span]:
    """The parts of the spans within one."""
    cut = [(max(a, to[0]), min(b, to[1])) for a, b in spans]
    return [(a, b) for a, b in cut if b > a]


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union as disjoint spans in order."""
    out: list[Span] = []
    for a, b in sorted(s for s in spans if s[1] > s[0]):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(b, out[-1][1]))
        else:
            out.append((a, b))
    return out


def length(spans: Iterable[Span]) -> float:
    """Seconds of the union."""
    return sum(b - a for a, b in merged(spans))


def overlap(one: Iterable[Span], other: Iterable[Span]) -> float:
    """Seconds of the intersection of two unions."""
    mine, theirs = merged(one), merged(other)
    return sum(length(clip(theirs, span)) for span in mine)
