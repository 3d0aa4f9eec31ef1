"""`gemmfleet db check`: tuned tables held to AITER's rules, and to the build that is to serve them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import BuildOpt, JsonOpt, TableFamilyOpt, opened_build
from worker.text import plural

if TYPE_CHECKING:
    from orchestrator.tables.check import Checked

MOST_PROBLEMS = 200


def check(
    tables: Annotated[
        list[Path], typer.Argument(metavar="DB...", help="Tuned tables, a run's folder, or a folder of AITER's tables.")
    ],
    family: TableFamilyOpt = None,
    build: BuildOpt = None,
    inventory: Annotated[
        Path | None, typer.Option("-i", "--inventory", metavar="INV", help="Nodes that may have the image of --build.")
    ] = None,
    env: Annotated[
        bool, typer.Option("--env", help="With --build: AITER_CONFIG_... will name them, so AITER's own are not read.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 on a warning, too.")] = False,
    err_ratio: Annotated[
        float, typer.Option("--err-ratio", min=0.0, max=1.0, help="Above it, a warning; with --build, an error.")
    ] = 0.05,
    as_json: JsonOpt = False,
) -> None:
    """Check tuned tables against AITER's rules.

    Each table alone and all together, with --build as that AITER would serve them; exit code 1 on an error.
    """
    from orchestrator.errors import InputError
    from orchestrator.tables.check import VERDICTS, verdict_of
    from orchestrator.tables.check import check as check_tables
    from orchestrator.tables.faults import escaped
    from orchestrator.tables.rules import REBUILD

    with opened_build(build, inventory) as there:
        found, faults = check_tables(tables, family, err_ratio, there, alone=env)
    errors, warnings = (sum(c.count(level) for c in found) for level in ("error", "warning"))
    problems = [p for c in found for p in c.problems()] if there else []
    verdict = "unsafe" if faults else verdict_of(found)
    if as_json:
        document = {"tables": [c.to_json() for c in found], "errors": errors, "warnings": warnings, "faults": faults}
        held = {"verdict": verdict, "problems": problems} if there else {}
        print(json.dumps(document | held, indent=1))
    else:
        for c in found:
            _print_table(c, findings=there is None)
        for p in problems[:MOST_PROBLEMS]:
            print(escaped("{level}: {file}:{line}: {rule}: {text}; fix: {fix}".format_map(p)))
        if len(problems) > MOST_PROBLEMS:
            print(f"... and {plural(len(problems) - MOST_PROBLEMS, 'more problem')} (all with --json)")
        counts = [(len(found), "table"), (sum(c.rows for c in found), "row"), (errors, "error"), (warnings, "warning")]
        words = [plural(n, what) for n, what in counts]
        held_to = f"{VERDICTS[verdict]} {there.name}: " if there else ""
        print(f"{held_to}{', '.join(words[:2])}: {', '.join(words[2:])}")
    if faults:
        raise InputError(faults)
    unclean = any(f.rule != REBUILD for c in found for f in c.findings)
    if errors or (strict and unclean):
        raise typer.Exit(1)


def _print_table(c: Checked, *, findings: bool) -> None:
    from orchestrator.tables.check import SHOWN
    from orchestrator.tables.faults import escaped, listed

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
    for (rule, level), some in sorted(c.by_rule().items() if findings else (), key=lambda f: f[0][::-1]):
        print(f"  {level}: {rule}, {plural(len(some), 'time')}")
        for line in listed((f"{f.path}:{f.line}: {f.text}" for f in some), SHOWN, "    "):
            print(escaped(line))
