"""A node's list of candidates that ended their process: its entries, and which of them stand.

A fault is evidence about a candidate on one slot with one image and driver. So an entry is used by that slot alone,
until EXPIRES_S after it; one that a second slot confirmed is used by all slots of that image and driver; one that was
refuted (the candidate ran elsewhere) is taken back. The file is one JSON object a line, append-only: an entry, or a
verdict on earlier entries (`refuted`, `confirmed`). The worker writes it, the controller shows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from worker.protocol.candidates import BAD_ENDS, Withheld
from worker.text import clean

EXPIRES_S = 7 * 24 * 3600.0
MAX_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class CandidateId:
    """One candidate of one shape as the journal names it; equal in every process of an image."""

    key: tuple[str, ...]
    ident: tuple[str, ...]

    @property
    def stage(self) -> str:
        """Stage of fmoe: stage1, stage2, asm_1stage (both in one kernel); "" of other families."""
        return self.ident[0] if self.ident and self.ident[0].startswith(("stage", "asm_1stage")) else ""

    def as_json(self) -> dict[str, list[str]]:
        """An entry of the file of blocked candidates."""
        return {"key": list(self.key), "candidate": list(self.ident)}

    def describe(self) -> str:
        """Text for people: `kernelId=3 splitK=0 a4w4_blockscale_...`; of fmoe `block_m=32 stage1 _ZN5aiter...`."""
        numbers = [v for v in self.ident if is_number(v)]
        words = [v for v in self.ident if v and not is_number(v) and v not in ("True", "False")]
        names = ("block_m", "flat") if self.stage else ("kernelId", "splitK")
        named = [f"{n}={v}" for n, v in zip(names, numbers, strict=False)]
        return " ".join([*named, *words]) or "unnamed"


@dataclass(frozen=True, slots=True)
class SlotIdentity:
    """`slot`: the GPU's stable id, else node and slot. `image`: its digest, else its key. `driver`: "" if unknown."""

    slot: str
    image: str
    driver: str = ""


@dataclass(frozen=True, slots=True)
class BlocklistEntry:
    """A candidate that ended its process. `canary`: the slot proved healthy after it; without that nothing is used."""

    where: SlotIdentity
    family: str
    candidate: CandidateId
    outcome: str
    detail: str
    canary: bool
    t: float
    gfx: str = ""
    confirmed: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            "t": round(self.t, 3), "slot": self.where.slot, "image": self.where.image, "driver": self.where.driver,
            "gfx": self.gfx, "family": self.family, **self.candidate.as_json(), "named": self.candidate.describe(),
            "outcome": self.outcome, "detail": clean(self.detail, 500), "canary": self.canary,
            "confirmed": self.confirmed,
        }  # fmt: skip

    def withheld(self, source: str) -> Withheld:
        """Entry of the list in a record of a shape's end."""
        return Withheld(
            key=list(self.candidate.key), candidate=list(self.candidate.ident), name=self.candidate.describe(),
            outcome=self.outcome if self.outcome in BAD_ENDS else "fault", detail=self.detail, t=round(self.t, 3),
            slot=self.where.slot, image=self.where.image, driver=self.where.driver, source=source,
            confirmed=self.confirmed,
        )  # fmt: skip

    def used_by(self, where: SlotIdentity, now: float) -> bool:
        """True if a slot leaves the candidate out on this evidence."""
        if not self.canary or (self.where.image, self.where.driver) != (where.image, where.driver):
            return False
        return self.confirmed or (self.where.slot == where.slot and now - self.t < EXPIRES_S)


def read_lines(path: Path) -> list[str]:
    """The lines of a list; none where there is no file."""
    try:
        with open(path, "rb") as f:
            return f.read(MAX_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []


def current_entries(lines: Iterable[str]) -> list[BlocklistEntry]:
    """The entries that stand, each candidate of a slot once; a broken line is passed over."""
    out: dict[tuple[str, CandidateId, str], BlocklistEntry] = {}
    for line in lines:
        try:
            raw = json.loads(line)
            candidate = CandidateId(tuple(map(str, raw["key"])), tuple(map(str, raw["candidate"])))
            at = (str(raw["family"]), candidate, str(raw.get("slot", "")))
            if "word" in raw:
                if raw["word"] == "refuted":
                    out.pop(at, None)
                elif at in out:
                    out[at] = replace(out[at], confirmed=True)
                continue
            entry = _entry(raw, candidate)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        known = out.pop(at, None)
        if known is not None:
            healthy = entry if entry.canary or not known.canary else known
            entry = replace(healthy, confirmed=entry.confirmed or known.confirmed)
        out[at] = entry
    return list(out.values())


def _entry(raw: Mapping[str, Any], candidate: CandidateId) -> BlocklistEntry:
    where = SlotIdentity(str(raw.get("slot", "")), str(raw["image"]), str(raw.get("driver", "")))
    return BlocklistEntry(
        where, str(raw["family"]), candidate, str(raw["outcome"]), str(raw["detail"]), raw["canary"] is True,
        float(raw["t"]), str(raw.get("gfx", "")), raw.get("confirmed") is True,
    )  # fmt: skip


def is_number(text: str) -> bool:
    """True for a whole number."""
    return text.lstrip("-").isdigit()
