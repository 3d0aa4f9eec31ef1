"""The list of candidates that ended their process on this node, kept for later runs.

A fault is evidence about a candidate on one slot with one image and driver. So an entry is used by that slot alone,
until EXPIRES_S after it. If a second slot confirmed it, all slots with that image and driver use it. If it was refuted
(the candidate ran elsewhere), it is taken back. choice.py makes of the list what one process does not measure.

The file has one JSON object a line and is append-only: an entry, or a verdict on earlier entries.

    {"t": 1800000000.0, "slot": "0xabc", "image": "sha256:1", "driver": "amdgpu 6.14", "family": "a8w8",
     "key": ["256", "1", "2", "3"], "candidate": ["4", "0", ""], "named": "kernelId=4 splitK=0", "outcome": "fault",
     "detail": "Memory access fault ...", "confirmed": false}
    {"t": 1800000100.0, "word": "refuted", "family": "a8w8", "key": [...], "candidate": [...], "slot": "0xabc"}
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from worker.conditions import Gauge
from worker.device import text_of
from worker.protocol import BlockedRecord, BlockedVerdict
from worker.protocol.candidates import BAD_ENDS
from worker.text import clean
from worker.tuners.base import Place

EXPIRES_S = 7 * 24 * 3600.0
MAX_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class CandidateId:
    """One candidate of one shape as the shim names it; equal in every process of an image."""

    key: tuple[str, ...]
    """The values of the shape's key as AITER has them, behind gfx and cu_num: ("gfx950", "256", "16", "512", "1024")"""
    ident: tuple[str, ...]
    """AITER's words for the candidate: ("3", "0", "") is kernelId and splitK, the kernel's name follows if it has one;
    of fmoe ("stage1", "_ZN5aiter...", "32")."""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> CandidateId:
        """Of a record or an entry with `key` and `candidate`. Raises KeyError, TypeError."""
        return cls(tuple(map(str, raw["key"])), tuple(map(str, raw["candidate"])))

    @property
    def stage(self) -> str:
        """Stage of fmoe: stage1, stage2, asm_1stage (both in one kernel); "" of other families."""
        return self.ident[0] if self.ident and self.ident[0].startswith(("stage", "asm_1stage")) else ""

    @property
    def numbers(self) -> list[str]:
        """kernelId and splitK; of fmoe block_m and flat."""
        return [word for word in self.ident if is_whole_number(word)]

    @property
    def words(self) -> list[str]:
        """The other words but truth values: the stage, the kernel's name, the backend."""
        return [word for word in self.ident if word not in ("", "True", "False") and not is_whole_number(word)]

    def as_json(self) -> dict[str, list[str]]:
        """The entry of the file that the shim reads."""
        return {"key": list(self.key), "candidate": list(self.ident)}

    def describe(self) -> str:
        """Text for people: `kernelId=3 splitK=0 a4w4_blockscale_...`; of fmoe `block_m=32 stage1 _ZN5aiter...`."""
        names = ("block_m", "flat") if self.stage else ("kernelId", "splitK")
        named = [f"{name}={number}" for name, number in zip(names, self.numbers, strict=False)]
        return " ".join([*named, *self.words]) or "unnamed"


def is_whole_number(text: str) -> bool:
    return text.lstrip("-").isdigit()


@dataclass(frozen=True, slots=True)
class SlotIdentity:
    """The place where a candidate was measured. Evidence counts only for the same image and driver."""

    slot: str
    """The GPU's stable id, else node and slot."""
    image: str
    """The image's digest, else its key (AiterImage.key)."""
    driver: str = ""
    """"" if unknown."""


@dataclass(frozen=True, slots=True)
class BlockedEntry:
    """A candidate that ended its process on a slot that proved healthy after it."""

    where: SlotIdentity
    family: str
    candidate: CandidateId
    outcome: str
    """The end of its process: fault, hang or oom."""
    detail: str
    t: float
    """Seconds since 1970."""
    confirmed: bool = False
    """True if it faulted on a second slot too."""

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

    def to_record(self, source: str) -> BlockedRecord:
        """The entry in the record of a shape's end. `source`: `attempt` if it faulted in it, `blocklist` if before."""
        return BlockedRecord(
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


def current_entries(path: Path) -> list[BlockedEntry]:
    """The entries of a list that stand, each candidate of a slot once; a broken line is passed over."""
    entries: dict[tuple[str, CandidateId, str], BlockedEntry] = {}
    for raw in _lines(path):
        try:
            candidate = CandidateId.parse(raw)
            place = (str(raw["family"]), candidate, str(raw.get("slot", "")))
            if raw.get("word") == "refuted":
                entries.pop(place, None)
            elif "word" not in raw:
                entries[place] = _parse_entry(raw, candidate, entries.get(place))
            elif place in entries:
                entries[place] = replace(entries[place], confirmed=True)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return list(entries.values())


def _lines(path: Path) -> Iterator[Any]:
    try:
        with open(path, "rb") as f:
            lines = f.read(MAX_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _parse_entry(raw: Mapping[str, Any], candidate: CandidateId, earlier: BlockedEntry | None) -> BlockedEntry:
    """A later fault of a confirmed candidate takes nothing back."""
    return BlockedEntry(
        where=SlotIdentity(str(raw.get("slot", "")), str(raw["image"]), str(raw.get("driver", ""))),
        family=str(raw["family"]),
        candidate=candidate,
        outcome=str(raw["outcome"]),
        detail=str(raw["detail"]),
        t=float(raw["t"]),
        confirmed=raw.get("confirmed") is True or (earlier is not None and earlier.confirmed),
    )


class BlockedCandidates:
    """The list of one image and chip, as one slot uses it."""

    def __init__(self, path: Path, where: SlotIdentity) -> None:
        self._path = path
        self.where = where

    def in_force(self, family: str) -> dict[CandidateId, BlockedEntry]:
        """Candidates of the family that this slot leaves out, and on what evidence."""
        now = time.time()
        blocked = {}
        for entry in current_entries(self._path):
            if entry.family == family and entry.used_by(self.where, now):
                blocked[entry.candidate] = entry
        return blocked

    def take_verdicts(self, refuted: Sequence[BlockedVerdict], confirmed: Sequence[BlockedVerdict]) -> None:
        """Take back what ran elsewhere, and mark what faulted on a second slot too."""
        for verdict in refuted:
            self._append_verdict("refuted", verdict)
        for verdict in confirmed:
            self._append_verdict("confirmed", verdict)

    def _append_verdict(self, word: str, verdict: BlockedVerdict) -> None:
        self.append(
            {
                "t": round(time.time(), 3),
                "word": word,
                "family": verdict["family"],
                "key": verdict["key"],
                "candidate": verdict["candidate"],
                "slot": verdict.get("slot", self.where.slot),
            }
        )

    def append(self, line: Mapping[str, Any]) -> None:
        """Append one line, whole: the list may be read at the same time."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, json.dumps(line).encode() + b"\n")
        finally:
            os.close(fd)


def slot_identity(place: Place, image: str) -> SlotIdentity:
    """This slot; without a stable id of its GPU by its node's name and its number."""
    gpu_id = str(Gauge(os.environ).read().get("id", ""))
    slot = gpu_id or f"{place.node or socket.gethostname()}/{place.slot}"
    return SlotIdentity(slot, image, driver_version())


def driver_version() -> str:
    """The version of AMD's driver; of one that is part of Linux, Linux's."""
    return f"amdgpu {text_of(Path('/sys/module/amdgpu/version')) or f'of Linux {platform.release()}'}"
