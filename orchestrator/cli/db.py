"""`gemmfleet db diff`, `merge` and `undo`: changes of tuned tables."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import JsonOpt, TableFamilyOpt
from orchestrator.command_hints import command
from worker.text import plural

if TYPE_CHECKING:
    from orchestrator.tables.merge import MergeReport
    from orchestrator.tables.policy import MergeRow
    from orchestrator.tables.records import Facts
    from orchestrator.tables.sources import MergeInput

SHOWN = 40


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
    from orchestrator.tables.merge import diff as compare
    from orchestrator.tables.sources import one_family

    found = compare(a, b, one_family([a, b], family))
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for row in found["rows"][:SHOWN]:
        print(escaped(_diff_line(row)))
    if len(found["rows"]) > SHOWN:
        print(f"... and {plural(len(found['rows']) - SHOWN, 'more row')} (all with --json)")
    for word in ("gone", "added"):
        if names := found[f"columns_{word}"]:
            print(escaped(f"columns {word}: {', '.join(names)}"))
    words = {"added": "added", "gone": "gone", "kernel": "of another kernel", "us": "of another time"}
    words |= {"cells": "of other cells", "same": "the same"}
    print(", ".join(f"{n} {words[c]}" for c, n in found["counts"].items() if n) or "no rows")


def _diff_line(row: dict[str, Any]) -> str:
    sides = [s for s in (row["a"], row["b"]) if s is not None]
    times = " -> ".join("no time" if s["us"] is None else f"{s['us']:g} us" for s in sides)
    kernels = " -> ".join(dict.fromkeys(s["kernel"][:60] or "no kernel" for s in sides))
    faster = f"  {row['speedup']:.3f}x" if row["speedup"] is not None else ""
    cells = f"  ({', '.join(row['cells'])})" if row["change"] == "cells" else ""
    return f"{row['change']:6} {shape_of(row['key'])}  {times}{faster}  {kernels}{cells}"


class PolicyName(StrEnum):
    """Values of --policy."""

    BEST = "best"
    NOISE = "noise"
    REPLACE = "replace"


IntoOpt = Annotated[Path, typer.Option("--into", metavar="DB", help="Tuned table to change; created if missing.")]
PolicyOpt = Annotated[
    PolicyName,
    typer.Option(
        "--policy",
        help="Replace an old row if the new one is faster by more than the noise, at all (best), or always (replace).",
    ),
]
MixedOpt = Annotated[bool, typer.Option("--allow-mixed", help="Merge although images or tuner versions differ.")]
ErrOpt = Annotated[
    float, typer.Option("--err-ratio", min=0.0, max=1.0, help="Largest share of wrong elements of a newcomer.")
]


def merge(
    new: Annotated[
        list[Path], typer.Argument(metavar="NEW...", help="Tuned tables, profiles, runs' folders: of one family.")
    ],
    into: IntoOpt,
    policy: PolicyOpt = PolicyName.NOISE,
    profile: Annotated[
        list[Path] | None,
        typer.Option("--profile", metavar="P.csv", help="Profile measured with NEW; repeatable."),
    ] = None,
    allow_mixed: MixedOpt = False,
    err_ratio: ErrOpt = 0.05,
    family: TableFamilyOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Merge the fastest newcomer of each key into a tuned table.

    The old table is kept; `db undo` restores it.
    """
    from orchestrator.results.run_facts import RunFacts
    from orchestrator.tables.sources import open_sources

    sources = open_sources(new, profile or [], into, family, RunFacts)
    report = _merge(sources, into, policy, allow_mixed, err_ratio, sources.facts)
    _print_merge(report, sources, as_json)


def undo(
    table: Annotated[Path, typer.Argument(metavar="DB", help="The tuned table.")],
    as_json: JsonOpt = False,
) -> None:
    """Restore a tuned table as it was before its last merge.

    Restores the provenance records of its rows as well.
    """
    from orchestrator.tables.faults import escaped
    from orchestrator.tables.journal import undo as give_back

    done = give_back(table)
    if as_json:
        print(json.dumps(asdict(done), indent=1))
        return
    print(f"{escaped(done.path)}: restored from {escaped(Path(done.restored).name)}")
    words = {"restored": "restored", "removed": "removed (there were none before)", "left": "unchanged"}
    print(f"  provenance records: {words[done.records]}")
    print(f"  the replaced table: {escaped(done.aside)}")
    print(f"  older versions left: {done.left}")


def _merge(
    sources: MergeInput, into: Path, policy: PolicyName, allow_mixed: bool, err_ratio: float, facts: Facts
) -> MergeReport:
    from orchestrator.tables.merge import merge

    return merge(
        sources.newcomers(), into, sources.family, profile=sources.beside(), facts=facts, policy=policy.value,
        err_ratio=err_ratio, allow_mixed=allow_mixed,
    )  # fmt: skip


def _print_merge(report: MergeReport, sources: MergeInput, as_json: bool) -> None:
    from orchestrator.tables.faults import escaped

    notes = list(dict.fromkeys((*sources.notes, *report.notes)))
    if as_json:
        print(json.dumps({**report.to_json(), "family": sources.family.name, "notes": notes}, indent=1))
        return
    for row in report.rows[:SHOWN]:
        print(escaped(_merge_line(row)))
    if len(report.rows) > SHOWN:
        print(f"... and {plural(len(report.rows) - SHOWN, 'more row')} (all with --json)")
    counts = ", ".join(f"{n} {a}" for a, n in report.to_json()["counts"].items() if n)
    fair = sum(1 for r in report.rows if r.judged == "same profile")
    how = f"; {fair} judged against the old kernel in the same profile" if fair else ""
    print(f"{escaped(report.path)}: {counts or 'no newcomers'} ({report.policy}){how}")
    if report.backup:
        undo = command(f"db undo {escaped(report.path)}")
        print(f"the old table is kept as {escaped(report.backup)}; {undo} restores it")
    for note in notes:
        print(f"note: {escaped(note)}", file=sys.stderr)


def shape_of(key: dict[str, int | str]) -> str:
    """Return chip and shape of a key: `gfx950/256 16x1280x8192`."""
    from orchestrator.shapes import describe
    from orchestrator.tables.tuned import chip_name

    return f"{chip_name(key['gfx'], key['cu_num'])} {describe(v for k, v in key.items() if k != 'cu_num')}"


def _merge_line(row: MergeRow) -> str:
    old = "" if row.old_us is None else f"{row.old_us:g} us -> "
    new = "" if row.new_us is None else f"{row.new_us:g} us"
    rival = "" if row.rival_us is None else f" (old kernel in the same profile: {row.rival_us:g} us)"
    kernel = f"  {row.new_kernel[:60]}" if row.action in ("added", "replaced") else ""
    return f"{row.action:8} {shape_of(row.key)}  {old}{new}{rival}  {row.why}{kernel}"
