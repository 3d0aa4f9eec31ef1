"""`gemmfleet analyze`: the fastest backend of each shape, speed-ups, and the share of the roofline."""

from __future__ import annotations

import sys
from enum import StrEnum
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from orchestrator.cli.options import DEFAULT_RUNS, JsonOpt, RunsOpt

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
    from orchestrator.errors import InputError
    from orchestrator.families import get_family
    from orchestrator.results.analyze import analyze as document_of
    from orchestrator.results.measurements import find_sources
    from orchestrator.tables.faults import escaped
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
    _write(sys.stdout if out is None else text, form, found, rows if out is None else 0)
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


def _write(to: TextIO, form: Format, found: dict[str, Any], rows: int) -> None:
    import json

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
