"""`gemmfleet recheck`: a tuned table on a new build; only rows that are gone, slower or overtaken are tuned again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import DriveOptions, FamilyOpt, InventoryOpt, RunOptions
from worker.text import plural

if TYPE_CHECKING:
    from orchestrator.results.recheck import Recheck, RowToCheck
    from orchestrator.run.prepare import Prepared, RunRequest
    from orchestrator.tables.tuned import Key


def recheck(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="Tuned table, or the folder of its run.")],
    image: Annotated[str | None, typer.Option(metavar="NEW", help="The new image; default: the inventory's.")] = None,
    inventory: InventoryOpt = None,
    family: FamilyOpt = None,
    tuner: Annotated[str | None, typer.Option(metavar="T", help="Default: the run's, else the inventory's.")] = None,
    profile: Annotated[
        list[Path] | None, typer.Option(metavar="CSV", help="Profile with the runners-up; repeatable.")
    ] = None,
    runners_up: Annotated[int, typer.Option(min=0, max=100, metavar="N", help="Measured beside each row.")] = 3,
    slower: Annotated[float, typer.Option(min=0.0, metavar="X", help="Tolerance beside the median row.")] = 0.05,
    only_check: Annotated[
        bool, typer.Option("--only-check", help="Tune nothing; exit code 1 where rows need it.")
    ] = False,
    option: Annotated[
        list[str] | None, typer.Option("-O", "--tuner-option", help="As of `tune`, repeatable.", metavar="NAME=VALUE")
    ] = None,
    *,
    run: RunOptions,
    drive: DriveOptions,
) -> None:
    """Check a tuned table on a new build; tune what fails it.

    Each row's kernel and its runners-up are measured. Rows that are gone, slower or overtaken are tuned at once.
    """
    from orchestrator.cli import tuning
    from orchestrator.cli.output.run_end import print_next
    from orchestrator.errors import InputError
    from orchestrator.ledger import LedgerReader
    from orchestrator.results.recheck import judge, write_rows
    from orchestrator.run.prepare import prepare
    from orchestrator.shapes.writing import write_list

    if run.detach:
        raise InputError("recheck waits for its own measurements: leave out --detach")
    request = tuning.run_request(
        run, drive, shapes=table, inventory=inventory, image=image, family=family, tuner=tuner,
        options=tuning.parse_options(option or []),
    )  # fmt: skip
    prepared, rows = _prepared(request, profile or [], runners_up)
    if run.plan:
        tuning.show_plan(prepared, json_=run.json_)
        return
    tuning.show_notes(prepared, quiet=run.json_)
    paths, key_names = prepared.create(), prepared.family.key_names
    write_rows(paths.recheck, str(table), rows, slower)
    code = tuning.drive_here(paths, json_=run.json_, report=False)
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        found = judge(ledger, paths.recheck)
    if not run.json_:
        _print(found)
    made = [paths]
    if code == 0 and found.to_tune and not only_check:
        queued = paths.root / "queued.csv"
        write_list(queued, [r.key for r in found.to_tune], prepared.family)
        config = prepared.config
        again = tuning.run_request(
            run, drive, shapes=queued, inventory=paths.inventory, family=config.family, tuner=config.tuner,
            options=config.options, err_ratio=config.err_ratio,
        )  # fmt: skip
        made.append(prepare(again).create())
        code = tuning.drive_here(made[1], json_=run.json_, report=not run.json_)
    elif code == 0 and found.to_tune:
        code = 1
    if run.json_:
        runs = [p.run for p in made]
        print(json.dumps({"runs": runs, "exit_code": code, **found.to_json(key_names)}, indent=1))
    elif not only_check:
        folders = " ".join(str(p.root) for p in made)
        print_next([(f"db merge {folders} --into NEW.csv", "the table of the new build")])
    raise typer.Exit(code)


def _prepared(request: RunRequest, profiles: list[Path], runners: int) -> tuple[Prepared, dict[int, RowToCheck]]:
    """The run that measures the rows, and what it measures of each shape. Raise InputError."""
    from dataclasses import replace

    from orchestrator.errors import InputError
    from orchestrator.paths import RunConfig
    from orchestrator.results.recheck import chip_of_rows, rows_to_check
    from orchestrator.run.prepare import prepare
    from orchestrator.tables.sources import open_sources
    from orchestrator.tables.tuned import chip_name
    from worker.tuners.catalog import recorded_tuner

    table = request.shapes
    if (table / "run.yaml").is_file():
        of = RunConfig.read(table / "run.yaml")
        options, err = {**of.options, **request.options}, of.err_ratio
        request = replace(
            request, family=request.family or of.family, tuner=request.tuner or of.tuner, options=options, err_ratio=err
        )
    beside = [table.with_name("profile.csv")] if table.name == "tuned.csv" else []
    sources = open_sources([table], profiles or [p for p in beside if p.is_file()], None, request.family)
    rows: dict[Key, RowToCheck] = rows_to_check(sources, runners)
    share = sum(len(r.kernels) for r in rows.values()) / max(1, sum(r.known for r in rows.values()))
    request = replace(request, shapes=sources.tables[0], family=sources.family.name, rows=rows, share=share)
    prepared = prepare(request)
    if recorded_tuner(prepared.config.tuner).produces == "configs":
        raise InputError(f"the tuner {prepared.config.tuner} writes config files, no table whose rows could be checked")
    chip = chip_of_rows(rows, *prepared.family.chip(prepared.plan.gfx, prepared.plan.cu_num))
    found = {s.id: rows[key] for s in prepared.listed.shapes if (key := (*chip, *s.key)) in rows}
    if not found:
        has = ", ".join(sorted({chip_name(*key[:2]) for key in rows})[:6])
        raise InputError(
            f"{table}: has no row of {chip_name(*chip)} (it has {has}); where a node cannot say what it is, "
            "gfx and cu_num in the inventory do"
        )
    return prepared, found


def _print(found: Recheck) -> None:
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
    counts = ", ".join(f"{n} {verdict}" for verdict, n in found.counts.items())
    print(f"{found.table}: {plural(len(found.rows), 'row')}: {counts}; time now over then, median: {found.drift:.3f}")
    print(f"{found.slot_s:.1f} s of slots; {plural(len(found.to_tune), 'row')} to be tuned again")
