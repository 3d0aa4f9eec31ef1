"""The interface between a merge and a project of config files: `ConfigTree`, which AITER's and an engine's tree are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from orchestrator.configs.winners import WinnerFile
from orchestrator.errors import InputError
from worker.text import Finding
from worker.triton_configs.config_file import Bucket
from worker.triton_configs.tree_files import FilePlan


class PlannedLookup(NamedTuple):
    """A question to a project (its arguments), and its answers before and after a merge."""

    call: Any
    before: Bucket
    after: Bucket


@dataclass(frozen=True, slots=True)
class LookupTrial:
    """The answers, one a call: the values, None where the call failed. `how`: the way of the import and Triton's
    version; `why_not`: why there are no answers; `notes`: for the user."""

    answers: tuple[Bucket | None, ...] = ()
    how: str = ""
    why_not: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file to be written. `before`: its text, None for a new file; `source`: the file whose buckets it holds;
    `callers`: other readers of it on this chip."""

    won: WinnerFile
    path: Path
    source: Path
    before: str | None
    after: str
    callers: tuple[str, ...]


class ConfigTree(Protocol):
    """The config files of a project for one device. A merge calls these in this order."""

    def plan_file(self, won: WinnerFile) -> FilePlan:
        """The file that holds winners, with its text. Raises ValueError and OSError."""

    def bucket_for(self, won: WinnerFile, buckets: Mapping[str, Bucket], m: int) -> str:
        """The bucket that the project takes for an M."""

    def check(self, won: WinnerFile, plan: FilePlan) -> Iterable[Finding]:
        """Findings that forbid a merge: on the winners' buckets, and on the file as a whole."""

    def readers(self, won: WinnerFile) -> tuple[str, ...]:
        """Others that read the file."""

    def planned_lookups(self, changes: Sequence[FileChange]) -> list[PlannedLookup]:
        """Answers that the project must give, proven to be given as they are now. Raises InputError."""

    def prove(self, lookups: Sequence[PlannedLookup], *, after: bool = True) -> LookupTrial:
        """The project gives what it must. Raises InputError where it does not."""


def other_values_error(root: Path, function: str, after: bool, shape: str, values: Bucket | None) -> InputError:
    """The error of a lookup that gives other values than a merge planned."""
    if after:
        what = "gives other values than planned, so the files were put back as they were"
    else:
        what = "reads this tree in another way than gemmfleet, and nothing was written"
    return InputError(f"{root}: {function} {what}: {shape} gives {json.dumps(values)}")
