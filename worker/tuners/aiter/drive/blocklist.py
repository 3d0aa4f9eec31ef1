"""Candidates that ended their process: a slot's use of the node's list, what is left out, reproductions of faults."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from worker.device.health import Gauge
from worker.protocol import BlocklistVerdict, Withheld
from worker.protocol.blocklist import BlocklistEntry, CandidateId, SlotIdentity, current_entries, read_lines
from worker.protocol.environment import AITER_CLEARED, AITER_SWITCHES
from worker.text import clean
from worker.tuners.aiter.drive.command import ProcessFiles
from worker.tuners.base import Place

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
    switches = sorted(n for n in {*os.environ, *env} if AITER_CLEARED.fullmatch(n) or AITER_SWITCHES.fullmatch(n))
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
