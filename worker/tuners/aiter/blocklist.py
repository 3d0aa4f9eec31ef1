"""Candidates that a process does not measure: those that ended one before, and in a recheck all but a table's kernels.

A node keeps a list of candidates that ended their process. A fault is evidence about a candidate on one slot with one
image and driver. So an entry is used by that slot alone, until EXPIRES_S after it. One that a second slot confirmed is
used by all slots of that image and driver; one that was refuted (the candidate ran elsewhere) is taken back. The file
is one JSON object a line, append-only: an entry, or a verdict on earlier entries (`refuted`, `confirmed`).
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from worker.aiter_tree.kernel_lists import PLACES, KernelLists
from worker.device import Gauge, text_of
from worker.protocol import BlocklistVerdict, Spec, TableKernel, Withheld
from worker.protocol.spec import BAD_ENDS
from worker.text import clean
from worker.tuners.base import Place

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
    """A candidate that ended its process on a slot that proved healthy after it."""

    where: SlotIdentity
    family: str
    candidate: CandidateId
    outcome: str
    detail: str
    t: float
    confirmed: bool = False

    def as_json(self) -> dict[str, Any]:
        """A line of the list."""
        return {
            "t": round(self.t, 3),
            "slot": self.where.slot,
            "image": self.where.image,
            "driver": self.where.driver,
            "family": self.family,
            **self.candidate.as_json(),
            "named": self.candidate.describe(),
            "outcome": self.outcome,
            "detail": clean(self.detail, 500),
            "confirmed": self.confirmed,
        }

    def withheld(self, source: str) -> Withheld:
        """Entry of the list in a record of a shape's end."""
        return Withheld(
            key=list(self.candidate.key),
            candidate=list(self.candidate.ident),
            name=self.candidate.describe(),
            outcome=self.outcome if self.outcome in BAD_ENDS else "fault",
            detail=self.detail,
            t=round(self.t, 3),
            slot=self.where.slot,
            image=self.where.image,
            driver=self.where.driver,
            source=source,
            confirmed=self.confirmed,
        )

    def used_by(self, where: SlotIdentity, now: float) -> bool:
        """True if a slot leaves the candidate out on this evidence."""
        if (self.where.image, self.where.driver) != (where.image, where.driver):
            return False
        return self.confirmed or (self.where.slot == where.slot and now - self.t < EXPIRES_S)


