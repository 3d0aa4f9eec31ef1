"""`gemmfleet shapes`: check a shape list, or make one from a model, a log or a running workload."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import AcceptNewHostKeysOpt, JsonOpt
from worker.text import plural

if TYPE_CHECKING:
    from orchestrator.families import PadLevel
    from orchestrator.shapes import ShapeList
    from orchestrator.shapes.aiter_log import Misses
    from worker.families import Family

OutOpt = Annotated[Path | None, typer.Option("-o", "--out", metavar="OUT.csv", help="Default: standard output.")]
ForceOpt = Annotated[bool, typer.Option("--force", help="Replace OUT.csv if it exists.")]
PadOpt = Annotated[bool, typer.Option("--pad-m", help="Round M up to AITER's finest lookup grid; prints the saving.")]
CoarseOpt = Annotated[bool, typer.Option("--pad-m-coarse", help="Round M up to AITER's coarse grid: powers of two.")]
TopOpt = Annotated[int | None, typer.Option("--top", min=1, metavar="N", help="Only the N most frequent.")]
LeastOpt = Annotated[int, typer.Option("--min-count", min=1, metavar="N", help="Only shapes with at least N lines.")]
SHOWN = 10


def check(
    file: Annotated[Path, typer.Argument(metavar="SHAPES.csv", help="The shape list to check.")],
    family: Annotated[str | None, typer.Option("--family", metavar="F", help="GEMM family (default: a16w16).")] = None,
    as_json: JsonOpt = False,
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
    """Counts of a shape list: shapes, groups (same key columns but M) and the range of M."""
    from orchestrator.planning.plan import risk_notes

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


def from_model(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.json", help="A model's config.json, or its folder.")],
    m: Annotated[str, typer.Option("--m", metavar="LIST", help="Numbers of tokens, such as 1,16,64,1024.")],
    family: Annotated[str | None, typer.Option("--family", metavar="F", help="GEMM family (default: a16w16).")] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, metavar="N", help="Ranks of tensor parallelism.")] = 1,
    ep: Annotated[int, typer.Option("--ep", min=1, metavar="N", help="fmoe: ranks that share whole experts.")] = 1,
    fuse_shared: Annotated[
        bool, typer.Option("--fuse-shared", help="fmoe: shared experts run as further routed ones.")
    ] = False,
    layers: Annotated[
        str, typer.Option("--layers", metavar="A,B", help="Only these layers, such as qkv,o,gate_up,down.")
    ] = "",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="COLUMN=VALUE", help="Value of a key column, such as q_dtype_w; repeatable."),
    ] = None,
    out: OutOpt = None,
    pad_m: PadOpt = False,
    coarse: CoarseOpt = False,
    force: ForceOpt = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; needs -o.")] = False,
) -> None:
    """List the GEMMs of one rank of a model for `tune`.

    The model may be dense, GQA, MoE or MLA.
    """
    from orchestrator.errors import InputError
    from orchestrator.families import get_family
    from orchestrator.planning.plan import risk_notes
    from orchestrator.shapes.from_model import model_shapes, parse_m, read_model
    from orchestrator.shapes.writing import finished
    from worker.families import DEFAULT_FAMILY

    of = get_family(family or DEFAULT_FAMILY)
    if as_json and out is None:
        raise InputError("--json needs -o: standard output is the shape list without it")
    columns = {}
    for word in set_ or []:
        name, sep, value = word.partition("=")
        if not sep:
            raise InputError(f"--set {word[:40]!r}: write COLUMN=VALUE")
        columns[name] = value
    only = [w.strip() for w in layers.split(",") if w.strip()]
    found = model_shapes(
        read_model(config), of, parse_m(m), tp=tp, ep=ep, fuse_shared=fuse_shared, only=only, columns=columns
    )
    keys, notes = finished(found.keys, of, level_of(pad_m, coarse))
    notes += risk_notes(of, keys)
    head = f"{plural(len(keys), 'shape')} of family {of.name} for one rank of {tp}"
    rows = [f"  {name:14} {what}" for name, what in found.layers]
    write_keys(out, keys, of.name, force)
    summary = {"family": of.name, "tp": tp, "shapes": len(keys), "layers": dict(found.layers)}
    print_summary(
        [head, *rows, *(f"  {n}" for n in (*found.notes, *notes))],
        out,
        {**summary, "notes": [*found.notes, *notes]},
        as_json,
    )


def from_log(
    logs: Annotated[list[str], typer.Argument(metavar="LOG...", help="Logs of a workload, also gzip; - for stdin.")],
    family: Annotated[
        str | None,
        typer.Option("--family", metavar="F", help="Only this family; default for lines that name none."),
    ] = None,
    out: OutOpt = None,
    top: TopOpt = None,
    least: LeastOpt = 1,
    pad_m: PadOpt = False,
    coarse: CoarseOpt = False,
    force: ForceOpt = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; needs -o.")] = False,
) -> None:
    """List the shapes of a log without a tuned row.

    Most frequent first, as a shape list for `tune`.
    """
    from orchestrator.errors import InputError
    from orchestrator.families import get_family
    from orchestrator.shapes.aiter_log import count_misses

    if as_json and out is None:
        raise InputError("--json needs -o: standard output is the shape list without it")
    name = get_family(family).name if family else None
    found = count_misses(logs, name)
    lines = f"{plural(found.lines, 'line')} of {plural(len(logs), 'log')}"
    write_misses(found, name, out, level_of(pad_m, coarse), force, as_json, lines, top, least)


def capture(
    command: Annotated[list[str], typer.Argument(metavar="CMD...", help="The workload, after --.")],
    node: Annotated[
        str | None, typer.Option("--node", metavar="N", help="Run it on this node, where its workers run.")
    ] = None,
    inventory: Annotated[
        Path | None, typer.Option("-i", "--inventory", metavar="INV", help="The inventory with that node.")
    ] = None,
    family: Annotated[
        str | None,
        typer.Option("--family", metavar="F", help="Only this family; default for lines that name none."),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT.csv", help="Default: captured.csv.")] = Path(
        "captured.csv"
    ),
    top: TopOpt = None,
    least: LeastOpt = 1,
    pad_m: PadOpt = False,
    coarse: CoarseOpt = False,
    force: ForceOpt = False,
    accept_new_host_keys: AcceptNewHostKeysOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Run a workload and list its shapes without a tuned row.

    Exit code 1 where the workload failed.
    """
    from orchestrator.errors import InputError
    from orchestrator.families import get_family
    from orchestrator.inventory import load_inventory
    from orchestrator.nodes.command import WorkloadLog, capture_here, capture_on

    name = get_family(family).name if family else None
    if out.exists() and not force:  # before hours of work, not after
        raise InputError(f"{out} exists; name another file with -o, or replace it with --force")
    if (node is None) != (inventory is None):
        raise InputError("--node and -i belong together: a node, and the inventory that has it")

    log = WorkloadLog(name, partial(print, file=sys.stderr, flush=True))
    if node is not None and inventory is not None:
        known = load_inventory(inventory)
        found, code = capture_on(known, node, command, log, accept_new_host_keys=accept_new_host_keys)
    else:
        found, code = capture_here(command, log)
    ended = "" if code == 0 else f", which ended with code {code}"
    source = f"{plural(found.lines, 'line')} of {command[0]}{ended}"
    write_misses(found, name, out, level_of(pad_m, coarse), force, as_json, source, top, least)
    if code != 0:
        raise typer.Exit(1)


