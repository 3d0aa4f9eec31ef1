"""`gemmfleet shapes`: check a shape list, or make one from a model, a log or a running workload."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from orchestrator.cli.options import AcceptNewHostKeysOpt, JsonOpt
from orchestrator.cli.printer import Page
from orchestrator.errors import InputError
from orchestrator.families import PadLevel, get_family, grid_point
from orchestrator.shapes.model import Key, Shape, describe, finished, render_shapes, write_list
from worker.families import DEFAULT_FAMILY, FAMILIES, Family
from worker.text import plural
from worker.triton_configs.keys import USUAL_KEYS

if TYPE_CHECKING:
    from orchestrator.shapes.aiter_log import Misses

OutOpt = Annotated[Path | None, typer.Option("-o", "--out", metavar="OUT.csv", help="Default: standard output.")]
ForceOpt = Annotated[bool, typer.Option("--force", help="Replace OUT.csv if it exists.")]
PadOpt = Annotated[bool, typer.Option("--pad-m", help="Round M up to AITER's finest lookup grid; prints the saving.")]
CoarseOpt = Annotated[bool, typer.Option("--pad-m-coarse", help="Round M up to AITER's coarse grid: powers of two.")]
TopOpt = Annotated[int | None, typer.Option("--top", min=1, metavar="N", help="Only the N most frequent.")]
LeastOpt = Annotated[int, typer.Option("--min-count", min=1, metavar="N", help="Only shapes with at least N lines.")]
OneFamilyOpt = Annotated[
    str | None, typer.Option("--family", metavar="F", help="Only this family; default for lines that name none.")
]
ListJsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; needs -o.")]
SetOpt = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="COLUMN=VALUE", help="Value of a key column, such as q_dtype_w; repeatable."),
]
MOST_SHOWN = 10


def check(
    file: Annotated[Path, typer.Argument(metavar="SHAPES.csv", help="The shape list to check.")],
    family: Annotated[str | None, typer.Option("--family", metavar="F", help="GEMM family (default: a16w16).")] = None,
    json_: JsonOpt = False,
) -> Page:
    """Check a shape list as `tune` reads it.

    Prints its counts and the cells that were cleaned, or all errors (exit code 2).
    """
    from orchestrator.planning.plan import risk_notes
    from orchestrator.shapes.reader import family_of_list, read_shapes

    name = family
    try:
        name = family or family_of_list(file) or DEFAULT_FAMILY
        of = get_family(name)
        found = read_shapes(file, of)
    except InputError as e:
        if json_:
            Page({"ok": False, "file": str(file), "family": name, "faults": e.faults}).print(as_json=True)
        raise
    at = of.key_names.index(of.m_column)
    m = [int(s.key[at]) for s in found.shapes]
    groups = len({s.key[:at] + s.key[at + 1 :] for s in found.shapes})
    notes = [*found.notes, *risk_notes(of, (s.key for s in found.shapes))]
    page = Page({
        "ok": True, "file": found.source, "sha256": found.sha256, "family": of.name, "shapes": len(found.shapes),
        "groups": groups, "m": {"column": of.m_column, "min": min(m), "max": max(m)}, "notes": notes,
    })  # fmt: skip
    page.line(f"{found.source}: good, family {of.name}", *(f"  {note}" for note in notes))
    page.line(f"  shapes: {len(found.shapes)}", f"  groups: {groups} (same key columns but {of.m_column})")
    page.line(f"  {of.m_column}: {min(m)}" + (f" to {max(m)}" if max(m) != min(m) else ""))
    return page


def from_model(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.json", help="A model's config.json, or its folder.")],
    m: Annotated[
        str, typer.Option("--m", metavar="LIST", help="Numbers of tokens, such as 1,16,64 (--engine: optional).")
    ] = "",
    engine: Annotated[
        Literal["vllm"] | None, typer.Option("--engine", help="Shapes of the config files that this engine looks up.")
    ] = None,
    family: Annotated[str | None, typer.Option("--family", metavar="F", help="GEMM family (default: a16w16).")] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, metavar="N", help="Ranks of tensor parallelism.")] = 1,
    ep: Annotated[int, typer.Option("--ep", min=1, metavar="N", help="fmoe: ranks that share whole experts.")] = 1,
    fuse_shared: Annotated[
        bool, typer.Option("--fuse-shared", help="fmoe: shared experts run as further routed ones.")
    ] = False,
    layers: Annotated[
        str, typer.Option("--layers", metavar="A,B", help="Only these layers, such as qkv,o,gate_up,down.")
    ] = "",
    set_: SetOpt = None,
    out: OutOpt = None,
    pad_m: PadOpt = False,
    coarse: CoarseOpt = False,
    force: ForceOpt = False,
    json_: ListJsonOpt = False,
) -> Page:
    """List the GEMMs of one rank of a model for `tune`.

    The model may be dense, GQA, MoE or MLA.
    """
    from orchestrator.planning.plan import risk_notes
    from orchestrator.shapes.from_model import model_shapes, parse_m, read_model
    from orchestrator.shapes.vllm_model import vllm_shapes

    _refuse_two_documents(json_, out)
    if engine and layers:
        raise InputError("--layers: not with --engine, whose lists hold every layer; take rows out of OUT.csv")
    columns, only = _columns(set_), [w.strip() for w in layers.split(",") if w.strip()]
    model, of = read_model(config), get_family(family or DEFAULT_FAMILY)
    if engine:
        ms = parse_m(m) if m else USUAL_KEYS
        lists, more = vllm_shapes(model, ms, tp=tp, ep=ep, fuse_shared=fuse_shared, columns=columns)
        lists = {name: found for name, found in lists.items() if family in (None, name)}
    else:
        found = model_shapes(model, of, parse_m(m), tp=tp, ep=ep, fuse_shared=fuse_shared, only=only, columns=columns)
        lists, more = {of.name: found}, []
    if not lists:
        raise InputError([f"no shape of family {family} in the config files that {engine} looks up", *more])
    documents, texts = list[dict[str, object]](), list[str]()
    for name, found in lists.items():
        of, file = FAMILIES[name], _file(out, name, list(lists))
        keys, saving = finished(found.keys, of, _level(pad_m, coarse))
        notes = [*found.notes, *saving, *([] if engine else risk_notes(of, keys))]
        _write(file, keys, of, force)
        documents.append({"family": name, "tp": tp, "shapes": len(keys), "layers": dict(found.layers), "notes": notes})
        texts.append(f"{plural(len(keys), 'shape')} of family {name} for one rank of {tp}")
        texts += [*(f"  {name:14} {what}" for name, what in found.layers), *(f"  {n}" for n in notes)]
    page = Page({"families": documents, "notes": more} if engine else documents[0])
    (page.line if out else page.aside)(*texts, *more)
    page.line(*[f"written: {out}" if len(lists) == 1 else "written: one list per family"] * bool(out))
    return page


def from_log(
    logs: Annotated[list[str], typer.Argument(metavar="LOG...", help="Logs of a workload, also gzip; - for stdin.")],
    family: OneFamilyOpt = None,
    m: Annotated[str, typer.Option("--m", metavar="LIST", help="Numbers of tokens of an engine's config files.")] = "",
    model: Annotated[
        Path | None, typer.Option("--model", metavar="CONFIG.json", help="The model of an engine's MoE config files.")
    ] = None,
    set_: SetOpt = None,
    out: OutOpt = None,
    top: TopOpt = None,
    least: LeastOpt = 1,
    pad_m: PadOpt = False,
    coarse: CoarseOpt = False,
    force: ForceOpt = False,
    json_: ListJsonOpt = False,
) -> Page:
    """List the shapes of a log without a tuned row.

    Most frequent first, as a shape list for `tune`. Reads AITER's lines, vLLM's and SGLang's about a config file that
    is not there, and PyTorch's tunableop_untuned*.csv.
    """
    from orchestrator.shapes.aiter_log import count_misses
    from orchestrator.shapes.from_model import parse_m, read_model
    from orchestrator.shapes.vllm_model import expert_sizes

    _refuse_two_documents(json_, out)
    name = get_family(family).name if family else None
    found = count_misses(logs, name)
    sizes = expert_sizes(read_model(model)) if model else {}
    found.add_files(parse_m(m) if m else USUAL_KEYS, {**sizes, **_columns(set_)})
    lines = f"{plural(found.lines, 'line')} of {plural(len(logs), 'log')}"
    return _misses(found, name, out, _level(pad_m, coarse), force, lines, top, least)


def capture(
    command: Annotated[list[str], typer.Argument(metavar="CMD...", help="The workload, after --.")],
    node: Annotated[
        str | None, typer.Option("--node", metavar="N", help="Run it on this node, where its workers run.")
    ] = None,
    inventory: Annotated[
        Path | None, typer.Option("-i", "--inventory", metavar="INV", help="The inventory with that node.")
    ] = None,
    family: OneFamilyOpt = None,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT.csv", help="Default: captured.csv.")] = Path(
        "captured.csv"
    ),
    top: TopOpt = None,
    least: LeastOpt = 1,
    pad_m: PadOpt = False,
    coarse: CoarseOpt = False,
    force: ForceOpt = False,
    accept_new_host_keys: AcceptNewHostKeysOpt = False,
) -> Page:
    """Run a workload and list its shapes without a tuned row.

    Exit code 1 where the workload failed.
    """
    from orchestrator.inventory.load import load_inventory
    from orchestrator.machines.workload_capture import WorkloadLog, capture_here, capture_on

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
    found.notes += ["config files of vLLM or SGLang are missing: read the log with from-log"] * bool(found.files)
    ended = "" if code == 0 else f", which ended with code {code}"
    source = f"{plural(found.lines, 'line')} of {command[0]}{ended}"
    page = _misses(found, name, out, _level(pad_m, coarse), force, source, top, least)
    page.code = int(code != 0)
    return page


def _misses(
    found: Misses,
    family: str | None,
    out: Path | None,
    level: PadLevel | None,
    force: bool,
    source: str,
    top: int | None,
    least: int,
) -> Page:
    """Write the missed shapes, one list per family, and return what they are. Raises InputError."""
    from orchestrator.planning.plan import risk_notes

    families = [f for f in found.families if family in (None, f)]
    notes = _miss_notes(found, family)
    if not families:
        raise InputError([f"no shape without a tuned row in {source}", *notes])
    documents, texts, risks = [], [source], list[str]()
    for name in families:
        of = FAMILIES[name]
        ranked = found.ranked(name, top, least)
        keys, saving = finished((k for k, _ in ranked), of, level)
        file = _file(out, name, families)
        calls = Counter[tuple[int | str, ...]]()
        for key, n in ranked:
            calls[grid_point(key, of, level) if level else key] += n
        _write(file, keys, of, force, calls)
        lines, to = found.counts[name].total() - found.repeats[name], f" -> {file}" if file else ""
        texts.append(f"{name}: {plural(len(keys), 'shape')} from {plural(lines, 'line')}{to}")
        texts += [f"  {n:8} {describe(k)}" for k, n in ranked[:MOST_SHOWN]]
        texts += [f"  ... and {len(ranked) - MOST_SHOWN} more"] if len(ranked) > MOST_SHOWN else []
        risks += risk_notes(of, keys)
        texts += [f"  {s}" for s in (*saving, *risk_notes(of, keys))]
        counts = [{**dict(zip(of.key_names, k, strict=True)), "count": n} for k, n in ranked]
        documents.append({"family": name, "file": str(file), "shapes": len(keys), "lines": lines, "counts": counts})
    page = Page({"families": documents, "notes": [*notes, *risks]})
    (page.line if out else page.aside)(*texts, *notes)
    if out:
        page.line(f"written: {', '.join(str(_file(out, name, families)) for name in families)}")
    return page


def _miss_notes(found: Misses, family: str | None) -> list[str]:
    from orchestrator.clean import text

    out = list(found.notes)
    others = [f for f in found.families if family not in (None, f)]
    out += [f"left out, of other families: {', '.join(others)}"] if others else []
    if found.unknown:
        lines = plural(found.unknown, "line does not name its family", "lines do not name their family")
        out.append(f"{lines} (a table with a name of its own); give --family")
    return out + [f"left out {plural(n, 'line')}: {text(why, 200)}" for why, n in found.odd.most_common(5)]


def _file(out: Path | None, family: str, families: Sequence[str]) -> Path | None:
    """The file of a family's list, None for standard output. Raises InputError where that would hold several lists."""
    if len(families) == 1:
        return out
    if out is None:
        raise InputError(
            f"shapes of {', '.join(families)}: name one with --family, or give -o OUT.csv for a list of each"
        )
    return out.with_name(f"{out.stem}-{family}{out.suffix}")


def _columns(words: Sequence[str] | None) -> dict[str, str]:
    if wrong := [word for word in words or [] if "=" not in word]:
        raise InputError([f"--set {word[:40]!r}: write COLUMN=VALUE" for word in wrong])
    return {name: value for name, _, value in (word.partition("=") for word in words or [])}


def _level(pad_m: bool, coarse: bool) -> PadLevel | None:
    return "coarse" if coarse else "fine" if pad_m else None


def _refuse_two_documents(json_: bool, out: Path | None) -> None:
    if json_ and out is None:
        raise InputError("--json needs -o: standard output is the shape list without it")


def _write(
    out: Path | None, keys: Sequence[Key], of: Family, force: bool, calls: Mapping[Key, int] | None = None
) -> None:
    """Write a list to its file, or to standard output; with a column `count` where the calls are known."""
    if out is not None:
        write_list(out, keys, of, force=force, calls=calls)
    else:
        sys.stdout.write(render_shapes((Shape(i, key) for i, key in enumerate(keys, 1)), of, calls))
