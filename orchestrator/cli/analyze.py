"""`gemmfleet analyze`: find the fastest backend of each shape, as a table, Markdown, CSV or JSON."""

from __future__ import annotations

import sys
from enum import StrEnum
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.options import JsonOpt, RunsOpt
from orchestrator.cli.printer import page_as_markdown, plain, print_page
from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.files.write import refuse_overwriting, write_output
from orchestrator.pages import Page
from orchestrator.paths import DEFAULT_RUNS
from orchestrator.results import analyze as analysis
from orchestrator.results.measurements import find_sources
from orchestrator.results.output import add_analysis

MOST_LISTED = 100


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
        typer.Option(metavar="F", help="Read only this family; default where a file names none."),
    ] = None,
    err_ratio: Annotated[
        float | None,
        typer.Option(metavar="X", min=0, help="Largest share of wrong elements (default: AITER's)."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="CHIP", help="Compare with published FP4 figures: mi355x, mi350x."),
    ] = None,
    chip: Annotated[str | None, typer.Option(metavar="CHIP", help="Chip whose data sheet gives the roofline.")] = None,
    sort: Annotated[Sort, typer.Option(help="Order of the shapes; tflops and ratio: largest first.")] = (Sort.SHAPE),
    rows: Annotated[int, typer.Option(min=0, metavar="N", help="Shapes listed on a terminal (0: all).")] = MOST_LISTED,
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
    if json_ and format_ not in (None, Format.JSON):
        raise InputError(f"--json and --format {format_} contradict each other")
    form = _choose_format(format_, out, json_=json_)
    with find_sources(inputs or [], runs=runs, family=get_family(family) if family else None) as sources:
        written = [out] if out else []
        refuse_overwriting([*map(Path, inputs or []), *(source.path for source in sources.files)], written)
        document = analysis.analyze(sources, err_ratio, chip=chip, reference=reference)
    if sort is not Sort.SHAPE:
        document["rows"].sort(key=lambda row: _figure_to_sort_by(row, sort), reverse=True)
    page = Page(document)
    add_analysis(page, document, rows if out is None and form is Format.TERMINAL else 0)
    if out is None and form in (Format.TERMINAL, Format.JSON):
        print_page(page, as_json=form is Format.JSON)
        return
    text = _render(page, document, form)
    if out is None:
        print(end=text)
        return
    write_output(out, text)
    print(f"written: {plain(str(out))}", file=sys.stderr)


def _choose_format(wanted: Format | None, out: Path | None, *, json_: bool) -> Format:
    """Return the format of --json, else of --format, else of the suffix of the file."""
    if json_:
        return Format.JSON
    if wanted is not None:
        return wanted
    if out is not None:
        return _BY_SUFFIX.get(out.suffix.lower(), Format.TERMINAL)
    return Format.TERMINAL


def _render(page: Page, document: dict[str, Any], form: Format) -> str:
    """Return the analysis as text. A CSV has no place for notes, which are printed on standard error."""
    if form is Format.MARKDOWN:
        return page_as_markdown(page)
    text = StringIO()
    if form is Format.CSV:
        analysis.write_csv(document, text)
        for note in document["notes"]:
            print(f"note: {plain(note)}", file=sys.stderr)
    else:
        print_page(page, as_json=form is Format.JSON, to=text)
    return text.getvalue()


def _figure_to_sort_by(row: dict[str, Any], sort: Sort) -> float:
    """Return a shape's ratio or best TFLOPS, 0 if it has none."""
    if sort is Sort.RATIO:
        return row["asm_over_best_other"] or 0.0
    return row["backends"][row["best"]]["tflops"] if row["best"] else 0.0
