"""`gemmfleet compare`: reads the two sides, has `results/comparison.py` judge them, and writes what was asked for.

The golden side is the stack that is trusted; `tot` (top of tree) is the new one, which is judged. `--under-test` is
another thing: the fields of the environment that are meant to differ between the two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import JsonOpt, RunsOpt
from orchestrator.cli.printer import page_as_markdown
from orchestrator.command_hints import command
from orchestrator.errors import InputError
from orchestrator.files.write import refuse_overwriting, write_output
from orchestrator.pages import Page
from orchestrator.paths import DEFAULT_RUNS
from orchestrator.results import comparison
from orchestrator.results.output import add_comparison
from orchestrator.results.sides import read_sides
from orchestrator.results.verdicts import RegressionRule


def compare(
    sides: Annotated[
        list[str] | None, typer.Argument(metavar="[GOLDEN TOT]", help="A CSV, a folder of them, or a run, each.")
    ] = None,
    golden: Annotated[
        list[str] | None, typer.Option(metavar="F", help="The golden side; several are its repeats.")
    ] = None,
    tot: Annotated[
        list[str] | None, typer.Option(metavar="F", help="The side under test; several are its repeats.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="CSV", help="Write the joined table.")] = None,
    markdown: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write Markdown for a pull request; - for stdout.")
    ] = None,
    again: Annotated[Path | None, typer.Option(metavar="CSV", help="Write the rows to measure again.")] = None,
    rule: Annotated[
        str, typer.Option(metavar="REL,ABS", help="Suspect where tot > REL * golden + ABS us.")
    ] = "1.005,0.5",
    rule_only: Annotated[
        bool, typer.Option("--rule-only", help="Judge by the rule alone, which knows no noise.")
    ] = False,
    ignore_below: Annotated[
        float, typer.Option(metavar="US", min=0.0, help="Ignore rows whose golden time is shorter.")
    ] = 4.0,
    bound: Annotated[
        float, typer.Option(metavar="X", help="Expected false regressions in an unchanged table.")
    ] = 0.008,
    under_test: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD", help="Environment field that is meant to differ; repeatable."),
    ] = None,
    ignore_column: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Column that is not part of a shape; repeatable."),
    ] = None,
    other_gpu: Annotated[bool, typer.Option("--other-gpu", help="Compare although the GPUs differ.")] = False,
    runs: RunsOpt = DEFAULT_RUNS,
    json_: JsonOpt = False,
) -> Page:
    """Judge a new stack against a golden one, row by row.

    Exit code 1 on a regression, 4 where rows could not be judged.
    """
    golden, tot = _name_sides(sides, golden, tot)
    if not 0 < bound <= 1:
        raise InputError(f"--bound {bound:g}: is not above 0 and at most 1")
    if json_ and markdown == "-":
        raise InputError("--json and --markdown - both want standard output: give --markdown a file")
    thresholds = RegressionRule.parse(rule, ignore_below)
    golden_side, tot_side = read_sides({"golden": golden, "tot": tot}, runs, ignore_column or [])
    markdown_file = Path(markdown) if markdown not in (None, "-") else None
    written = [path for path in (out, again, markdown_file) if path]
    refuse_overwriting([*golden_side.files, *tot_side.files], written)
    document = comparison.compare(
        golden_side,
        tot_side,
        rule=thresholds,
        bound=bound,
        under_test=under_test or [],
        other_gpu=other_gpu,
        rule_only=rule_only,
        again_file=str(again or ""),
    )
    page = Page(document, document["exit_code"])
    add_comparison(page, document)
    comparison.write(document, out, again)
    if markdown_file:
        write_output(markdown_file, page_as_markdown(page))
    if markdown == "-":
        text = page_as_markdown(page)
        page = Page(document, document["exit_code"])
        page.line(*text.splitlines())
    page.aside(*(f"warning: {text}" for text in document["warnings"]))
    page.aside(*(f"written: {path}" for path in written))
    return page


def _name_sides(
    sides: list[str] | None, golden: list[str] | None, tot: list[str] | None
) -> tuple[list[str], list[str]]:
    """Return the files of the golden side and of the side under test. Raises InputError."""
    if sides and (golden or tot):
        raise InputError("give the sides either as GOLDEN TOT or with --golden and --tot")
    if sides and len(sides) != 2:
        raise InputError("give two sides, GOLDEN TOT; several files a side with --golden F --golden F --tot F")
    if sides:
        return sides[:1], sides[1:]
    if not golden or not tot:
        raise InputError(f"give two sides: {command('compare GOLDEN TOT')}")
    return golden, tot
