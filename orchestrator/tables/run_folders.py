"""Inputs as a user names them (a file, a folder of tables, or a run), and what a run's folder says of its winners.

A run's folder has a `tuned.csv` with its winners and a `provenance.json` with the facts of the run.
"""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from orchestrator.command_hints import command
from orchestrator.paths import RUN_RE, find_run
from worker.tuners.catalog import recorded_tuner

InputKind = Literal["file", "folder", "run"]


def locate_input(name: str | None, runs: Path) -> tuple[InputKind, Path]:
    """(what it is, its path) of what a user named: a path first, then an id (or its beginning) of a run in `runs`;
    None: the latest run.

    What looks like a path (a suffix, a folder before it) and is not there is returned as a file: its reader names it.
    Raises InputError where there is no such run.
    """
    if name is None:
        return "run", find_run(runs, None).root
    path = Path(name)
    if path.is_dir():
        return "run" if (path / "run.yaml").is_file() else "folder", path
    is_run_id = RUN_RE.match(name) and (runs / path).is_dir()
    looks_like_file = path.exists() or path.suffix or len(path.parts) > 1
    if looks_like_file and not is_run_id:
        return "file", path
    return "run", find_run(runs, name).root


def provenance_of(folder: Path) -> dict[str, Any]:
    """The folder's provenance.json, {} if it cannot be read."""
    try:
        document = json.loads((folder / "provenance.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def table_of(path: Path) -> Path:
    """The tuned table of a run's folder; any other path is that of a table."""
    return path / "tuned.csv" if path.is_dir() else path


def has_config_files(run: Path) -> bool:
    """Return whether the winners of a run are config files, which no table names."""
    return recorded_tuner(str(provenance_of(run).get("tuner") or "")).produces == "configs"


def fault_of_config_files(table: Path) -> str:
    """The fault of using the table of a run whose winners are config files, with the way out; "" for other tables."""
    run = table.parent
    if table.name != "tuned.csv" or not has_config_files(run):
        return ""
    merge = command(f"configs merge {quote(str(run))} --into TREE")
    return f"{run}: its winners are config files, which no table names; merge them so: {merge}"
