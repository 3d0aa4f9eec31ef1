"""The candidates that one AITER process measures: all but the blocked ones; in a recheck only a table's kernels.

run.py writes the choice into the folder of the process (`CandidateChoice.write`), where the shim reads it, a JSON
object a line (shim/sitecustomize.py leaves the others out):

    {"key": ["gfx950", "256", "16", "512", "1024"], "candidate": ["3", "0", ""]}                   is not measured
    {"sizes": ["16", "512", "1024"], "only": [{"libtype": "ck", "numbers": ["3"], "name": "a4w4_...", "split": "0"}]}
                                                                           of this shape only these are measured
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from worker.aiter_tree.kernel_lists import PLACES, KernelLists
from worker.protocol import BlockedRecord, Spec, TableKernel
from worker.tuners.aiter.blocked import BlockedEntry, CandidateId

BLOCKED_BEFORE = "left out: "
"""The detail of a candidate's row begins so if it faulted in an earlier attempt."""


@dataclass(frozen=True, slots=True)
class CandidateChoice:
    """The candidates that a process does not measure, and why."""

    blocked: Mapping[CandidateId, BlockedEntry] = field(default_factory=dict)
    reproductions: Mapping[CandidateId, str] = field(default_factory=dict)
    """Path of the reproduction of each blocked candidate that ended a process of this attempt."""
    only: Sequence[Mapping[str, Any]] = ()
    """Shapes of which only some candidates are measured (chosen_candidates)."""

    def with_blocked(self, entry: BlockedEntry, reproduction: str) -> CandidateChoice:
        """The choice with one more blocked candidate, which ended a process just now."""
        return replace(
            self,
            blocked={**self.blocked, entry.candidate: entry},
            reproductions={**self.reproductions, entry.candidate: reproduction},
        )

    def why_blocked(self, candidate: CandidateId) -> str:
        """The detail of its row; "" if it is not blocked."""
        entry = self.blocked.get(candidate)
        if entry is None:
            return ""
        reproduction = self.reproductions.get(candidate)
        if reproduction is not None:
            return f"{entry.outcome}: {entry.detail}; to see it again: {reproduction} (docs/explanation/aiter.md)"
        where = "on two slots" if entry.confirmed else "on this slot"
        return f"{BLOCKED_BEFORE}{entry.outcome} {where} with this image before ({entry.detail})"

    def blocked_record(self, candidate: CandidateId) -> BlockedRecord | None:
        """Its entry in the record of its shape's end; None if it is not blocked."""
        entry = self.blocked.get(candidate)
        if entry is None:
            return None
        return entry.to_record("attempt" if candidate in self.reproductions else "blocklist")

    def write(self, path: Path) -> None:
        """Write the file that the shim reads."""
        lines = [*(candidate.as_json() for candidate in self.blocked), *self.only]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def chosen_candidates(lists: KernelLists, gfx: str, spec: Spec) -> list[dict[str, Any]]:
    """A line of the file for each shape of which a spec wants only some kernels, those of a table.

    The table may be of another image. Its kernels are named as this image's tuner knows them: CK's have no name there,
    only a number, and numbers move from version to version.
    """
    lines = []
    for shape in spec.shapes:
        wanted = spec.only_of(shape.id)
        if wanted is not None:
            sizes = [str(value) for value in shape.key.values() if isinstance(value, int)]
            kernels = [_as_known_here(kernel, lists, gfx, spec.family) for kernel in wanted]
            lines.append({"sizes": sizes, "only": kernels})
    return lines


def _as_known_here(kernel: TableKernel, lists: KernelLists, gfx: str, family: str) -> dict[str, Any]:
    numbers: list[str] = []
    if (family, kernel.libtype) in PLACES:
        instances = lists.instances(family, kernel.libtype, gfx)
        by_id = instances.by_id if instances is not None else {}
        numbers = [str(number) for number, name in by_id.items() if name == kernel.name] if by_id else [kernel.number]
    elif kernel.libtype == "hipblaslt":
        numbers = [kernel.number]
    # the tuners name all other candidates
    return {"libtype": kernel.libtype, "numbers": numbers, "name": kernel.name, "split": kernel.split}
