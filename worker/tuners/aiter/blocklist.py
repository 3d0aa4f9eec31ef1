"""Candidates that a process does not measure: those that ended one before (a slot's use of the node's list), and of
some shapes all but the requested ones."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from worker.aiter_tree.kernel_lists import PLACES, KernelLists
from worker.device import Gauge
from worker.protocol import BlocklistVerdict, Spec, TableKernel, Withheld
from worker.protocol.blocklist import BlocklistEntry, CandidateId, SlotIdentity, current_entries, read_lines
from worker.tuners.base import Place

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
    """Candidates that are not measured."""

    entries: Mapping[CandidateId, BlocklistEntry] = field(default_factory=dict)
    reproductions: Mapping[CandidateId, str] = field(default_factory=dict)
    """Reproductions of those that ended a process of this attempt."""
    only: Sequence[Mapping[str, Any]] = ()
    """Shapes of which only some candidates are measured (chosen_candidates)."""

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


def chosen_candidates(lists: KernelLists, gfx: str, spec: Spec) -> dict[int, dict[str, Any]]:
    """Entry of each shape of which only some candidates are to be measured, as the shim reads it. Kernels of a table,
    maybe of another image, are named as this image's tuner knows them: CK's have no name there, only a number, and
    numbers move from version to version.

    `sizes`: the numbers of its key, [] where identities are chosen: such a shape has a process of its own.
    """

    def here(kernel: TableKernel) -> dict[str, Any]:
        place, numbers = (spec.family, kernel.libtype), list[str]()
        if place in PLACES or kernel.libtype == "hipblaslt":  # the tuners name all other candidates
            found = lists.instances(*place, gfx) if place in PLACES else None
            by_id = found.by_id if found is not None else {}
            numbers = [str(n) for n, name in by_id.items() if name == kernel.name] if by_id else [kernel.number]
        return {"libtype": kernel.libtype, "numbers": numbers, "name": kernel.name, "split": kernel.split}

    out = {}
    for shape in spec.shapes:
        only = spec.only_of(shape.id)
        if only is not None:
            sizes = [] if only.identities else [str(v) for v in shape.key.values() if isinstance(v, int)]
            out[shape.id] = {"sizes": sizes, "only": [*map(list, only.identities), *map(here, only.kernels)]}
    return out