def current_entries(path: Path) -> list[BlocklistEntry]:
    """The entries of a list that stand, each candidate of a slot once; a broken line is passed over."""
    try:
        with open(path, "rb") as f:
            lines = f.read(MAX_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
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
            where = SlotIdentity(str(raw.get("slot", "")), str(raw["image"]), str(raw.get("driver", "")))
            known, outcome, detail = at in out and out[at].confirmed, str(raw["outcome"]), str(raw["detail"])
            confirmed = known or raw.get("confirmed") is True
            out[at] = BlocklistEntry(where, at[0], candidate, outcome, detail, float(raw["t"]), confirmed)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return list(out.values())


def is_number(text: str) -> bool:
    """True for a whole number."""
    return text.lstrip("-").isdigit()


MAX_FAULTS = 40
"""Candidates of one shape that may kill their process in one attempt. Each costs a start of AITER; the slot proves
itself after each."""


class Blocklist:
    """The list of one image and chip, as one slot uses it."""

    def __init__(self, path: Path, where: SlotIdentity) -> None:
        self._path = path
        self.where = where

    def in_force(self, family: str) -> dict[CandidateId, BlocklistEntry]:
        """Candidates of the family that this slot leaves out, and on what evidence."""
        now = time.time()
        found = (e for e in current_entries(self._path) if e.family == family and e.used_by(self.where, now))
        return {e.candidate: e for e in found}

    def judge(self, refuted: Sequence[BlocklistVerdict], confirmed: Sequence[BlocklistVerdict]) -> None:
        """Take back what ran elsewhere, and mark what faulted on a second slot too."""
        for kind, verdicts in (("refuted", refuted), ("confirmed", confirmed)):
            for v in verdicts:
                named = {"family": v["family"], "key": v["key"], "candidate": v["candidate"]}
                self.append({"t": round(time.time(), 3), "word": kind, **named, "slot": v.get("slot", self.where.slot)})

    def append(self, line: Mapping[str, Any]) -> None:
        """One line, whole."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, json.dumps(line).encode() + b"\n")
        finally:
            os.close(fd)


def slot_identity(place: Place, image: str) -> SlotIdentity:
    """This slot; without a stable id of its GPU by its node's name and its number."""
    found = str(Gauge(os.environ).read().get("id", ""))
    return SlotIdentity(found or f"{place.node or socket.gethostname()}/{place.slot}", image, driver_version())


def driver_version() -> str:
    """The version of AMD's driver; of one that is part of Linux, Linux's."""
    return f"amdgpu {text_of(Path('/sys/module/amdgpu/version')) or f'of Linux {platform.release()}'}"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Candidates that are not measured. `reproductions`: of those that ended a process of this attempt. `only`: shapes
    of which only some candidates are measured (chosen_candidates)."""

    entries: Mapping[CandidateId, BlocklistEntry] = field(default_factory=dict)
    reproductions: Mapping[CandidateId, str] = field(default_factory=dict)
    only: Sequence[Mapping[str, Any]] = ()

    def and_(self, entry: BlocklistEntry, reproduction: str) -> LeftOut:
        """Copy with one more candidate, which ended a process just now."""
        return replace(
            self,
            entries={**self.entries, entry.candidate: entry},
            reproductions={**self.reproductions, entry.candidate: reproduction},
        )

    def why(self, candidate: CandidateId) -> str:
        """The reason, for its row; "" if it is not left out."""
        entry = self.entries.get(candidate)
        if entry is None:
            return ""
        if candidate in self.reproductions:
            again = self.reproductions[candidate]
            return f"{entry.outcome}: {entry.detail}; to see it again: {again} (docs/explanation/aiter.md)"
        where = "on two slots" if entry.confirmed else "on this slot"
        return f"left out: {entry.outcome} {where} with this image before ({entry.detail})"

    def withheld(self, candidate: CandidateId) -> Withheld | None:
        """Its entry in the record of its shape's end; None if it is not left out."""
        entry = self.entries.get(candidate)
        if entry is None:
            return None
        return entry.withheld("attempt" if candidate in self.reproductions else "blocklist")

    def write(self, path: Path) -> None:
        """The file that the shim reads."""
        lines = [*(c.as_json() for c in self.entries), *self.only]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def chosen_candidates(lists: KernelLists, gfx: str, spec: Spec) -> list[dict[str, Any]]:
    """Entry of each shape of which only some kernels are to be measured, as the shim reads it, with the numbers of its
    key (`sizes`). Kernels of a table, maybe of another image, are named as this image's tuner knows them: CK's have no
    name there, only a number, and numbers move from version to version.
    """

    def here(kernel: TableKernel) -> dict[str, Any]:
        place, numbers = (spec.family, kernel.libtype), list[str]()
        if place in PLACES or kernel.libtype == "hipblaslt":  # the tuners name all other candidates
            found = lists.instances(*place, gfx) if place in PLACES else None
            by_id = found.by_id if found is not None else {}
            numbers = [str(n) for n, name in by_id.items() if name == kernel.name] if by_id else [kernel.number]
        return {"libtype": kernel.libtype, "numbers": numbers, "name": kernel.name, "split": kernel.split}

    return [
        {"sizes": [str(v) for v in s.key.values() if isinstance(v, int)], "only": list(map(here, only))}
        for s in spec.shapes
        if (only := spec.only_of(s.id)) is not None
    ]
