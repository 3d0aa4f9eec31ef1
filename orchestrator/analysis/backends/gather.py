"""Rows of the queries gathered by device and shape."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

from orchestrator.analysis.backends.query import REASONS, TFLOPS_OFF
from orchestrator.analysis.backends.table import COUNTED, Best, Device, Key, ShapeBest, Wrong, counted, key_text
from orchestrator.ledger.clean import text as clean
from orchestrator.tables.backends import order
from orchestrator.tables.tuned import GFX_OF_CU_NUM
from worker.families import Family
from worker.text import plural

UNNAMED: Device = ("", None)


class Book:
    """What the queries gave, by device and key."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.shapes: dict[tuple[Device, Key], ShapeBest] = {}
        self.no_shape = 0
        self._counts: defaultdict[str, list[int]] = defaultdict(lambda: [0] * len(COUNTED))
        self.rows: Counter[str] = Counter()
        self._width = len(family.columns)
        self._texts = [(i, {v.lower(): v for v in c.legal}) for i, c in enumerate(family.columns) if c.kind == "text"]
        self._odd: list[tuple[str, float, float]] = []
        self._odd_count = 0
        self._flops = flops_of(family)

    def add(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Rows of query.best_rows. One long loop: there are tens of thousands of them, and a call costs as much."""
        w, shapes, texts, flops = 3 + self._width, self.shapes, self._texts, self._flops
        told: tuple[Any, ...] = ()
        device = UNNAMED
        for row in rows:
            backend, n, no_time, infinite, wrong, worst, wrong_us, listed, us, turn, kernel, tflops, err = row[w:]
            self.rows[row[0]] += n
            if row[3] is None:
                self.no_shape += n
                continue
            key: Key = self._spelled(row[3:w]) if texts else row[3:w]
            if told != row[1:3]:
                told = row[1:3]
                device = self._device(*told)
            at = (device, key)
            shape = shapes.get(at)
            if shape is None:
                shape = shapes[at] = ShapeBest(device, key)
            if no_time or infinite or wrong:
                counts, total = shape.counts, self._counts[backend]
                counts[0] += no_time
                counts[1] += infinite
                counts[2] += wrong
                total[0] += no_time
                total[1] += infinite
                total[2] += wrong
                if wrong:
                    shape.beyond(worst, wrong_us, [_wrong(r) for r in listed or ()])
            if us is None:
                continue
            old = shape.best.get(backend)
            if old is None or turn < old.turn:
                name = kernel or ""
                name = name if name.isprintable() else clean(name)
                shape.best[backend] = best = Best(backend, us, flops(key) / us / 1e6, name, err, turn)
                if tflops is not None:
                    self._compare(shape, best, tflops)

    def _spelled(self, key: Key) -> Key:
        """The key with its texts as the family spells them."""
        cells = list(key)
        for i, legal in self._texts:
            cell = str(cells[i])
            cells[i] = legal.get(cell.lower()) or clean(cell, 60)
        return tuple(cells)

    def _device(self, gfx: str | None, cu_num: int | None) -> Device:
        return (clean(gfx, 40) if gfx else GFX_OF_CU_NUM.get(cu_num or 0, ""), cu_num)

    @property
    def backends(self) -> set[str]:
        """Those that have a valid row somewhere."""
        return set().union(*(s.best for s in self.shapes.values()))

    def left_out_of(self) -> dict[str, dict[str, int]]:
        """Rows left out by backend and reason."""
        return {b: counted(self._counts[b]) for b in sorted(self._counts, key=order)}

    def left_out(self) -> dict[str, int]:
        """Rows left out by reason, lines that were no rows besides."""
        sums = [sum(column) for column in zip(*self._counts.values(), strict=True)] or [0] * len(COUNTED)
        total = Counter(dict(zip(COUNTED, sums, strict=True))) + Counter({"no_shape": self.no_shape})
        return {reason: total[reason] for reason in REASONS}

    def _compare(self, shape: ShapeBest, best: Best, tflops: str) -> None:
        """Note a best row whose tflops column is not what its shape and time give."""
        if _differs(best.tflops, tflops):
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
            notes.append(f"{plural(len(homeless), 'shape')} without a named device: kept apart from {names}")
            return
        (device,) = known
        for at in homeless:
            stray = self.shapes.pop(at)
            self.shapes.setdefault((device, at[1]), ShapeBest(device, at[1])).take(stray)
        notes.append(f"{plural(len(homeless), 'shape')} came without gfx and cu_num: taken as {device_text(device)}")

    def tflops_notes(self) -> Iterable[str]:
        """What to say of tflops columns that are not 2*M*N*K / us."""
        if self._odd_count:
            shape, column, made = self._odd[0]
            yield (
                f"{self._odd_count} best rows have a tflops column more than {TFLOPS_OFF:.0%} off what their shape and"
                f" us give (as {shape}: {column:g} there, {made:.4g} computed): the computed one counts"
            )


def _wrong(row: dict[str, Any]) -> Wrong:
    return Wrong(row["b"], clean(row["k"] or "", 300), row["e"], row["u"])


def flops_of(family: Family) -> Callable[[Key], float]:
    """`Family.flops` of a key as a tuple; without a dictionary a shape where the family is a plain product."""
    names = family.key_names
    if family.m_column != "M":
        return lambda key: family.flops(dict(zip(names, key, strict=True)))
    sizes: Callable[[Key], tuple[Any, ...]] = itemgetter(*(names.index(c) for c in ("M", "N", "K")))
    b = names.index("B") if "B" in names else None

    def flops(key: Key) -> float:
        m, n, k = sizes(key)
        return float(2 * m * n * k)

    return flops if b is None else lambda key: flops(key) * int(key[b])


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