def write_misses(
    found: Misses,
    family: str | None,
    out: Path | None,
    level: PadLevel | None,
    force: bool,
    as_json: bool,
    source: str,
    top: int | None = None,
    least: int = 1,
) -> None:
    """Write the missed shapes, one list per family, and print a summary. Raises InputError."""
    from orchestrator.errors import InputError
    from orchestrator.families import grid_point
    from orchestrator.planning.plan import risk_notes
    from orchestrator.shapes.writing import finished
    from worker.families import FAMILIES

    families = [f for f in found.families if family in (None, f)]
    notes = _miss_notes(found, family)
    if not families:
        raise InputError([f"no shape without a tuned row in {source}", *notes])
    if len(families) > 1 and out is None:
        raise InputError(
            f"misses of {', '.join(families)}: name one with --family, or give -o OUT.csv for a list of each"
        )
    documents, texts = [], [source]
    for name in families:
        of = FAMILIES[name]
        ranked = found.ranked(name, top, least)
        keys, saving = finished((k for k, _ in ranked), of, level)
        file = out if out is None or len(families) == 1 else out.with_name(f"{out.stem}-{name}{out.suffix}")
        calls = Counter[tuple[int | str, ...]]()
        for key, n in ranked:
            calls[grid_point(key, of, level) if level else key] += n
        write_keys(file, keys, name, force, calls)
        lines = found.counts[name].total()
        texts.append(
            f"{name}: {plural(len(keys), 'shape')} from {plural(lines, 'line')}" + (f" -> {file}" if file else "")
        )
        texts += [f"  {n:8} {_words(of.key_names, k)}" for k, n in ranked[:SHOWN]]
        texts += [f"  ... and {len(ranked) - SHOWN} more"] if len(ranked) > SHOWN else []
        risks = risk_notes(of, keys)
        notes += risks if as_json else []
        texts += [f"  {s}" for s in (*saving, *risks)]
        counts = [{**dict(zip(of.key_names, k, strict=True)), "count": n} for k, n in ranked]
        documents.append({"family": name, "file": str(file), "shapes": len(keys), "lines": lines, "counts": counts})
    print_summary([*texts, *notes], out, {"families": documents, "notes": notes}, as_json)


