"""Rows of the queries gathered by device and shape."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from orchestrator.analysis.backends import order
from orchestrator.analysis.query import REASONS, TFLOPS_OFF
from orchestrator.analysis.table import COUNTED, Best, Device, Key, ShapeBest, counted, key_text
from orchestrator.families import Family
from orchestrator.ledger.clean import text as clean
from orchestrator.results.table import GFX_OF_CU_NUM

UNNAMED: Device = ("", None)


class Book:
    """What the queries gave, by device and key."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.shapes: dict[tuple[Device, Key], ShapeBest] = {}
        self.no_shape = 0
        self._counts: defaultdict[str, list[int]] = defaultdict(lambda: [0] * len(COUNTED))
        self._devices: dict[tuple[str | None, int | None], Device] = {}
        self.rows: Counter[str] = Counter()
        self._width = len(family.columns)
        self._texts = [(i, {v.lower(): v for v in c.legal}) for i, c in enumerate(family.columns) if c.kind == "text"]
        self._odd: list[tuple[str, float, float]] = []
        self._odd_count = 0
        self._flops = flops_of(family)

    def add(self, row: Sequence[Any]) -> None:
        """A row of query.best_rows."""
        w = self._width
        n: int = row[4 + w]
        self.rows[row[0]] += n
        if row[3] is None:
            self.no_shape += n
            return
        key: Key = tuple(row[3 : 3 + w])
        if self._texts:
            cells = list(key)
            for i, legal in self._texts:
                cell = str(cells[i])
                cells[i] = legal.get(cell.lower()) or clean(cell, 60)
            key = tuple(cells)
        told = (row[1], row[2])
        device = self._devices.get(told)
        if device is None:
            gfx, cu_num = told
            device = self._devices[told] = (clean(gfx, 40) if gfx else GFX_OF_CU_NUM.get(cu_num, ""), cu_num)
        at = (device, key)
        shape = self.shapes.get(at)
        if shape is None:
            shape = self.shapes[at] = ShapeBest(device, key)
        backend, no_time, infinite, wrong, worst, wrong_us, us, turn, kernel, tflops, err = (row[3 + w], *row[5 + w :])
        if no_time or infinite or wrong:
            for counts in (shape.counts, self._counts[backend]):
                counts[0] += no_time
                counts[1] += infinite
                counts[2] += wrong
            if wrong:
                shape.beyond(worst, wrong_us)
        if us is not None:
            name = kernel or ""
            name = name if name.isprintable() else clean(name)
            self._offer(shape, Best(backend, us, self._flops(key) / us / 1e6, name, err, turn), tflops)

    def left_out_of(self) -> dict[str, dict[str, int]]:
        """Rows left out by backend and reason."""
        return {b: counted(self._counts[b]) for b in sorted(self._counts, key=order)}

    def left_out(self) -> dict[str, int]:
        """Rows left out by reason, lines that were no rows besides."""
        sums = [sum(column) for column in zip(*self._counts.values(), strict=True)] or [0] * len(COUNTED)
        total = Counter(dict(zip(COUNTED, sums, strict=True))) + Counter({"no_shape": self.no_shape})
        return {reason: total[reason] for reason in REASONS}

    def _offer(self, shape: ShapeBest, best: Best, tflops: str | None) -> None:
        old = shape.best.get(best.backend)
        if old is not None and old.turn <= best.turn:
            return
        shape.best[best.backend] = best
        if tflops is not None and _differs(best.tflops, tflops):
            self._odd_count += 1
            if len(self._odd) < 3:
                self._odd.append((key_text(self.family, shape.key), float(tflops), best.tflops))

    def ask(self, keys: Iterable[Key]) -> None:
        """Shapes that should be there, on whatever device; what nothing was measured of gets an empty row."""
        there = {key for _, key in self.shapes}
        devices = {device for device, _ in self.shapes}
        device = devices.pop() if len(devices) == 1 else UNNAMED
        for key in keys:
            if key not in there:
                self.shapes[device, key] = ShapeBest(device, key)

    def adopt_unknown_device(self, notes: list[str]) -> None:
        """Rows without gfx and cu_num belong to the one device that there is."""
        known = {d for d, _ in self.shapes} - {UNNAMED}
        homeless = [at for at in self.shapes if at[0] == UNNAMED]
        if not known or not homeless:
            return
        if len(known) > 1:
            names = ", ".join(device_text(d) for d in sorted(known, key=str))
            notes.append(f"{len(homeless)} shapes are of a device that is not named: kept apart from {names}")
            return
        (device,) = known
        for at in homeless:
            stray = self.shapes.pop(at)
            self.shapes.setdefault((device, at[1]), ShapeBest(device, at[1])).take(stray)
        notes.append(f"{len(homeless)} shapes came without gfx and cu_num: taken as {device_text(device)}")

    def tflops_notes(self) -> Iterable[str]:
        """What to say of tflops columns that are not 2*M*N*K / us."""
        if self._odd_count:
            shape, column, made = self._odd[0]
            yield (
                f"{self._odd_count} best rows have a tflops column more than {TFLOPS_OFF:.0%} off what their shape and"
                f" us give (as {shape}: {column:g} there, {made:.4g} computed): the computed one counts"
            )


def flops_of(family: Family) -> Callable[[Key], float]:
    """`Family.flops` of a key as a tuple; without a dictionary a shape where the family is a plain product."""
    names = family.key_names
    if family.m_column != "M":
        return lambda key: family.flops(dict(zip(names, key, strict=True)))
    m, n, k = (names.index(c) for c in ("M", "N", "K"))
    b = names.index("B") if "B" in names else None
    if b is None:
        return lambda key: 2.0 * int(key[m]) * int(key[n]) * int(key[k])
    return lambda key: 2.0 * int(key[b]) * int(key[m]) * int(key[n]) * int(key[k])


def device_text(device: Device) -> str:
    """`gfx950 with 256 CUs`."""
    gfx, cu_num = device
    return f"{gfx or 'unknown chip'}{f' with {cu_num} CUs' if cu_num else ''}"


def _differs(made: float, column: str) -> bool:
    """Beyond TFLOPS_OFF and beyond the rounding of the last printed digit."""
    try:
        value = float(column)
    except ValueError:
        return False
    last = 0.5 * 10.0 ** -len(column.partition(".")[2])
    return abs(value - made) > max(TFLOPS_OFF * made, last)
