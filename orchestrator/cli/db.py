"""`gemmfleet db`: compare, merge, check, undo and export tuned tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from orchestrator.cli.build_tree import opened_build
from orchestrator.cli.options import BuildNodesOpt, BuildOpt, TableFamilyOpt
from orchestrator.command_hints import command
from orchestrator.errors import InputError
from orchestrator.machines.node_check import chips_of
from orchestrator.pages import Page
from orchestrator.results.run_facts import RunFacts
from orchestrator.shapes.model import describe
from orchestrator.tables import check, export, merge, rules
from orchestrator.tables.difference import diff
from orchestrator.tables.keys import chip_name
from orchestrator.tables.merge_input import one_family, open_sources
from orchestrator.tables.newcomers import MergeRow
from worker.text import plural

MOST_PROBLEMS = 200
"""Lines of problems that `db check` prints."""
CHANGES = {
    "added": "added",
    "gone": "gone",
    "kernel": "of another kernel",
    "us": "of another time",
    "cells": "of other cells",
    "same": "the same",
}
"""Words of `db diff` for a change of rows."""


def diff_tables(
    a: Annotated[Path, typer.Argument(metavar="A", help="A tuned table.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one, of the same family.")],
    family: TableFamilyOpt = None,
) -> Page:
    """Compare two tuned tables row by row.

    Lists the rows added, gone and changed from A to B, with the speed-up of each.
    """
    document = diff(a, b, one_family([a, b], family))
    page = Page(document)
    page.lines(_diff_line(row) for row in document["rows"])
    for change in ("gone", "added"):
        columns = document[f"columns_{change}"]
        if columns:
            page.line(f"columns {change}: {', '.join(columns)}")
    counts = [f"{n} {CHANGES[change]}" for change, n in document["counts"].items() if n]
    page.line(", ".join(counts) or "no rows")
    return page


def _diff_line(row: dict[str, Any]) -> str:
    sides = [side for side in (row["a"], row["b"]) if side is not None]
    times = " -> ".join("no time" if side["us"] is None else f"{side['us']:g} us" for side in sides)
    kernels = " -> ".join(dict.fromkeys(side["kernel"][:60] or "no kernel" for side in sides))
    line = f"{row['change']:6} {describe_row(row['key'])}  {times}"
    if row["speedup"] is not None:
        line += f"  {row['speedup']:.3f}x"
    line += f"  {kernels}"
    if row["change"] == "cells":
        line += f"  ({', '.join(row['cells'])})"
    return line


def merge_tables(
    new: Annotated[
        list[Path], typer.Argument(metavar="NEW...", help="Tuned tables, profiles, runs' folders: of one family.")
    ],
    into: Annotated[Path, typer.Option(metavar="DB", help="Tuned table to change; created if missing.")],
    policy: Annotated[
        Literal["best", "noise", "replace"],
        typer.Option(
            help="Replace an old row if the new one is faster by more than the noise, at all (best), or always"
            " (replace).",
        ),
    ] = "noise",
    profile: Annotated[
        list[Path] | None,
        typer.Option(metavar="P.csv", help="Profile measured with NEW; repeatable."),
    ] = None,
    allow_mixed: Annotated[
        bool, typer.Option("--allow-mixed", help="Merge although images or tuner versions differ.")
    ] = False,
    err_ratio: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Largest share of wrong elements of a newcomer.")
    ] = 0.05,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and write nothing.")] = False,
    family: TableFamilyOpt = None,
) -> Page:
    """Merge the fastest newcomer of each key into a tuned table.

    The old table is kept; `db undo` restores it.
    """
    sources = open_sources(new, profile or [], into, family, RunFacts)
    report = merge.merge(
        sources.newcomers(),
        into,
        sources.family,
        profile=sources.beside(),
        facts=sources.facts,
        policy=policy,
        err_ratio=err_ratio,
        allow_mixed=allow_mixed,
        dry_run=dry_run,
    )
    notes = list(dict.fromkeys((*sources.notes, *report.notes)))
    document = report.to_json()
    page = Page({**document, "family": sources.family.name, "notes": notes})
    page.lines(_merge_line(row) for row in report.rows)
    page.line(_summarize_merge(report, document["counts"], dry_run=dry_run))
    if report.backup:
        page.line(f"the old table is kept as {report.backup}; {command(f'db undo {report.path}')} restores it")
    page.aside(*(f"note: {note}" for note in notes))
    return page


def _summarize_merge(report: merge.MergeReport, counts: dict[str, int], *, dry_run: bool) -> str:
    actions = ", ".join(f"{n} {action}" for action, n in counts.items() if n)
    summary = f"{report.path}: {actions or 'no newcomers'} ({report.policy})"
    side_by_side = sum(row.judged == "same profile" for row in report.rows)
    if side_by_side:
        summary += f"; {side_by_side} judged against the old kernel in the same profile"
    if dry_run:
        summary += "; nothing was written (--dry-run)"
    return summary


def describe_row(key: dict[str, int | str]) -> str:
    """Return chip and shape of a key: `gfx950/256 16x1280x8192`."""
    shape = describe(value for name, value in key.items() if name != "cu_num")
    return f"{chip_name(key['gfx'], key['cu_num'])} {shape}"


def _merge_line(row: MergeRow) -> str:
    line = f"{row.action:8} {describe_row(row.key)}  {row.times}  {row.why}"
    if row.action in ("added", "replaced"):
        line += f"  {row.new_kernel[:60]}"
    return line


def undo_merge(
    table: Annotated[Path, typer.Argument(metavar="DB", help="The tuned table.")],
) -> Page:
    """Restore a tuned table as it was before its last merge.

    Restores the provenance records of its rows as well.
    """
    undone = merge.undo(table)
    records = {"restored": "restored", "removed": "removed (there were none before)", "left": "unchanged"}
    page = Page(undone)
    page.line(f"{undone['path']}: restored from {Path(undone['restored']).name}")
    page.line(f"  provenance records: {records[undone['records']]}")
    page.line(f"  the replaced table: {undone['aside']}")
    page.line(f"  older versions left: {undone['left']}")
    return page


def check_tables(
    tables: Annotated[
        list[Path], typer.Argument(metavar="DB...", help="Tuned tables, a run's folder, or a folder of AITER's tables.")
    ],
    family: TableFamilyOpt = None,
    build: BuildOpt = None,
    inventory: BuildNodesOpt = None,
    env: Annotated[
        bool, typer.Option("--env", help="With --build: AITER_CONFIG_... will name them, so AITER's own are not read.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 on a warning, too.")] = False,
    err_ratio: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Above it, a warning; with --build, an error.")
    ] = 0.05,
) -> Page:
    """Check tuned tables against AITER's rules.

    Each table alone and all together, with --build as that AITER would serve them; exit code 1 on an error.
    """
    with opened_build(build, inventory) as tree:
        checked, faults = check.check_tables(tables, family, err_ratio, tree, alone=env)
    errors = sum(table.count("error") for table in checked)
    warnings = sum(table.count("warning") for table in checked)
    # a row that needs a rebuild of AITER is not a warning
    is_unclean = any(finding.rule != rules.REBUILD for table in checked for finding in table.findings)
    document = {
        "tables": [table.to_json() for table in checked],
        "errors": errors,
        "warnings": warnings,
        "faults": faults,
    }
    held_to = ""
    if tree:
        verdict = "unsafe" if faults else check.verdict_of(checked)
        document["verdict"] = verdict
        document["problems"] = [problem for table in checked for problem in table.problems()]
        held_to = f"{check.VERDICTS[verdict]} {tree.name}: "
    page = Page(document, int(errors > 0 or (strict and is_unclean)))
    for table in checked:
        _add_table(page, table)
    page.lines((line for table in checked for line in table.problem_lines()), "problem", most=MOST_PROBLEMS)
    size = f"{plural(len(checked), 'table')}, {plural(sum(table.rows for table in checked), 'row')}"
    page.line(f"{held_to}{size}: {plural(errors, 'error')}, {plural(warnings, 'warning')}")
    if faults:
        page.error = InputError(faults)
    return page


def _add_table(page: Page, table: check.CheckedTable) -> None:
    line = f"{table.path}: {table.family or 'unknown family'}, {plural(table.rows, 'row')}"
    chips = ", ".join(f"{n} of {chip}" for chip, n in sorted(table.chips.items()))
    page.line(f"{line} ({chips})" if chips else line)
    if table.has_records:
        unknown = table.rows - table.known
        stale = plural(table.stale, "record")
        page.line(f"  provenance: {plural(table.known, 'row')} known, {unknown} not, {stale} stale")
    if table.build:
        words = {
            "loads": "can be loaded",
            "rebuild": "after a rebuild only",
            "cannot": "cannot be loaded",
            "unread": "could not be read",
        }
        page.line("  build: " + ", ".join(f"{plural(n, 'row')} {words[state]}" for state, n in table.build.items()))


def export_tables(
    tables: Annotated[list[Path], typer.Argument(metavar="DB...", help="Tuned tables, of one family or several.")],
    env: Annotated[bool, typer.Option("--env", help="Print the environment lines (default without --model).")] = False,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Write files named as in AITER's model_configs.")
    ] = None,
    form: Annotated[
        str | None, typer.Option(metavar="FORM", help="model-first or table-first (default: by family).")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="Write one table per family here, one row per key."),
    ] = None,
    at: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder of the tables as the container of AITER sees it.")
    ] = None,
    family: TableFamilyOpt = None,
    gfx: Annotated[str | None, typer.Option(metavar="GFX", help="The chip that will use them.")] = None,
    cu_num: Annotated[int | None, typer.Option(min=1, metavar="N", help="Its compute units.")] = None,
    inventory: Annotated[
        Path | None, typer.Option("-i", "--inventory", metavar="INV", help="Take the chips of these nodes.")
    ] = None,
    build: BuildOpt = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> Page:
    """Make AITER use tuned tables: environment lines or files.

    Exit code 1 where AITER would fail, or would use none of the rows.
    """
    if (gfx is None) != (cu_num is None):
        raise InputError("give --gfx and --cu-num together: they are a pair in the key of a row")
    if model is not None and (env or at is not None):
        raise InputError("--model writes files for AITER's own folder; it excludes --env and --at")
    sources = export.read_sources(tables, family)
    chips = {(gfx, cu_num)} if gfx is not None and cu_num is not None else set()
    if inventory is not None and not (chips and build):  # with both, -i names a node that has the image of --build
        chips |= chips_of(inventory)
    with opened_build(build, inventory) as tree:
        exported = export.export_tables(
            sources, chips, tree, folder=out, model=model, form=form, folder_in_container=at, force=force
        )
    needs_rebuild = any("AITER_REBUILD=1" in finding.text for finding in exported.findings)
    findings = [
        {"level": "fatal" if finding.level == "error" else finding.level, "text": finding.text}
        for finding in exported.findings
    ]
    document = {"env": exported.env, "files": exported.files, "rebuild": needs_rebuild, "findings": findings}
    page = Page(document, exported.failed)
    page.line(*exported.env)
    if needs_rebuild and exported.env:
        page.line("# once, then never again: export AITER_REBUILD=1")
    # without --model standard output is for `eval` and holds nothing but lines of a shell
    add_line = page.aside if model is None else page.line
    add_line(*(f"written: {name}" for name in exported.files))
    for finding in exported.findings:
        page.aside(*f"{finding.level}: {finding.text}".splitlines())
    return page
