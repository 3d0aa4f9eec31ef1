"""`gemmfleet analyze`: the fastest backend of each shape, speed-ups, and the share of the roofline."""

from __future__ import annotations

import sys
from enum import StrEnum
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from orchestrator.cli.options import DEFAULT_RUNS, JsonOpt, RunsOpt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.analysis.backends.statistics import Reference, Statistics
    from orchestrator.analysis.backends.table import BackendTable, ShapeBest

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
    from orchestrator.analysis.backends.best import backend_table
    from orchestrator.analysis.backends.sources import find_sources
    from orchestrator.analysis.backends.statistics import against_reference, statistics
    from orchestrator.errors import InputError
    from orchestrator.families import get_family
    from orchestrator.tables.faults import escaped

    if json_ and format_ not in (None, Format.JSON):
        raise InputError(f"--json and --format {format_} contradict each other")
    form = Format.JSON if json_ else format_ or (_BY_SUFFIX.get(out.suffix.lower()) if out else None) or Format.TERMINAL
    with find_sources(inputs or [], runs=runs, family=get_family(family) if family else None) as sources:
        if out is not None and any(out.exists() and out.samefile(s.path) for s in sources.files):
            raise InputError(f"{escaped(str(out))} is one of the inputs: name another file with -o")
        table = backend_table(sources, err_ratio)
    stats = statistics(table, chip or _chip_of_reference(reference))
    references = against_reference(table, reference) if reference else ()
    numbered = _sorted(table, sort)
    if out is None:
        _write(sys.stdout, form, table, stats, numbered, references, rows)
    else:
        _to_file(out, form, table, stats, numbered, references)
    if form in (Format.TERMINAL, Format.CSV):
        for note in (*table.notes, *stats.notes):
            print(f"note: {escaped(note)}", file=sys.stderr)


def _chip_of_reference(reference: str | None) -> str | None:
    """Return the chip of published figures, whose roofline applies when they are compared."""
    from orchestrator.planning.roofline import CHIPS

    return reference if reference and reference.lower() in CHIPS else None


def _sorted(table: BackendTable, sort: Sort) -> list[tuple[int, ShapeBest]]:
    numbered = list(enumerate(table.shapes))
    if sort is Sort.TFLOPS:
        numbered.sort(key=lambda at: -(won.tflops if (won := at[1].winner) else 0))
    elif sort is Sort.RATIO:
        numbered.sort(key=lambda at: -(at[1].ratio("asm") or 0))
    return numbered


def _write(
    to: TextIO,
    form: Format,
    table: BackendTable,
    stats: Statistics,
    numbered: Sequence[tuple[int, ShapeBest]],
    references: Sequence[Reference],
    rows: int,
) -> None:
    import json

    from orchestrator.analysis.backends.document import document, write_csv
    from orchestrator.analysis.backends.render import markdown, show

    if form is Format.JSON:
        print(json.dumps(document(table, stats, references), indent=1, ensure_ascii=False, allow_nan=False), file=to)
    elif form is Format.CSV:
        write_csv(table, stats, to)
    elif form is Format.MARKDOWN:
        for line in markdown(table, stats, numbered, references):
            print(line, file=to)
    else:
        from rich.console import Console

        wide = None if to.isatty() else PIPE_WIDTH
        console = Console(file=to, width=wide, no_color=wide is not None or None, highlight=False)
        show(console, table, stats, numbered[: rows or None], references)


def _to_file(
    out: Path,
    form: Format,
    table: BackendTable,
    stats: Statistics,
    numbered: Sequence[tuple[int, ShapeBest]],
    references: Sequence[Reference],
) -> None:
    from orchestrator.errors import InputError
    from orchestrator.tables.faults import escaped
    from orchestrator.userfiles import write_atomic

    text = StringIO()
    _write(text, form, table, stats, numbered, references, 0)
    try:
        write_atomic(out, text.getvalue())
    except OSError as e:
        raise InputError(f"{escaped(str(out))}: cannot be written: {e.strerror or e}") from e
    print(f"written: {escaped(str(out))}", file=sys.stderr)
