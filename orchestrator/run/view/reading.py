"""A run read from its ledger: its view, kept up to date, and findings that the journal does not hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from orchestrator.ledger import LedgerReader
from orchestrator.ledger.model import LeftOut
from orchestrator.nodes.check import HOT_C
from orchestrator.paths import RunConfig, RunPaths
from orchestrator.planning import CostModel
from orchestrator.run.view.run_view import RunView
from orchestrator.run.view.status import RunHeader
from orchestrator.run.view.work import Costs
from orchestrator.shapes import Shape, describe
from worker.device.health import evidence


class ViewReader:
    """`update` brings `view` up to date; `name` names a shape."""

    def __init__(self) -> None:
        self.view = RunView()
        self._read = 0
        self._keys: dict[int, tuple[int | str, ...]] | None = None

    def update(self, ledger: LedgerReader) -> RunView:
        """Read what came since the last call."""
        if self._keys is None:
            shapes = [Shape(s.id, s.key) for s in ledger.shapes()]
            self._keys = {s.id: s.key for s in shapes}
            self.view = RunView(costs_of(ledger, shapes))
        last = int(ledger.query("SELECT coalesce(max(id), 0) FROM journal")[0][0])
        if last > self._read:
            for t, record in ledger.journal_records(self._read):
                self.view.feed(t, record)
            self._read = last
        return self.view

    def name(self, shape: int) -> str:
        """Shape as the user knows it."""
        key = (self._keys or {}).get(shape)
        return describe(key) if key else f"shape {shape}"

    def about(self, ledger: LedgerReader, config: RunConfig, nodes: Mapping[str, tuple[str, ...]]) -> RunHeader:
        """Facts on a run beside its journal."""
        counts = ledger.counts()
        return RunHeader(
            config.run, config.family, config.tuner, config.created, counts.total, counts.skipped, nodes, self.name
        )


def costs_of(ledger: LedgerReader, shapes: Sequence[Shape]) -> Costs | None:
    """The estimates that the run was planned with, None where it was planned without."""
    kept = ledger.meta("cost")
    if kept is None:
        return None
    model = CostModel(**kept)
    each = model.shape_costs(shapes, ledger.family)
    return Costs(lambda i: each.get(i, 0.0), model.setup_s, model.start_s, model.spread)


FAULTS = ("fault", "error", "hang", "oom")
"""Statuses of rows whose candidate faulted; `wrong`, `unsupported`, `timeout` (a budget) are answers."""
REPRODUCTION = "reproduce.sh"
MOST = 50


@dataclass(frozen=True, slots=True)
class FaultedCandidate:
    """A candidate that faulted on a slot, with the shapes and its first message."""

    kernel: str
    backend: str
    node: str
    slot: str
    shapes: tuple[int, ...]
    status: str
    detail: str
    attempts: tuple[str, ...] = ()
    elsewhere: str = ""
    """Sentence on its result on another slot."""


class _Seen(NamedTuple):
    status: str
    shape: int
    detail: str
    attempt: str


@dataclass(frozen=True, slots=True)
class SlotWarning:
    """A slot with suspicious readings around an attempt."""

    node: str
    slot: str
    attempt: str
    t: float
    text: str


def faulted(ledger: LedgerReader) -> list[FaultedCandidate]:
    """Candidates that faulted, those with the most shapes first."""
    marks = ", ".join("?" * len(FAULTS))
    rows = ledger.query(
        f"""SELECT kernel_name, libtype, node, slot, status, shape, detail, attempt FROM rows
            WHERE status IN ({marks}) AND winner=0 ORDER BY id""",
        FAULTS,
    )
    by: dict[tuple[str, str, str, str, str], list[_Seen]] = defaultdict(list)
    for kernel, backend, node, slot, *rest in rows:
        by[kernel, backend, node, slot, ""].append(_Seen(*rest))
    for w in ledger.left_out():
        kernel = w.name or " ".join(w.candidate)
        by[kernel, "", w.node, w.slot, _elsewhere(w)].append(_Seen(w.outcome, w.shape, w.detail, w.attempt))
    found = [
        FaultedCandidate(
            kernel, backend, node, slot, tuple(dict.fromkeys(x.shape for x in seen)), seen[0].status, seen[0].detail,
            tuple(dict.fromkeys(x.attempt for x in seen)), elsewhere,
        )
        for (kernel, backend, node, slot, elsewhere), seen in by.items()
    ]  # fmt: skip
    return sorted(found, key=lambda f: -len(f.shapes))[:MOST]


def _elsewhere(w: LeftOut) -> str:
    match w.verdict:
        case "ran":
            return "it ran on another slot"
        case "faulted":
            return "it faulted on another slot, too"
        case _:
            return "it had faulted on two slots before" if w.confirmed else "unconfirmed: no other slot has tried it"


def slot_warnings(ledger: LedgerReader) -> list[SlotWarning]:
    """Attempts during which hardware errors rose, or whose GPU was hot."""
    out = []
    for a in ledger.attempts():
        before, after = (a.conditions.get(when, {}) for when in ("before", "after"))
        words = [evidence(before, after)] if before and after else []
        warm = after.get("temperature_c")
        hot = (
            max((x for x in warm.values() if isinstance(x, int | float)), default=0.0) if isinstance(warm, dict) else 0
        )
        words += [f"{hot:.0f} C at its end"] if hot >= HOT_C else []
        for text in filter(None, words):
            out.append(SlotWarning(a.node, a.slot or "", a.id, a.ended_at or a.sent_at, text))
    return out


def reproductions(paths: RunPaths, attempts: Iterable[str]) -> list[Path]:
    """Scripts that show a fault again, as the workers wrote them for these attempts."""
    return [p for a in attempts for p in sorted(paths.attempt(a).glob(f"**/{REPRODUCTION}"))][:MOST]
