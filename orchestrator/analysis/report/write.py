"""`gemmfleet report`: the page as a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.analysis.report.collected import as_run
from orchestrator.analysis.report.collector import Collector
from orchestrator.analysis.report.page import GENERATOR, fit, render_page
from orchestrator.command_hints import command
from orchestrator.errors import InputError
from orchestrator.paths import RunPaths
from orchestrator.tables.locate import is_collected, locate
from orchestrator.userfiles import write_atomic

_HEAD = 2000


@dataclass(frozen=True, slots=True)
class Written:
    """The page and what it shows."""

    path: Path
    bytes: int
    document: dict[str, Any]


def run_or_folder(runs: Path, run: str | None, *, collected: bool = False) -> RunPaths:
    """The run of that id in `runs`, or the run in that folder; the latest where `run` is None. `collected`: a folder of
    collected results will do, too. Raises InputError."""
    found = locate(run, runs)
    if found.kind == "run" or (found.kind == "collected" and collected):
        return RunPaths(found.path.absolute()) if run and Path(run).is_dir() else found.paths
    if found.kind == "collected":
        raise InputError(
            f"{run} holds collected results without a ledger: nothing of it is live;"
            f" try: {command(f'report {run}')}, or {command(f'analyze {run}')}"
        )
    raise InputError(f"{run} is no run folder: it has no run.yaml; `{command('runs list')}` shows the runs")


def write_report(paths: RunPaths, out: Path | None) -> Written:
    """Write the page of a run, by default into its folder. Raises InputError, LedgerError."""
    target = out or paths.root / "report.html"
    if target.is_dir():
        target = target / f"{paths.run}.html"
    _refuse_foreign(target)
    if is_collected(paths.root):
        with as_run(paths.root) as run:
            document = fit(Collector(run).document())
    else:
        document = fit(Collector(paths).document())
    page = render_page(document)
    try:
        write_atomic(target, lambda f: print(page, end="", file=f))
    except OSError as e:
        raise InputError(f"{target}: cannot be written: {e.strerror or e}; name another place with -o") from e
    return Written(target, len(page.encode()), document)


def _refuse_foreign(target: Path) -> None:
    """Only a page of ours is replaced."""
    if not target.exists():
        if not target.parent.is_dir():
            raise InputError(f"{target}: there is no folder {target.parent}; make it first")
        return
    if not target.is_file():
        raise InputError(f"{target} is no file; name another place with -o")
    with target.open("rb") as f:
        head = f.read(_HEAD)
    if f'content="{GENERATOR}"'.encode() not in head:
        raise InputError(f"{target} is there and is no page of ours, so it is left alone; name another place with -o")
