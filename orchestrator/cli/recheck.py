"""`gemmfleet recheck`: a tuned table on a new build; only rows that are gone, slower or overtaken are tuned again."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import (
    DEFAULT_RUNS,
    DriveOptions,
    FamilyOpt,
    InventoryOpt,
    JsonOpt,
    LimitOpt,
    PlanOpt,
    RunOptions,
    RunsOpt,
)
from worker.text import plural

if TYPE_CHECKING:
    from orchestrator.paths import RunPaths
    from orchestrator.results.recheck import Recheck

RUNNERS, SLOWER = 3, 0.05


def recheck(
    table: Annotated[
        Path, typer.Argument(metavar="TABLE", help="Tuned table, a run's folder, or that of a recheck to go on with.")
    ],
    image: Annotated[
        str | None, typer.Option("--image", metavar="NEW", help="Image with the new build; default: the inventory's.")
    ] = None,
    inventory: InventoryOpt = None,
    family: FamilyOpt = None,
    tuner: Annotated[
        str | None,
        typer.Option(help="Tuner of the table's rows; default: the run's, else the inventory's.", metavar="T"),
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(help="Profile of the table's run: gives the runners-up; repeatable.", metavar="CSV"),
    ] = None,
    runners_up: Annotated[
        int, typer.Option(min=0, max=100, help="Runners-up that are measured of each row.", metavar="N")
    ] = RUNNERS,
    slower: Annotated[
        float, typer.Option(min=0.0, help="A row is slower if so by this share more than the median row.", metavar="X")
    ] = SLOWER,
    only_check: Annotated[
        bool, typer.Option("--only-check", help="Tune nothing; exit code 1 where rows need it.")
    ] = False,
    option: Annotated[
        list[str] | None,
        typer.Option("-O", "--tuner-option", help="Option of the tuner, repeatable.", metavar="NAME=VALUE"),
    ] = None,
    runs: RunsOpt = DEFAULT_RUNS,
    limit: LimitOpt = None,
    plan: PlanOpt = False,
    json_: JsonOpt = False,
    *,
    drive: DriveOptions,
) -> None:
    """Check a tuned table on a new build; tune only what needs it.

    Each row's kernel and its runners-up are measured. Rows that are gone, slower or overtaken are tuned at once.
    """
    from orchestrator.cli import tuning
    from orchestrator.ledger import LedgerReader
    from orchestrator.paths import RunConfig, RunPaths
    from orchestrator.results.recheck import judge
    from orchestrator.run.prepare import prepare

    run = RunOptions(runs, limit, plan, False, json_)
    options = tuning.parse_options(option or [])
    paths = RunPaths(table)
    if not paths.recheck.exists():
        given = {"image": image, "inventory": inventory, "family": family, "tuner": tuner, "options": options}
        made = _created(table, profile or [], runners_up, slower, run, drive, given)
        if made is None:
            return
        paths = made
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        over = ledger.state == "finished"
    code = 0 if over else tuning.drive_here(paths, json_=json_, report=False)
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        found, key_names = judge(ledger, paths.recheck), ledger.family.key_names
    document = _document(paths, found, key_names)
    if not json_:
        _print(paths, found)
    tuned: RunPaths | None = None
    if code == 130 or only_check:
        code = code if code == 130 else int(bool(found.to_tune))
    elif found.to_tune:
        config = RunConfig.read(paths.config)
        request = tuning.run_request(
            run, drive, shapes=_queue(paths, found), inventory=paths.inventory, family=config.family,
            tuner=config.tuner, options=config.options, err_ratio=config.err_ratio,
        )  # fmt: skip
        prepared = prepare(request)
        tuning.show_notes(prepared, quiet=json_)
        tuned = prepared.create()
        code = tuning.drive_here(tuned, json_=json_, report=not json_)
    else:
        code = 0
    if json_:
        print(json.dumps({**document, "tuned_run": tuned.run if tuned else None, "exit_code": code}, indent=1))
    elif not only_check and code != 130:
        _print_merge(paths, tuned)
    raise typer.Exit(code)


def _created(
    table: Path,
    profiles: list[Path],
    runners: int,
    slower: float,
    run: RunOptions,
    drive: DriveOptions,
    given: dict[str, Any],
) -> RunPaths | None:
    """Prepare the run that measures the rows and create it; None where only its plan was printed. Raise InputError."""
    from orchestrator.cli import tuning
    from orchestrator.errors import InputError
    from orchestrator.paths import RunConfig
    from orchestrator.results.recheck import rows_to_check, write_rows
    from orchestrator.run.prepare import prepare
    from orchestrator.tuned_db.sources import open_sources
    from worker.tuners.catalog import recorded_tuner

    if table.is_dir() and (table / "run.yaml").is_file():
        config = RunConfig.read(table / "run.yaml")
        given = {
            **given, "family": given["family"] or config.family, "tuner": given["tuner"] or config.tuner,
            "options": {**config.options, **given["options"]}, "err_ratio": config.err_ratio,
        }  # fmt: skip
    beside = table.parent / "profile.csv"
    profiles = profiles or ([beside] if table.name == "tuned.csv" and beside.is_file() else [])
    sources = open_sources([table], profiles, None, given["family"])
    rows = rows_to_check(sources, runners)
    share = sum(len(r.kernels) for r in rows.values()) / max(1, sum(r.known for r in rows.values()))
    request = tuning.run_request(
        run, drive, shapes=sources.tables[0], rows=rows, share=share, **{**given, "family": sources.family.name}
    )
    prepared = prepare(request)
    if recorded_tuner(prepared.config.tuner).produces == "configs":
        raise InputError(f"the tuner {prepared.config.tuner} writes config files, no table whose rows could be checked")
    if not prepared.plan.todo:
        raise InputError(f"{table}: has no row of {prepared.plan.gfx} with cu_num {prepared.plan.cu_num}")
    if run.plan:
        tuning.show_plan(prepared, json_=run.json_)
        return None
    if not sources.profiles:
        print(f"note: no profile of {table} is known (--profile CSV): no runner-up is measured", file=sys.stderr)
    tuning.show_notes(prepared, quiet=run.json_)
    paths = prepared.create()
    chip = prepared.family.chip(prepared.plan.gfx, prepared.plan.cu_num)
    todo = {i for group in prepared.plan.groups for i in group.shapes}
    wanted = {s.id: rows[(*chip, *s.key)] for s in prepared.listed.shapes if s.id in todo}
    write_rows(paths.recheck, str(table), wanted, slower)
    return paths


def _queue(paths: RunPaths, found: Recheck) -> Path:
    """Write the list of the shapes to be tuned."""
    from orchestrator.families import get_family
    from orchestrator.paths import RunConfig
    from orchestrator.shapes.writing import write_list

    listed = paths.root / "queued.csv"
    write_list(listed, [r.key for r in found.to_tune], get_family(RunConfig.read(paths.config).family), force=True)
    return listed


def _document(paths: RunPaths, found: Recheck, key_names: tuple[str, ...]) -> dict[str, Any]:
    rows = [{**asdict(r), "key": dict(zip(key_names, r.key, strict=True))} for r in found.rows]
    return {
        "run": paths.run, "table": found.table, "counts": found.counts, "to_tune": len(found.to_tune),
        "drift": round(found.drift, 4), "slot_seconds": round(found.slot_s, 3), "rows": rows,
    }  # fmt: skip


def _print(paths: RunPaths, found: Recheck) -> None:
    """Print the rows that need tuning, and the counts."""
    from orchestrator.cli.output.terminal import MOST_ROWS, console, plain, table
    from orchestrator.shapes import describe

    t = table("shape", "row", "us then", "us now", "kernel", "runner-up or reason", right=("us then", "us now"))
    for r in found.to_tune[:MOST_ROWS]:
        now = "" if r.now_us is None else f"{r.now_us:.2f}"
        other = r.why if r.by_us is None else f"{r.by} {r.by_us:.2f} us"
        t.add_row(describe(r.key), r.verdict, f"{r.then_us:.2f}", now, plain(r.kernel, 50), plain(other, 90))
    if found.to_tune:
        console().print(t)
    if len(found.to_tune) > MOST_ROWS:
        print(f"... and {len(found.to_tune) - MOST_ROWS} more (all with --json)")
    counts = ", ".join(f"{n} {verdict}" for verdict, n in found.counts.items())
    print(f"{found.table}: {plural(len(found.rows), 'row')}: {counts}; time now over then, median: {found.drift:.3f}")
    print(f"run {paths.run}: {found.slot_s:.1f} s of slots; {plural(len(found.to_tune), 'row')} to be tuned again")


def _print_merge(paths: RunPaths, tuned: RunPaths | None) -> None:
    """Print the command that makes the new build's table."""
    from orchestrator.command_hints import command

    runs = " ".join(str(p.root) for p in (paths, tuned) if p is not None)
    print(f"next: {command(f'db merge {runs} --into NEW.csv')}  # the table of the new build")
