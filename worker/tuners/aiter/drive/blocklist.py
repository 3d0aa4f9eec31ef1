"""Candidates that ended their process: the node's list of them, what a process leaves out, how to reproduce a fault.

A fault is evidence about a candidate on one slot with one image and driver. So an entry is used by that slot alone,
until EXPIRES_S after it; one that a second slot confirmed is used by all slots of that image and driver; one that was
refuted (the candidate ran elsewhere) is taken back. The file is one JSON object a line, append-only: an entry, or a
verdict on earlier entries (`refuted`, `confirmed`). The controller reads it too (`gemmfleet nodes blocklist`).
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from worker.device.health import Gauge
from worker.protocol import BAD_ENDS, BlocklistVerdict, Withheld
from worker.text import clean
from worker.tuners.aiter.drive.command import ProcessFiles
from worker.tuners.aiter.drive.environment import CLEARED, SWITCHES
from worker.tuners.aiter.drive.progress import CandidateId
from worker.tuners.base import Place

EXPIRES_S = 7 * 24 * 3600.0
MAX_BYTES = 16 * 1024 * 1024

MAX_FAULTS = 40
"""Candidates of one shape that may kill their process in one attempt. Each costs a start of AITER; the slot proves
itself after each."""
REPRO = "repro"
"""Below an attempt's folder, where the controller looks for it."""
REPRO_TIMEOUT_S = 120
_SHOWN_ENV = (
    "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "AITER_JIT_DIR", "GPU_ARCHS",
    "CU_NUM",
)  # fmt: skip


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


class Blocklist:
    """The list of one image and chip, as one slot uses it."""

    def __init__(self, path: Path, where: SlotIdentity) -> None:
        self._path = path
        self.where = where

    def in_force(self, family: str) -> dict[CandidateId, BlocklistEntry]:
        """Candidates of the family that this slot leaves out, and on what evidence."""
        now = time.time()
        found = (
            e for e in current_entries(read_lines(self._path)) if e.family == family and e.used_by(self.where, now)
        )
        return {e.candidate: e for e in found}

    def note(self, entry: BlocklistEntry) -> None:
        self._append(entry.as_json())

    def judge(self, refuted: Sequence[BlocklistVerdict], confirmed: Sequence[BlocklistVerdict]) -> None:
        """Take back what ran elsewhere, and mark what faulted on a second slot too."""
        for kind, verdicts in (("refuted", refuted), ("confirmed", confirmed)):
            for v in verdicts:
                named = {"family": v["family"], "key": v["key"], "candidate": v["candidate"]}
                self._append(
                    {"t": round(time.time(), 3), "word": kind, **named, "slot": v.get("slot", self.where.slot)}
                )

    def _append(self, line: Mapping[str, Any]) -> None:
        """One line, whole."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, json.dumps(line).encode() + b"\n")
        finally:
            os.close(fd)


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


# --- where this slot is -------------------------------------------------------------------------------------------


def slot_identity(place: Place, image: str) -> SlotIdentity:
    """This slot; without a stable id of its GPU by its node's name and its number."""
    found = str(Gauge(os.environ).read().get("id", ""))
    return SlotIdentity(found or f"{place.node or socket.gethostname()}/{place.slot}", image, driver_version())


def driver_version(root: Path = Path("/")) -> str:
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


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Candidates that are not measured. `only`: the requested identities, None for all."""

    entries: Mapping[CandidateId, BlocklistEntry] = field(default_factory=dict)
    reproductions: Mapping[CandidateId, str] = field(default_factory=dict)
    """Reproductions of those that ended a process of this attempt."""
    only: frozenset[tuple[str, ...]] | None = None

    def and_(self, entry: BlocklistEntry, reproduction: str) -> LeftOut:
        """With one more candidate, which ended a process just now."""
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
        lines: list[Any] = [c.as_json() for c in self.entries]
        lines += [] if self.only is None else [{"only": sorted(map(list, self.only))}]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_repro(
    folder: Path, files: ProcessFiles, argv: Sequence[str], env: Mapping[str, str], cwd: Path, entry: BlocklistEntry
) -> Path:
    """A folder with the one-row CSV and the command that shows the fault; its path.

    The command is AITER's own, without anything of ours: it measures all candidates of the shape and meets the one.
    """
    name = "-".join([entry.family, *entry.candidate.key[-4:], *entry.candidate.ident[:2]])
    target = folder / "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:120]
    target.mkdir(parents=True, exist_ok=True)
    (target / "untuned.csv").write_text(files.untuned.read_text())
    moved = {str(files.untuned): "untuned.csv", str(files.tuned): "tuned.csv", str(files.profile): "profile.csv"}
    switches = sorted(n for n in {*os.environ, *env} if CLEARED.fullmatch(n) or SWITCHES.fullmatch(n))
    shown = [n for n in dict.fromkeys((*_SHOWN_ENV, *switches)) if env.get(n)]
    words = [f'"$here/{moved[w]}"' if w in moved else shlex.quote(w) for w in _impatient(argv)]
    lines = [
        "#!/bin/sh",
        f"# {entry.outcome} of {entry.candidate.describe()} on {entry.gfx}, to be run in its image on its node:",
        f"# image {entry.where.image}, slot {entry.where.slot}, driver {entry.where.driver or 'unknown'}",
        *(f"# {line}" for line in clean(entry.detail, 500).splitlines()),
        "# where AITER waits for ever for a process that died, end it with Ctrl-C",
        'here=$(cd -- "$(dirname -- "$0")" && pwd) || exit 1',
        'rm -f -- "$here/tuned.csv" "$here/profile.csv"',
        f"cd -- {shlex.quote(str(cwd))} || exit 1",
        "export PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1",
        *(f"export {n}={shlex.quote(_without_ours(n, env[n]))}" for n in shown),
        *(f"unset {n}" for n in switches if n not in shown),
        "exec " + " ".join(words),
    ]
    script = target / "reproduce.sh"
    script.write_text("\n".join(lines) + "\n")
    script.chmod(0o700)
    return target


def _impatient(argv: Sequence[str]) -> list[str]:
    """The command with a limit that a person can wait for, where it has one."""
    words = list(argv)
    if "--timeout" in words:
        words[words.index("--timeout") + 1] = str(REPRO_TIMEOUT_S)
    return words


def _without_ours(name: str, value: str) -> str:
    if name != "PYTHONPATH":
        return value
    return os.pathsep.join(p for p in value.split(os.pathsep) if not p.endswith("/shim"))
