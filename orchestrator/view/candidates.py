"""Candidates that faulted, and slots with suspicious readings: findings that the state of a run does not hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.ledger import LedgerReader
from orchestrator.paths import RunPaths
from worker.device.health import HOT_C, evidence
from worker.families import backend_of
from worker.text import and_more

FAULTS = ("fault", "error", "hang", "oom")
"""Statuses of rows whose candidate faulted; `wrong`, `unsupported`, `timeout` (a budget) are answers."""
REPRODUCTION = "reproduce.sh"
MOST = 50
_FAULTED = f"""SELECT kernel_name, libtype, node, slot, status, shape, detail, attempt FROM rows
    WHERE status IN ({", ".join(repr(f) for f in FAULTS)}) AND winner=0 ORDER BY id"""


@dataclass(slots=True)
class FaultedCandidate:
    """A candidate that faulted: on which slots, at which shapes, in which attempts, and its first message.

    `elsewhere`: sentence on its result on other slots.
    """

    name: str
    backend: str
    status: str
    detail: str
    places: dict[tuple[str, str], None] = field(default_factory=dict)
    shapes: dict[int, None] = field(default_factory=dict)
    attempts: dict[str, None] = field(default_factory=dict)
    elsewhere: str = ""

    @property
    def title(self) -> str:
        return f"{self.name} ({self.backend})" if self.backend else self.name

    @property
    def words(self) -> str:
        """`faulted on n1 slot 0 (fault: SIGSEGV); it ran on another slot`."""
        where = and_more([f"{node} slot {slot}" for node, slot in self.places], 4)
        why = f"{self.status}: {self.detail}" if self.detail else self.status
        return "; ".join(filter(None, (f"faulted on {where} ({why})", self.elsewhere)))


def faulted(ledger: LedgerReader) -> list[FaultedCandidate]:
    """Candidates that faulted, those with the most shapes first."""
    rows, left_out = ledger.query(_FAULTED), ledger.left_out()
    named = {w.name for w in left_out if w.name} | {r[0] for r in rows}
    marks = ", ".join("?" * min(len(named), 900))
    known = dict(
        ledger.query(
            f"SELECT kernel_name, max(libtype) FROM rows WHERE kernel_name IN ({marks}) GROUP BY 1",
            tuple(sorted(named)[:900]),
        )
    )
    found: dict[tuple[str, str], FaultedCandidate] = {}

    def add(name: str, libtype: str, place: tuple[str, str], status: str, shape: int, detail: str, attempt: str) -> str:
        backend = backend_of(ledger.family.name, {"libtype": known.get(name) or libtype, "kernelName": name}) or libtype
        f = found.setdefault((name, backend), FaultedCandidate(name, backend, status, detail))
        f.places[place] = f.shapes[shape] = f.attempts[attempt] = None
        return backend

    for name, libtype, node, slot, status, shape, detail, attempt in rows:
        add(name or "a candidate without a name", libtype, (node, slot), status, shape, detail, attempt)
    for w in left_out:
        name, libtype = w.name or " ".join(w.candidate), w.candidate[0] if len(w.candidate) > 1 else ""
        backend = add(name, libtype, (w.node, w.slot), w.outcome, w.shape, w.detail, w.attempt)
        found[name, backend].elsewhere = _ELSEWHERE.get(
            w.verdict or "", "" if w.confirmed else "unconfirmed: no other slot has tried it"
        )
    return sorted(found.values(), key=lambda f: -len(f.shapes))[:MOST]


_ELSEWHERE = {"ran": "it ran on another slot", "faulted": "it faulted on two slots"}


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
