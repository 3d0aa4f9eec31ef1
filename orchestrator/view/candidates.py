"""Candidates that faulted, and slots with suspicious readings: findings that the state of a run does not hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.ledger import LedgerReader
from orchestrator.paths import RunPaths
from worker.device import HOT_C, evidence
from worker.families import backend_of
from worker.text import and_more

FAULTS = ("fault", "error", "hang", "oom")
"""Statuses of rows whose candidate faulted; `wrong`, `unsupported`, `timeout` (a budget) are answers."""
REPRODUCTION = "reproduce.sh"
MOST = 50
_FAULTED = f"""SELECT kernel_name, libtype, node, slot, status, shape, detail, attempt FROM rows
    WHERE status IN ({", ".join(repr(f) for f in FAULTS)}) AND winner=0 ORDER BY id"""


@dataclass(frozen=True, slots=True)
class Seen:
    """One time that a candidate faulted. `elsewhere`: sentence on its result on other slots."""

    shape: int
    node: str
    slot: str
    attempt: str
    what: str
    elsewhere: str = ""


@dataclass(slots=True)
class FaultedCandidate:
    """A candidate that faulted, and each time that it did."""

    name: str
    backend: str
    seen: list[Seen] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.name} ({self.backend})" if self.backend else self.name

    @property
    def shapes(self) -> dict[int, None]:
        return dict.fromkeys(x.shape for x in self.seen)

    def words(self, shape: int | None = None) -> str:
        """`faulted on n1 slot 0 (fault: SIGSEGV); it ran on another slot`, of all shapes or of one."""
        seen = [x for x in self.seen if shape in (None, x.shape)]
        places = list(dict.fromkeys(f"{x.node} slot {x.slot}" for x in seen))
        elsewhere = seen[-1].elsewhere if len(places) == 1 else ""
        return "; ".join(filter(None, (f"faulted on {and_more(places, 4)} ({seen[0].what})", elsewhere)))


def faulted(ledger: LedgerReader) -> list[FaultedCandidate]:
    """Candidates that faulted, those with the most shapes first."""
    found: dict[tuple[str, str], FaultedCandidate] = {}

    def add(name: str, libtype: str, seen: Seen) -> None:
        backend = backend_of(ledger.family.name, {"libtype": libtype, "kernelName": name}) or libtype
        found.setdefault((name, backend), FaultedCandidate(name, backend)).seen.append(seen)

    for name, libtype, node, slot, status, shape, detail, attempt in ledger.query(_FAULTED):
        add(name or "a candidate without a name", libtype, Seen(shape, node, slot, attempt, _what(status, detail)))
    left_out = ledger.left_out()
    known = dict(ledger.query("SELECT DISTINCT kernel_name, libtype FROM rows")) if left_out else {}
    for w in left_out:
        elsewhere = "it ran on another slot" if w.verdict == "ran" else ""
        if w.verdict is None and not w.confirmed:
            elsewhere = "unconfirmed: no other slot has tried it"
        seen = Seen(w.shape, w.node, w.slot, w.attempt, _what(w.outcome, w.detail), elsewhere)
        add(w.name or " ".join(w.candidate), known.get(w.name, ""), seen)
    return sorted(found.values(), key=lambda f: -len(f.shapes))[:MOST]


def _what(status: str, detail: str) -> str:
    return f"{status}: {detail}" if detail else status


@dataclass(frozen=True, slots=True)
class SlotWarning:
    """A slot with suspicious readings around an attempt."""

    node: str
    slot: str
    attempt: str
    t: float
    text: str


def slot_warnings(ledger: LedgerReader) -> list[SlotWarning]:
    """Attempts during which hardware errors rose, or whose GPU was hot."""
    out, attempts = [], ledger.replayed.attempts
    for id_, report in ledger.reports().items():
        a = attempts.get(id_)
        before, after = (report.conditions.get(when, {}) for when in ("before", "after"))
        words = [evidence(before, after)] if before and after else []
        warm = after.get("temperature_c")
        degrees = [x for x in warm.values() if isinstance(x, int | float)] if isinstance(warm, dict) else []
        words += [f"{max(degrees):.0f} C at its end"] if max(degrees, default=0.0) >= HOT_C else []
        if a is not None:
            out += [SlotWarning(a.node, a.slot, id_, a.ended_at or a.sent_at, text) for text in words if text]
    return sorted(out, key=lambda w: w.t)


def reproductions(paths: RunPaths, attempts: Iterable[str]) -> list[Path]:
    """Scripts that show a fault again, as the workers wrote them for these attempts."""
    return [p for a in attempts for p in sorted(paths.attempt(a).glob(f"**/{REPRODUCTION}"))][:MOST]
