"""`gemmfleet shapes`: make shape lists, and check one before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from orchestrator.shapes import ShapeList
    from worker.families import Family


def check(
    file: Annotated[Path, typer.Argument(metavar="SHAPES.csv", help="The shape list to check.")],
    family: Annotated[str | None, typer.Option("--family", metavar="F", help="GEMM family (default: a16w16).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Check a shape list as `tune` reads it.

    Prints its counts and what was cleaned, or all that is wrong (exit code 2).
    """
    from orchestrator.errors import InputError
    from orchestrator.families import get_family
    from orchestrator.shapes import read_shapes
    from worker.families import DEFAULT_FAMILY

    name = family or DEFAULT_FAMILY
    try:
        of = get_family(name)
        summary = summarise(read_shapes(file, of), of)
    except InputError as e:
        if as_json:
            typer.echo(json.dumps({"ok": False, "file": str(file), "family": name, "faults": e.faults}))
        raise
    typer.echo(json.dumps(summary) if as_json else "\n".join(_lines(summary)))


def summarise(found: ShapeList, family: Family) -> dict[str, Any]:
    """The counts of a shape list: shapes, groups (same key columns but M) and the range of M."""
    from orchestrator.planning.risk import risk_notes

    at = family.key_names.index(family.m_column)
    m = [int(s.key[at]) for s in found.shapes]
    return {
        "ok": True,
        "file": found.source,
        "sha256": found.sha256,
        "family": family.name,
        "shapes": len(found.shapes),
        "groups": len({s.key[:at] + s.key[at + 1 :] for s in found.shapes}),
        "m": {"column": family.m_column, "min": min(m), "max": max(m)},
        "notes": [*found.notes, *risk_notes(family, (s.key for s in found.shapes))],
    }


def _lines(summary: dict[str, Any]) -> list[str]:
    from orchestrator.tables.faults import escaped

    m, low, high = summary["m"].values()
    return [
        f"{escaped(summary['file'])}: good, family {summary['family']}",
        *(f"  {note}" for note in summary["notes"]),
        f"  shapes: {summary['shapes']}",
        f"  groups: {summary['groups']} (same key columns but {m})",
        f"  {m}: {low}" + (f" to {high}" if high != low else ""),
    ]
