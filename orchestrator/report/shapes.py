"""Table of shapes of the report page, with the share of the roofline; and the backends beside each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.ledger import LedgerReader
from orchestrator.planning.roofline import Chip, chip_of, roof_of
from orchestrator.report.measured import Measurements, Tried, Winner, five_numbers, rounded
from orchestrator.shapes.model import Key, element_type
from orchestrator.tables.kinds import label
from worker.families import Family


@dataclass(frozen=True, slots=True)
class Roofs:
    """Rooflines of a run's shapes. `chip` None: unknown, or several; `note` gives the reason."""

    family: Family
    chip: Chip | None
    note: str

    @classmethod
    def of(cls, family: Family, devices: Sequence[Mapping[str, Any]]) -> Roofs:
        """The rooflines for `devices` as workers and tuners describe them: gfx, cu_num, device."""
        found = {(str(d.get("gfx", "")), d.get("cu_num")) for d in devices}
        if len(found) != 1:
            why = "There is no roof over different devices." if found else "No device is known yet."
            return cls(family, None, why)
        names = [str(d.get("device", "")) for d in devices]
        chip, note = chip_of(found.pop(), names)
        if chip is None:
            note = "No data sheet is known for this device, so there is no roof."
        return cls(family, chip, note.replace(" (--chip corrects it)", ""))

    def at(self, key: Key) -> tuple[float, float] | None:
        """(operations a byte, TFLOPS that the roof allows) of a shape; None where there is no roof."""
        roof = roof_of(self.family, key, self.chip) if self.chip else None
        return (roof.intensity, roof.tflops) if roof else None

    def document(self, keys: Mapping[int, Key]) -> dict[str, Any] | None:
        """The roof that is drawn: that of the type that most shapes have."""
        if self.chip is None:
            return None
        typed = element_type(self.family)
        kinds = Counter(t[0] for key in keys.values() if (t := typed(key)) is not None)
        kind = next((k for k, _ in kinds.most_common() if k in self.chip.peaks), None)
        if kind is None:
            return None
        return {
            "device": self.chip.name, "format": kind.upper(), "tflops": self.chip.peaks[kind],
            "tbs": self.chip.bandwidth, "source": self.chip.source,
        }  # fmt: skip


COLUMNS = (
    "id", "key", "state", "backend", "kernel", "us", "tflops", "bw", "intensity", "share", "spread", "candidates",
    "median_us", "runner_up_us", "old_us", "node", "slot", "attempt", "reason", "detail", "best",
)  # fmt: skip
"""Cells of a row. `key`: the key columns that differ; `intensity`: operations a byte; `share`: of the roof; `best`:
TFLOPS by backend, in their order."""


def columns(family: Family, keys: Mapping[int, Key]) -> dict[str, Any]:
    """`row`: COLUMNS; `key`: the key columns that are shown; `same`: texts in which all shapes agree."""
    seen: list[set[int | str]] = [set() for _ in family.key_names]
    for key in keys.values():
        for values, v in zip(seen, key, strict=True):
            if len(values) < 2:
                values.add(v)
    same = {
        name: next(iter(values), "")
        for name, values, column in zip(family.key_names, seen, family.columns, strict=True)
        if column.kind == "text" and len(values) < 2
    }
    return {"row": list(COLUMNS), "key": [n for n in family.key_names if n not in same], "same": same}


def shape_rows(
    ledger: LedgerReader,
    measured: Measurements,
    backends: list[str],
    old: Mapping[int, float],
    roofs: Roofs,
) -> list[list[Any]]:
    """A row a shape, in the order of the shapes file."""
    shown = columns(measured.family, measured.keys)["key"]
    at = [measured.family.key_names.index(n) for n in shown]
    state_ = ledger.replayed
    flying = {state_.attempts[s.running].current for n in state_.nodes.values() for s in n.slots.values() if s.running}
    nothing = Tried()
    rows: list[list[Any]] = []
    for s in ledger.shapes():
        w, tried = measured.winners.get(s.id), measured.tried.get(s.id, nothing)
        state = "running" if s.state == "pending" and s.id in flying else s.state
        reason = "unconfirmed" if s.state == "tuned" and s.confirmed is False else s.reason or ""
        reason = "noisy" if w and w.noisy and not reason else reason
        best = [_tflops(measured, s.id, tried.best.get(b)) for b in backends] if tried.best else []
        intensity, share = _under_roof(roofs, w, s.key) if w else (None, None)
        rows.append(
            [
                s.id, [s.key[i] for i in at], state, w.backend if w else "", w.kernel[:300] if w else "",
                rounded(w.us) if w else None, rounded(w.tflops, 4) if w else None, rounded(w.bw, 4) if w else None,
                intensity, share, rounded(w.spread, 3) if w else None,
                tried.candidates, rounded(w.median_us) if w else None, rounded(w.runner_up_us) if w else None,
                rounded(old.get(s.id)), s.node, s.slot, s.attempt, reason, s.detail[:600], best,
            ]
        )  # fmt: skip
    return rows


def _tflops(measured: Measurements, shape: int, us: float | None) -> float | None:
    return rounded(measured.flops(shape) / us / 1e6, 4) if us else None


def _under_roof(roofs: Roofs, w: Winner, key: Key) -> tuple[float | None, float | None]:
    """(operations a byte, share of the roof); without a roof the intensity is what the row's bw (GB/s) makes of it."""
    found = roofs.at(key)
    if found is None:
        return (rounded(1000.0 * w.tflops / w.bw, 4) if w.bw else None), None
    intensity, limit = found
    return rounded(intensity, 4), rounded(w.tflops / limit, 3)


def by_backend(measured: Measurements) -> list[dict[str, Any]]:
    """Each backend's best TFLOPS over the shapes that it could do, and how many it won; the most winning first."""
    rates: dict[str, list[float]] = {b: [] for b in measured.backends}
    won = dict.fromkeys(rates, 0)
    for shape, tried in measured.tried.items():
        flops = measured.flops(shape)
        for backend, us in tried.best.items():
            rates[backend].append(flops / us / 1e6)
    for w in measured.winners.values():
        won[w.backend] += 1
    out = [{"name": b, "label": label(b), "won": won[b], **five_numbers(xs)} for b, xs in rates.items()]
    return sorted(out, key=lambda b: (-b["won"], -b["n"], b["name"]))
