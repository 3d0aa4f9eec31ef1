"""The interface between a merge and a project of config files: `ConfigTree`.

`merge.py` knows a project only by this. `aiter_tree.AiterTree` is one for AITER, `engine_tree.EngineTree` one for vLLM
and SGLang. Another project of config files is another class with these methods.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from orchestrator.configs.winners import WinnerFile
from orchestrator.errors import InputError
from worker.triton_configs.config_file import Bucket
from worker.triton_configs.tree_files import FilePlan


class PlannedLookup(NamedTuple):
    """A question to a project, and its answers before and after a merge."""

    shape: str
    """The M and the shape that it asks for, in words: `GEMM-A16W16 M=64 N=1280 K=8192`."""
    call: Any
    """The arguments of its function: of AITER the keywords of `get_gemm_config`, of an engine (layer, M)."""
    before: Bucket
    after: Bucket


class LookupProof(NamedTuple):
    """All lookups of a merge were answered as they must."""

    how: str
    """The function that answered, for the user: `get_gemm_config with Triton 3.4.0, imported as it is`. "" if the
    project's own could not be asked."""
    notes: Sequence[str] = ()
    """Sentences for the user."""


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file to be written."""

    winner_file: WinnerFile
    """The winners that it gets."""
    path: Path
    source: Path
    """The file whose buckets it holds beside the winners'; another one if the file is new."""
    before: str | None
    """Its text before, None for a new file."""
    after: str
    """Its text after."""
    readers: tuple[str, ...]
    """Other readers of it on this chip."""


class ConfigTree(Protocol):
    """The config files of a project for one device. A merge calls these in this order; nothing is written before
    `planned_lookups` has returned, and `prove` is called again when all files are written."""

    def plan_file(self, winner_file: WinnerFile) -> FilePlan:
        """The file that holds winners, with its text. Raises ValueError if they cannot or may not stand in it, and
        OSError."""

    def bucket_for(self, winner_file: WinnerFile, buckets: Mapping[str, Bucket], m: int) -> str:
        """The bucket that the project takes for an M."""

    def faults(self, winner_file: WinnerFile, plan: FilePlan) -> Iterable[str]:
        """Sentences on what forbids to write the file: of the winners' buckets, and of the file as a whole. The times
        of its measurements are judged by the merge."""

    def readers(self, winner_file: WinnerFile) -> tuple[str, ...]:
        """Others that read the file."""

    def planned_lookups(self, changes: Sequence[FileChange]) -> list[PlannedLookup]:
        """Answers that the project must give, proven to be given as they are now. Raises InputError."""

    def prove(self, lookups: Sequence[PlannedLookup], *, after: bool = True) -> LookupProof:
        """The project gives what it must. Raises InputError where it does not."""


def compare_answers(
    root: Path, function: str, lookups: Sequence[PlannedLookup], answers: Iterable[Bucket | None], *, after: bool
) -> None:
    """Raise InputError for the first lookup that gives other values than those before or `after` the merge."""
    for lookup, values in zip(lookups, answers, strict=True):
        if values == (lookup.after if after else lookup.before):
            continue
        what = "reads this tree in another way than gemmfleet, and nothing was written"
        if after:
            what = "gives other values than planned, so the files were put back as they were"
        raise InputError(f"{root}: {function} {what}: {lookup.shape} gives {json.dumps(values)}")
