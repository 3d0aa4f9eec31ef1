"""The file, folder of tables or run that a user names, and the family of a table.

The family follows from the file's name, the run that the file lies in, its columns, or the names of its kernels.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from orchestrator.errors import TunedDBError
from orchestrator.families import get_family
from orchestrator.paths import RUN_RE, RunPaths, find_run
from orchestrator.tables.open import read_head
from worker.families import FAMILIES, Family

Kind = Literal["file", "folder", "run"]


@dataclass(frozen=True, slots=True)
class Located:
    """`path` is the file, or the folder; a run's folder has a run.yaml."""

    kind: Kind
    path: Path

    @property
    def paths(self) -> RunPaths:
        """The files of a run."""
        return RunPaths(self.path)


def locate(given: str | None, runs: Path) -> Located:
    """Find `given`: a path first, then an id (or its beginning) of a run in `runs`; None: the latest run.

    What looks like a path (a suffix, a folder before it) and is not there is returned as a file: its reader names it.
    Raises InputError where there is no such run.
    """
    path = Path(given) if given is not None else None
    if path is not None and path.is_dir():
        return Located("run" if (path / "run.yaml").is_file() else "folder", path)
    is_id = path is None or (RUN_RE.match(str(given)) and (runs / path).is_dir())
    if path is not None and not is_id and (path.exists() or path.suffix or len(path.parts) > 1):
        return Located("file", path)
    return Located("run", find_run(runs, given).root)


def provenance_of(folder: Path) -> dict[str, Any]:
    """The folder's provenance.json, {} if it cannot be read."""
    try:
        document = json.loads((folder / "provenance.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def shipped_tables(folder: Path, family: Family | None = None) -> list[Path]:
    """AITER's tuned tables in a folder, of all families or of one, found by AITER's rule for their names."""
    stem = Path(family.tuned_csv).stem if family else "tuned"
    return sorted(p for p in folder.glob(f"*{stem}*.csv") if p.is_file() and "untuned" not in p.name)


_STEMS = sorted(((Path(f.tuned_csv).stem, f) for f in FAMILIES.values()), key=lambda pair: -len(pair[0]))
_RUNBOOK = ("fp4_", "a4w4_blockscale")
"""The beginning of the names of the FP4 guide's files, and their family."""
_HEAD = 64 * 1024
_ROWS = 200
# families with the columns M,N,K are distinguished by kernel names
_KERNELS = (
    (re.compile(r"f4gemm_|.*f4gemm_bf16|a4w4_blockscale"), "a4w4_blockscale"),
    (re.compile(r"a8w8_blockscale_bpreshuffle"), "a8w8_blockscale_bpreshuffle"),
    (re.compile(r"a8w8_blockscale"), "a8w8_blockscale"),
)


def family_in_name(name: str) -> Family | None:
    """The family whose table's name is in a file name, as AITER looks for it; that of the FP4 guide's files."""
    found = next((family for stem, family in _STEMS if stem in name), None)
    begin, of_guide = _RUNBOOK
    return found or (FAMILIES[of_guide] if name.startswith(begin) else None)


def families_by_content(header: Sequence[str], rows: Iterable[Mapping[str, str]]) -> list[Family]:
    """The families that a table may be of by its columns and, where these fit several, by its kernels."""
    fitting = [f for f in FAMILIES.values() if {*f.to_aiter(f.key_names), f.err_column} <= set(header)]
    most = max((len(f.key_names) for f in fitting), default=0)
    fitting = [f for f in fitting if len(f.key_names) == most]
    if len(fitting) > 1:
        names = {name for row in rows for pattern, name in _KERNELS if pattern.match(row.get("kernelName", ""))}
        fitting = [f for f in fitting if f.name in names] if len(names) == 1 else fitting
    return fitting


def family_of(path: Path, wanted: str | None = None) -> Family:
    """The family of the table at `path`: `wanted` where it is given, else by name, run, columns and kernels.

    Raises TunedDBError where none of them is conclusive, InputError for an unknown `wanted`.
    """
    if wanted is not None:
        return get_family(wanted)
    if "untuned" in path.name:
        raise TunedDBError(f"{path}: by its name a list of shapes, not a tuned table; tune it first")
    known = family_in_name(path.name) or FAMILIES.get(str(provenance_of(path.parent).get("family")))
    if known is not None:
        return known
    records = list(csv.reader(io.StringIO(read_head(path, _HEAD, TunedDBError))))[:_ROWS]
    header = [c.strip() for c in records[0]] if records else []
    fitting = families_by_content(header, (dict(zip(header, r, strict=False)) for r in records[1:]))
    if len(fitting) == 1:
        return fitting[0]
    could = f"; it could be of {', '.join(f.name for f in fitting)}" if fitting else ""
    raise TunedDBError(f"{path}: neither name nor columns show the family of this table{could}: name it with --family")
