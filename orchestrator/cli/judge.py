"""`gemmfleet analyze` and `gemmfleet compare`: the backends of a run side by side, and two stacks side by side."""

from __future__ import annotations

import json
import math
import sys
from enum import StrEnum
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from orchestrator.cli.options import DEFAULT_RUNS, JsonOpt, RunsOpt
from orchestrator.cli.printer import Page
from orchestrator.command_hints import command
from orchestrator.errors import InputError
from orchestrator.tables.faults import escaped, shown
from worker.text import plural

if TYPE_CHECKING:
    from orchestrator.results.compare import Rule

MOST_ROWS = 100
PIPE_WIDTH = 10_000
"""Columns of output that is no terminal: nothing is wrapped or cut."""


class Format(StrEnum):
    """Values of --format."""

    TERMINAL = "terminal"
    MARKDOWN = "markdown"
    CSV = "csv"
    JSON = "json"


class Sort(StrEnum):
    """Values of --sort."""

    SHAPE = "shape"
    TFLOPS = "tflops"
    RATIO = "ratio"


_BY_SUFFIX = {".md": Format.MARKDOWN, ".csv": Format.CSV, ".json": Format.JSON}


def analyze(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN, DIR or FILE]...", help="A run, folders or CSV files; default: the latest run."),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option("--family", metavar="F", help="Read only this family; default where a file names none."),
    ] = None,
    err_ratio: Annotated[
        float | None,
        typer.Option("--err-ratio", metavar="X", min=0, help="Largest share of wrong elements (default: AITER's)."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option("--reference", metavar="CHIP", help="Compare with published FP4 figures: mi355x, mi350x."),
    ] = None,
    chip: Annotated[
        str | None, typer.Option("--chip", metavar="CHIP", help="Chip whose data sheet gives the roofline.")
    ] = None,
    sort: Annotated[Sort, typer.Option("--sort", help="Order of the shapes; tflops and ratio: largest first.")] = (
        Sort.SHAPE
    ),
    rows: Annotated[
        int, typer.Option("--rows", min=0, metavar="N", help="Shapes listed on a terminal (0: all).")
    ] = MOST_ROWS,
    format_: Annotated[
        Format | None, typer.Option("--format", help="Default: terminal, or by the suffix of OUT.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="OUT", help="Write to this file.")] = None,
    runs: RunsOpt = DEFAULT_RUNS,
    json_: JsonOpt = False,
) -> None:
    """Find the fastest backend of each shape, and by how much.

    Prints the best TFLOPS of each backend, the speed-ups between backends, and the share of the roofline.
    """
    from orchestrator.families import get_family
    from orchestrator.results.analyze import analyze as document_of
    from orchestrator.results.measurements import find_sources
    from orchestrator.userfiles import write_atomic

    if json_ and format_ not in (None, Format.JSON):
        raise InputError(f"--json and --format {format_} contradict each other")
    form = Format.JSON if json_ else format_ or (_BY_SUFFIX.get(out.suffix.lower()) if out else None) or Format.TERMINAL
    with find_sources(inputs or [], runs=runs, family=get_family(family) if family else None) as sources:
        if out is not None and any(out.exists() and out.samefile(s.path) for s in sources.files):
            raise InputError(f"{escaped(str(out))} is one of the inputs: name another file with -o")
        found = document_of(sources, err_ratio, chip=chip, reference=reference)
    if sort is not Sort.SHAPE:
        found["rows"].sort(key=lambda r: _size(r, sort), reverse=True)
    text = StringIO()
    _render(sys.stdout if out is None else text, form, found, rows if out is None else 0)
    if out is not None:
        try:
            write_atomic(out, text.getvalue())
        except OSError as e:
            raise InputError(f"{escaped(str(out))}: cannot be written: {e.strerror or e}") from e
        print(f"written: {escaped(str(out))}", file=sys.stderr)
    if form in (Format.TERMINAL, Format.CSV):
        for note in found["notes"]:
            print(f"note: {escaped(note)}", file=sys.stderr)


def _size(row: dict[str, Any], sort: Sort) -> float:
    """Return the figure that shapes are sorted by."""
    if sort is Sort.RATIO:
        return row["asm_over_best_other"] or 0.0
    return row["backends"][row["best"]]["tflops"] if row["best"] else 0.0


def _render(to: TextIO, form: Format, found: dict[str, Any], rows: int) -> None:
    from orchestrator.results import output
    from orchestrator.results.analyze import write_csv

    if form is Format.JSON:
        print(json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False), file=to)
    elif form is Format.CSV:
        write_csv(found, to)
    elif form is Format.MARKDOWN:
        print(*output.analysis_markdown(found), sep="\n", file=to)
    else:
        from rich.console import Console

        wide = None if to.isatty() else PIPE_WIDTH
        console = Console(file=to, width=wide, no_color=wide is not None or None, highlight=False)
        output.show_analysis(console, found, found["rows"][: rows or None])


def compare(
    sides: Annotated[
        list[str] | None, typer.Argument(metavar="[GOLDEN TOT]", help="A CSV, a folder of them, or a run, each.")
    ] = None,
    golden: Annotated[
        list[str] | None, typer.Option("--golden", metavar="F", help="The golden side; several are its repeats.")
    ] = None,
    tot: Annotated[
        list[str] | None, typer.Option("--tot", metavar="F", help="The side under test; several are its repeats.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="CSV", help="Write the joined table.")] = None,
    markdown: Annotated[
        str | None, typer.Option("--markdown", metavar="FILE", help="Write Markdown for a pull request; - for stdout.")
    ] = None,
    again: Annotated[
        Path | None, typer.Option("--again", metavar="CSV", help="Write the rows to measure again.")
    ] = None,
    rule: Annotated[
        str, typer.Option("--rule", metavar="REL,ABS", help="Suspect where tot > REL * golden + ABS us.")
    ] = "1.005,0.5",
    rule_only: Annotated[
        bool, typer.Option("--rule-only", help="Judge by the rule alone, which knows no noise.")
    ] = False,
    ignore_below: Annotated[
        float, typer.Option("--ignore-below", metavar="US", min=0.0, help="Ignore rows whose golden time is shorter.")
    ] = 4.0,
    bound: Annotated[
        float, typer.Option("--bound", metavar="X", help="Expected false regressions in an unchanged table.")
    ] = 0.008,
    under_test: Annotated[
        list[str] | None,
        typer.Option("--under-test", metavar="FIELD", help="Environment field that is meant to differ; repeatable."),
    ] = None,
    ignore_column: Annotated[
        list[str] | None,
        typer.Option("--ignore-column", metavar="NAME", help="Column that is not part of a shape; repeatable."),
    ] = None,
    other_gpu: Annotated[bool, typer.Option("--other-gpu", help="Compare although the GPUs differ.")] = False,
    runs: RunsOpt = DEFAULT_RUNS,
    json_: JsonOpt = False,
) -> Page:
    """Judge a new stack against a golden one, row by row.

    Exit code 1 on a regression, 4 where rows could not be judged.
    """
    from orchestrator.results import comparison, output

    if sides and (golden or tot):
        raise InputError("give the sides either as GOLDEN TOT or with --golden and --tot")
    if sides:
        if len(sides) != 2:
            raise InputError("give two sides, GOLDEN TOT; several files a side with --golden F --golden F --tot F")
        golden, tot = sides[:1], sides[1:]
    if not golden or not tot:
        raise InputError(f"give two sides: {command('compare GOLDEN TOT')}")
    if not 0 < bound <= 1:
        raise InputError(f"--bound {bound:g}: is not above 0 and at most 1")
    if json_ and markdown == "-":
        raise InputError("--json and --markdown - both want standard output: give --markdown a file")
    thresholds = _rule(rule, ignore_below)
    a, b = comparison.read_sides({"golden": golden, "tot": tot}, runs, ignore_column or [])
    page = Path(markdown) if markdown not in (None, "-") else None
    _refuse_overwriting([*a.files, *b.files], [p for p in (out, again, page) if p])
    found = comparison.compare(a, b, rule=thresholds, bound=bound, under_test=under_test or [], other_gpu=other_gpu,
                   rule_only=rule_only)  # fmt: skip
    written = _write(found, out, again, page)
    report = Page(found, found["exit_code"])
    if markdown == "-":
        report.line(*output.comparison_markdown(found))
    else:
        grids = (output.environments(found), output.comparison_table(found))
        report.line(*(output.on_terminal(g) for g in grids if g.rows))
        report.line(*output.comparison_sentences(found, str(again or "")))
    report.aside(*(f"warning: {text}" for text in found["warnings"]), *(f"written: {text}" for text in written))
    return report


def _rule(text: str, ignore_below: float) -> Rule:
    from orchestrator.results.compare import Rule

    try:
        rel, abs_us = (float(x) for x in text.split(","))
    except ValueError:
        raise InputError(f"--rule {shown(text)}: must be two numbers, as 1.005,0.5") from None
    if not (math.isfinite(rel) and math.isfinite(abs_us) and rel >= 1 and abs_us >= 0):
        raise InputError(f"--rule {shown(text)}: REL must be at least 1 and ABS at least 0")
    if not math.isfinite(ignore_below):
        raise InputError("--ignore-below: is not a number")
    return Rule(rel, abs_us, ignore_below)


def _refuse_overwriting(read: list[Path], write: list[Path]) -> None:
    """Raise InputError where an output is one of the inputs, a folder, or named twice."""
    inputs = {p.resolve() for p in read}
    for path in write:
        if path.resolve() in inputs:
            raise InputError(f"{path}: is one of the inputs: name another file")
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise InputError(f"{path}: {'is a folder' if path.is_dir() else 'its folder is not there'}")
    if len({p.resolve() for p in write}) < len(write):
        raise InputError("two of --out, --again and --markdown name the same file")


def _write(found: dict[str, Any], out: Path | None, again: Path | None, page: Path | None) -> list[str]:
    from orchestrator.results import comparison, output
    from orchestrator.userfiles import write_atomic

    written = []
    try:
        if out:
            comparison.write_rows(found, out)
            written.append(str(out))
        if again:
            comparison.write_again(found, again)
            written.append(f"{again} ({plural(found['open'], 'row')} to measure again)")
        if page:
            write_atomic(page, "\n".join(output.comparison_markdown(found)) + "\n")
            written.append(str(page))
    except OSError as e:
        raise InputError(f"{e.filename or out or again or page}: cannot be written: {e.strerror}") from e
    return written
