"""What a process of AITER is to leave out, and the words and records that come of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from worker.protocol import Withheld
from worker.tuners.aiter.drive.blocklist import Entry
from worker.tuners.aiter.drive.watch import Candidate


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Candidates that are not measured. `only`: the identities that are asked for, None for all."""

    entries: Mapping[Candidate, Entry] = field(default_factory=dict)
    reproductions: Mapping[Candidate, str] = field(default_factory=dict)
    """Of those that ended a process of this very attempt."""
    only: frozenset[tuple[str, ...]] | None = None

    def and_(self, entry: Entry, reproduction: str) -> LeftOut:
        """With one more, which ended a process just now."""
        return replace(
            self,
            entries={**self.entries, entry.candidate: entry},
            reproductions={**self.reproductions, entry.candidate: reproduction},
        )

    def why(self, candidate: Candidate) -> str:
        """In words, for its row."""
        entry = self.entries.get(candidate)
        if entry is None:
            return ""
        if candidate in self.reproductions:
            again = self.reproductions[candidate]
            return f"{entry.outcome}: {entry.detail}; to see it again: {again} (docs/explanation/aiter.md)"
        where = "on two slots" if entry.confirmed else "on this slot"
        return f"left out: {entry.outcome} {where} with this image before ({entry.detail})"

    def withheld(self, candidate: Candidate) -> Withheld | None:
        """As a record of its shape's end lists it; None where it is none of these."""
        entry = self.entries.get(candidate)
        if entry is None:
            return None
        return entry.withheld("attempt" if candidate in self.reproductions else "blocklist")

    def write(self, path: Path) -> None:
        """The file that the shim reads."""
        lines: list[Any] = [c.as_json() for c in self.entries]
        lines += [] if self.only is None else [{"only": sorted(map(list, self.only))}]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
