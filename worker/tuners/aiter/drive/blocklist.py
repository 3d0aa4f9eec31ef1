"""The node's list of candidates that ended their process: evidence of one slot, for a week, unless another saw it too.

A fault is evidence about a candidate on one slot with one image and driver. So an entry is used by that slot alone,
until EXPIRES_S after it; one that a second slot confirmed is used by all slots of that image and driver; one that was
refuted (the candidate ran elsewhere) is taken back. The file is one JSON object a line, only ever added to: an entry,
or a word about earlier entries (`refuted`, `confirmed`). The controller reads it too (`gemmfleet nodes blocklist`).
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from worker.device.health import Gauge
from worker.protocol import BAD_ENDS, Verdict, Withheld
from worker.text import clean
from worker.tuners.aiter.drive.watch import Candidate
from worker.tuners.base import Place

EXPIRES_S = 7 * 24 * 3600.0
MAX_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Where:
    """`slot`: the GPU's stable id, else node and slot. `image`: its digest, else its key. `driver`: "" if unknown."""

    slot: str
    image: str
    driver: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """A candidate that ended its process. `canary`: the slot proved healthy after it; without that nothing is used."""

    where: Where
    family: str
    candidate: Candidate
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
        """As a record of a shape's end lists it."""
        return Withheld(
            key=list(self.candidate.key), candidate=list(self.candidate.ident), name=self.candidate.describe(),
            outcome=self.outcome if self.outcome in BAD_ENDS else "fault", detail=self.detail, t=round(self.t, 3),
            slot=self.where.slot, image=self.where.image, driver=self.where.driver, source=source,
            confirmed=self.confirmed,
        )  # fmt: skip

    def used_by(self, where: Where, now: float) -> bool:
        """Whether a slot leaves the candidate out on this evidence."""
        if not self.canary or (self.where.image, self.where.driver) != (where.image, where.driver):
            return False
        return self.confirmed or (self.where.slot == where.slot and now - self.t < EXPIRES_S)


class Blocklist:
    """The list of one image and chip, as one slot uses it."""

    def __init__(self, path: Path, where: Where) -> None:
        self._path = path
        self.where = where

    def in_force(self, family: str) -> dict[Candidate, Entry]:
        """Candidates of the family that this slot leaves out, and on what evidence."""
        now = time.time()
        found = (e for e in fold(read(self._path)) if e.family == family and e.used_by(self.where, now))
        return {e.candidate: e for e in found}

    def note(self, entry: Entry) -> None:
        self._append(entry.as_json())

    def judge(self, refuted: Sequence[Verdict], confirmed: Sequence[Verdict]) -> None:
        """Take back what ran elsewhere, and mark what faulted on a second slot too."""
        for kind, verdicts in (("refuted", refuted), ("confirmed", confirmed)):
            for v in verdicts:
                said = {"family": v["family"], "key": v["key"], "candidate": v["candidate"]}
                self._append({"t": round(time.time(), 3), "word": kind, **said, "slot": v.get("slot", self.where.slot)})

    def _append(self, line: Mapping[str, Any]) -> None:
        """One line, whole."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, json.dumps(line).encode() + b"\n")
        finally:
            os.close(fd)


def read(path: Path) -> list[str]:
    """The lines of a list; none where there is no file."""
    try:
        with open(path, "rb") as f:
            return f.read(MAX_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []


def fold(lines: Iterable[str]) -> list[Entry]:
    """The entries that stand, each candidate of a slot once; a broken line is passed over."""
    out: dict[tuple[str, Candidate, str], Entry] = {}
    for line in lines:
        try:
            raw = json.loads(line)
            candidate = Candidate(tuple(map(str, raw["key"])), tuple(map(str, raw["candidate"])))
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


def _entry(raw: Mapping[str, Any], candidate: Candidate) -> Entry:
    where = Where(str(raw.get("slot", "")), str(raw["image"]), str(raw.get("driver", "")))
    return Entry(
        where, str(raw["family"]), candidate, str(raw["outcome"]), str(raw["detail"]), raw["canary"] is True,
        float(raw["t"]), str(raw.get("gfx", "")), raw.get("confirmed") is True,
    )  # fmt: skip


# --- where this slot is -------------------------------------------------------------------------------------------


def here(place: Place, image: str) -> Where:
    """This slot. Without a stable id of its GPU it is its node's name and number."""
    found = str(Gauge(os.environ).read().get("id", ""))
    return Where(found or f"{place.node or socket.gethostname()}/{place.slot}", image, driver())


def driver(root: Path = Path("/")) -> str:
    """The GPU driver's version; of one that is part of Linux, Linux's."""
    for name, path in (("amdgpu", "sys/module/amdgpu"), ("nvidia", "sys/module/nvidia")):
        folder = root / path
        if folder.is_dir():
            try:
                return f"{name} {(folder / 'version').read_text().strip()}"
            except OSError:
                return f"{name} of Linux {platform.release()}"
    try:
        found = re.search(r"Module\s+([\d.]+)", (root / "proc/driver/nvidia/version").read_text())
    except OSError:
        return ""
    return f"nvidia {found[1]}" if found else "nvidia"
