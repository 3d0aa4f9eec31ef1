"""The file, folder of tables, folder of collected results or run that a user names on the command line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from orchestrator.paths import RUN_RE, RunPaths, find_run
from worker.families import Family

Kind = Literal["file", "folder", "collected", "run"]


@dataclass(frozen=True, slots=True)
class Located:
    """`path` is the file, or the folder. `collected`: a folder with provenance.json and no run.yaml."""

    kind: Kind
    path: Path

    @property
    def paths(self) -> RunPaths:
        """The files of a run or of collected results."""
        return RunPaths(self.path)


def locate(given: str | None, runs: Path) -> Located:
    """Find `given`: a path first, then an id (or its beginning) of a run in `runs`; None: the latest run.

    What looks like a path (a suffix, a folder before it) and is not there is returned as a file: its reader names it.
    Raises InputError where there is no such run.
    """
    path = Path(given) if given is not None else None
    if path is not None and path.is_dir():
        return Located(_kind_of(path), path)
    is_id = path is None or (RUN_RE.match(str(given)) and (runs / path).is_dir())
    if path is not None and not is_id and (path.exists() or path.suffix or len(path.parts) > 1):
        return Located("file", path)
    return Located("run", find_run(runs, given).root)


def _kind_of(folder: Path) -> Kind:
    if (folder / "run.yaml").is_file():
        return "run"
    return "collected" if is_collected(folder) else "folder"


def is_collected(folder: Path) -> bool:
    """Whether a folder holds results that `collect` fetched: tables, and no ledger."""
    return (folder / "provenance.json").is_file() and not (folder / "run.yaml").exists()


def provenance_of(folder: Path) -> dict[str, Any]:
    """The folder's provenance.json, {} where there is none that can be read."""
    try:
        document = json.loads((folder / "provenance.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def shipped_tables(folder: Path, family: Family | None = None) -> list[Path]:
    """AITER's tuned tables in a folder, of all families or of one, found by AITER's rule for their names."""
    stem = Path(family.tuned_csv).stem if family else "tuned"
    return sorted(p for p in folder.glob(f"*{stem}*.csv") if p.is_file() and "untuned" not in p.name)
