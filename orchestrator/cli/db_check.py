"""`gemmfleet db check` and `db diff`: read-only checks of tuned tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import BuildOpt, JsonOpt, TableFamilyOpt, opened_build
from worker.text import plural

if TYPE_CHECKING:
    from orchestrator.tuned_db.check import Checked
    from orchestrator.tuned_db.diff import DiffRow

SHOWN = 40


def check(
    tables: Annotated[
        list[Path], typer.Argument(metavar="DB...", help="Tuned tables, a run's folder, or a folder of AITER's tables.")
    ],
    family: TableFamilyOpt = None,
    build: BuildOpt = None,
    inventory: Annotated[
        Path | None, typer.Option("-i", "--inventory", metavar="INV", help="Nodes that may have the image of --build.")
    ] = None,
    err_ratio: Annotated[float, typer.Option("--err-ratio", min=0.0, max=1.0, help="Above it, a warning.")] = 0.05,
    as_json: JsonOpt = False,
) -> None:
    """Check tuned tables against AITER's rules.

    Each table alone and all together; exit code 1 on an error.
    """
    from orchestrator.errors import InputError
    from orchestrator.tuned_db.check import check as check_tables

    with opened_build(build, inventory) as there:
        found, faults = check_tables(tables, family, err_ratio, there)
    errors, warnings = (sum(c.count(level) for c in found) for level in ("error", "warning"))
    if as_json:
        document = {"tables": [c.to_json() for c in found], "errors": errors, "warnings": warnings, "faults": faults}
        print(json.dumps(document, indent=1))
    else:
        for c in found:
            _print_table(c)
        counts = [(len(found), "table"), (sum(c.rows for c in found), "row"), (errors, "error"), (warnings, "warning")]
        words = [plural(n, what) for n, what in counts]
        print(f"{', '.join(words[:2])}: {', '.join(words[2:])}")
    if faults:
        raise InputError(faults)
    if errors:
        raise typer.Exit(1)


def _print_table(c: Checked) -> None:
    from orchestrator.tables.faults import escaped

    chips = ", ".join(f"{n} of {chip}" for chip, n in sorted(c.chips.items()))
    rows = plural(c.rows, "row") + (f" ({chips})" if chips else "")
    print(escaped(f"{c.path}: {c.family or 'unknown family'}, {rows}"))
    if c.has_records:
        stale = plural(c.stale, "record")
        print(f"  provenance: {plural(c.known, 'row')} known, {c.rows - c.known} not, {stale} stale")
    if c.build:
        words = {
            "loads": "can be loaded",
            "rebuild": "after a rebuild only",
            "cannot": "cannot be loaded",
            "unread": "could not be read",
        }
        print("  build: " + ", ".join(f"{plural(n, 'row')} {words[s]}" for s, n in c.build.items()))
    for f in sorted(c.findings.values(), key=lambda f: (f.level, f.rule)):
        print(f"  {f.level}: {f.rule}, {plural(f.count, 'time')}")
        for line, text in f.examples:
            print(escaped(f"    {c.path}:{line}: {text}"))
        if f.count > len(f.examples):
            print(f"    ... and {f.count - len(f.examples)} more")


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A tuned table.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one, of the same family.")],
    family: TableFamilyOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Compare two tuned tables row by row.

    Lists the rows added, gone and changed from A to B, with the speed-up of each.
    """
    from orchestrator.tables.faults import escaped
    from orchestrator.tuned_db.diff import diff as compare
    from orchestrator.tuned_db.sources import one_family

    found = compare(a, b, one_family([a, b], family))
    if as_json:
        print(json.dumps(found.to_json(), indent=1))
        return
    for row in found.rows[:SHOWN]:
        print(escaped(_line(row)))
    if len(found.rows) > SHOWN:
        print(f"... and {plural(len(found.rows) - SHOWN, 'more row')} (all with --json)")
    for word, names in (("gone", found.columns_gone), ("added", found.columns_added)):
        if names:
            print(escaped(f"columns {word}: {', '.join(names)}"))
    words = {"added": "added", "gone": "gone", "kernel": "of another kernel", "us": "of another time"}
    words |= {"cells": "of other cells", "same": "the same"}
    print(", ".join(f"{n} {words[c]}" for c, n in found.counts().items() if n) or "no rows")


def _line(row: DiffRow) -> str:
    from orchestrator.cli.db_merge import shape_of

    sides = [s for s in (row.a, row.b) if s is not None]
    times = " -> ".join("no time" if s.us is None else f"{s.us:g} us" for s in sides)
    kernels = " -> ".join(dict.fromkeys(s.kernel[:60] or "no kernel" for s in sides))
    faster = f"  {row.speedup:.3f}x" if row.speedup is not None else ""
    cells = f"  ({', '.join(row.cells)})" if row.change == "cells" else ""
    return f"{row.change:6} {shape_of(row.key)}  {times}{faster}  {kernels}{cells}"
