"""`gemmfleet compare`: judge whether a new stack is slower than a golden one, at a known rate of false alarms."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import DEFAULT_RUNS, JsonOpt, RunsOpt
from worker.text import plural

if TYPE_CHECKING:
    from orchestrator.results.compare import Rule


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
) -> None:
    """Judge a new stack against a golden one, row by row.

    Exit code 1 on a regression, 4 where rows could not be judged.
    """
    from orchestrator.command_hints import command
    from orchestrator.errors import InputError
    from orchestrator.results.comparison import compare as judged
    from orchestrator.results.comparison import read_sides
    from orchestrator.results.output import comparison_markdown
    from orchestrator.tables.faults import escaped

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
    a, b = read_sides({"golden": golden, "tot": tot}, runs, ignore_column or [])
    page = Path(markdown) if markdown not in (None, "-") else None
    _refuse_overwriting([*a.files, *b.files], [p for p in (out, again, page) if p])
    found = judged(a, b, rule=thresholds, bound=bound, under_test=under_test or [], other_gpu=other_gpu,
                   rule_only=rule_only)  # fmt: skip
    written = _write(found, out, again, page)
    if json_:
        print(json.dumps(found))
    elif markdown == "-":
        print(*comparison_markdown(found), sep="\n")
    else:
        _print_verdict(found, str(again or ""))
    for text in found["warnings"]:
        print(f"warning: {escaped(text)}", file=sys.stderr)
    for text in written:
        print(f"written: {escaped(text)}", file=sys.stderr)
    if found["exit_code"]:
        raise typer.Exit(found["exit_code"])


def _rule(text: str, ignore_below: float) -> Rule:
    import math

    from orchestrator.errors import InputError
    from orchestrator.results.compare import Rule
    from orchestrator.tables.faults import shown

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
    from orchestrator.errors import InputError

    inputs = {p.resolve() for p in read}
    for path in write:
        if path.resolve() in inputs:
            raise InputError(f"{path}: is one of the inputs: name another file")
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise InputError(f"{path}: {'is a folder' if path.is_dir() else 'its folder is not there'}")
    if len({p.resolve() for p in write}) < len(write):
        raise InputError("two of --out, --again and --markdown name the same file")


def _write(found: dict[str, Any], out: Path | None, again: Path | None, page: Path | None) -> list[str]:
    from orchestrator.errors import InputError
    from orchestrator.results.comparison import write_again, write_rows
    from orchestrator.results.output import comparison_markdown
    from orchestrator.userfiles import write_atomic

    written = []
    try:
        if out:
            write_rows(found, out)
            written.append(str(out))
        if again:
            write_again(found, again)
            written.append(f"{again} ({plural(found['open'], 'row')} to measure again)")
        if page:
            write_atomic(page, "\n".join(comparison_markdown(found)) + "\n")
            written.append(str(page))
    except OSError as e:
        raise InputError(f"{e.filename or out or again or page}: cannot be written: {e.strerror}") from e
    return written


def _print_verdict(found: dict[str, Any], listed: str) -> None:
    from orchestrator.cli.output.terminal import console
    from orchestrator.results import output
    from orchestrator.tables.faults import escaped

    screen = console()
    for grid in (output.environments(found), output.comparison_table(found)):
        if grid.rows:
            screen.print(output.on_terminal(grid))
    for line in output.comparison_sentences(found, listed):
        print(escaped(line))
