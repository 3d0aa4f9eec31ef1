"""The roofline of a page: the chip that the winners were measured on, and where each shape stands under its roof.

Peaks, bytes and sources are those of `orchestrator.analysis.roofline`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.analysis.roofline import Chip, chip_of, roof_of
from orchestrator.shapes.sizes import element_type
from worker.families import Family

Key = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Roofs:
    """`chip` None: it is not known, or there are several; `note` says why."""

    family: Family
    chip: Chip | None
    note: str

    @classmethod
    def of(cls, family: Family, devices: Sequence[Mapping[str, Any]]) -> Roofs:
        """`devices`: what workers and tuners said of theirs: gfx, cu_num, device."""
        found = {(str(d.get("gfx", "")), d.get("cu_num")) for d in devices}
        if len(found) != 1:
            why = "There is no roof over different devices." if found else "No device is known yet."
            return cls(family, None, why)
        names = [str(d.get("device", "")) for d in devices]
        chip, note = chip_of(found.pop(), names)
        if chip is None:
            note = "No data sheet is known for this device, so there is no roof."
        return cls(family, chip, note.replace(" (--chip tells)", ""))

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