def _miss_notes(found: Misses, family: str | None) -> list[str]:
    from orchestrator.ledger.clean import text

    out = list(found.notes)
    others = [f for f in found.families if family not in (None, f)]
    out += [f"left out, of other families: {', '.join(others)}"] if others else []
    if found.unknown:
        lines = plural(found.unknown, "line does not name its family", "lines do not name their family")
        out.append(f"{lines} (a table with a name of its own); give --family")
    return out + [f"{plural(n, 'line')} could not be read: {text(why, 200)}" for why, n in found.odd.most_common(5)]


def _words(names: tuple[str, ...], key: tuple[int | str, ...]) -> str:
    return " ".join(f"{n}={v}" for n, v in zip(names, key, strict=True))


def level_of(pad_m: bool, coarse: bool) -> PadLevel | None:
    """Return the grid of M that the options select, None for none."""
    return "coarse" if coarse else "fine" if pad_m else None


def write_keys(
    out: Path | None,
    keys: list[tuple[int | str, ...]],
    family: str,
    force: bool,
    calls: Mapping[tuple[int | str, ...], int] | None = None,
) -> None:
    """Write a list to its file, or to standard output; with a column `count` where the calls are known."""
    from orchestrator.shapes import Shape, render_shapes
    from orchestrator.shapes.writing import write_list
    from worker.families import FAMILIES

    of = FAMILIES[family]
    if out is not None:
        write_list(out, keys, of, force=force, calls=calls)
    else:
        sys.stdout.write(render_shapes((Shape(i, key) for i, key in enumerate(keys, 1)), of, calls))


def print_summary(lines: list[str], out: Path | None, document: dict[str, Any], as_json: bool) -> None:
    """Print the summary: on standard error where the list itself is on standard output."""
    from orchestrator.tables.faults import escaped

    if as_json:
        print(json.dumps(document))
        return
    for line in lines:
        print(escaped(line), file=sys.stdout if out else sys.stderr)
    if out:
        print(
            f"written: {escaped(str(out))}"
            if len(document.get("families", [0])) == 1
            else "written: one list per family"
        )
