"""`gemmfleet shapes`: check a shape list, or make one from a model, a log or a running workload."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from orchestrator.clean import text as clean_text
from orchestrator.cli.options import AcceptNewHostKeysOpt, JsonOpt
from orchestrator.cli.printer import print_page
from orchestrator.errors import InputError
from orchestrator.families import PadLevel, get_family
from orchestrator.inventory.load import load_inventory
from orchestrator.machines.workload_capture import WorkloadLog, capture_here, capture_on
from orchestrator.pages import Page
from orchestrator.planning.plan import risk_notes
from orchestrator.shapes.aiter_log import Misses, count_misses
from orchestrator.shapes.from_model import ModelShapes, Ranks, model_shapes, parse_m
from orchestrator.shapes.model import Key, describe, pad_calls, render_shapes, write_list
from orchestrator.shapes.model_config import Model, read_model
from orchestrator.shapes.reader import family_of_list, read_shapes
from orchestrator.shapes.vllm_files import file_columns, sglang_shapes, vllm_shapes
from worker.families import DEFAULT_FAMILY, FAMILIES, Family
from worker.text import plural
from worker.triton_configs.m_ranges import USUAL_KEYS

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


def check_list(
    file: Annotated[Path, typer.Argument(metavar="SHAPES.csv", help="The shape list to check.")],
    family: Annotated[str | None, typer.Option(metavar="F", help="GEMM family (default: a16w16).")] = None,
    json_: JsonOpt = False,
) -> Page:
    """Check a shape list as `tune` reads it.

    Prints its counts and the cells that were cleaned, or all errors (exit code 2).
    """
    name = family
    try:
        name = family or family_of_list(file) or DEFAULT_FAMILY
        gemm_family = get_family(name)
        listed = read_shapes(file, gemm_family)
    except InputError as e:
        if json_:
            print_page(Page({"ok": False, "file": str(file), "family": name, "faults": e.faults}), as_json=True)
        raise
    keys = [shape.key for shape in listed.shapes]
    m_column = gemm_family.m_column
    m_place = gemm_family.key_names.index(m_column)
    sizes = [int(key[m_place]) for key in keys]
    smallest = min(sizes)
    largest = max(sizes)
    groups = len({key[:m_place] + key[m_place + 1 :] for key in keys})
    notes = [*listed.notes, *risk_notes(gemm_family, keys)]
    page = Page(
        {
            "ok": True,
            "file": listed.source,
            "sha256": listed.sha256,
            "family": gemm_family.name,
            "shapes": len(keys),
            "groups": groups,
            "m": {"column": m_column, "min": smallest, "max": largest},
            "notes": notes,
        }
    )
    page.line(f"{listed.source}: good, family {gemm_family.name}")
    page.line(*(f"  {note}" for note in notes))
    page.line(f"  shapes: {len(keys)}", f"  groups: {groups} (same key columns but {m_column})")
    page.line(f"  {m_column}: {smallest}" if smallest == largest else f"  {m_column}: {smallest} to {largest}")
    return page


def list_from_model(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.json", help="A model's config.json, or its folder.")],
    m: Annotated[
        str, typer.Option(metavar="LIST", help="Numbers of tokens, such as 1,16,64 (--engine: optional).")
    ] = "",
    engine: Annotated[
        Literal["vllm", "sglang"] | None, typer.Option(help="Shapes of the config files that this engine looks up.")
    ] = None,
    family: Annotated[str | None, typer.Option(metavar="F", help="GEMM family (default: a16w16).")] = None,
    tp: Annotated[int, typer.Option(min=1, metavar="N", help="Ranks of tensor parallelism.")] = 1,
    ep: Annotated[int, typer.Option(min=1, metavar="N", help="fmoe: ranks that share whole experts.")] = 1,
    fuse_shared: Annotated[
        bool, typer.Option("--fuse-shared", help="fmoe: shared experts run as further routed ones.")
    ] = False,
    layers: Annotated[str, typer.Option(metavar="A,B", help="Only these layers, such as qkv,o,gate_up,down.")] = "",
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
    _refuse_two_documents(json_, out)
    if engine and layers:
        raise InputError("--layers: not with --engine, whose lists hold every layer; take rows out of OUT.csv")
    columns = _parse_columns(set_)
    only = [layer.strip() for layer in layers.split(",") if layer.strip()]
    gemm_family = get_family(family or DEFAULT_FAMILY)
    ranks = Ranks(tp, ep, fuse_shared)
    tokens = list(USUAL_KEYS) if engine and not m else parse_m(m)
    model = read_model(config, quantised=_is_quantised(columns))
    engine_notes: list[str] = []
    if engine:
        by_family, engine_notes = _engine_shapes(engine, family, model, tokens, ranks, columns)
    else:
        by_family = {gemm_family.name: model_shapes(model, gemm_family, tokens, ranks, only=only, columns=columns)}
    documents: list[dict[str, Any]] = []
    lines: list[str] = []
    files: list[Path | None] = []
    for name, shapes in by_family.items():
        listed_family = FAMILIES[name]
        calls, saving = pad_calls(shapes.calls, listed_family, _pad_level(pad_m, coarse))
        file = _list_file(out, name, list(by_family))
        _write_list(file, listed_family, force, calls, transformers=model.placed.listing.version)
        notes = [*shapes.notes, *saving]
        if not engine:
            notes += risk_notes(listed_family, calls)
        size = len(calls)
        files.append(file)
        documents.append({"family": name, "tp": tp, "shapes": size, "layers": dict(shapes.layers), "notes": notes})
        lines.append(f"{plural(size, 'shape')} of family {name} for one rank of {tp}")
        lines += [f"  {layer:14} {sizes}" for layer, sizes in shapes.layers]
        lines += [f"  {note}" for note in notes]
    page = Page({"families": documents, "notes": engine_notes} if engine else documents[0])
    _add_summary(page, out, [*lines, *engine_notes])
    if out:
        page.line(f"written: {', '.join(map(str, files))}")
    return page


def _engine_shapes(
    engine: str, family: str | None, model: Model, tokens: Sequence[int], ranks: Ranks, columns: Mapping[str, str]
) -> tuple[dict[str, ModelShapes], list[str]]:
    """(the shapes of the config files that an engine looks up, by family; sentences about them). `family`: only this
    one. Raises InputError."""
    shapes_of = vllm_shapes if engine == "vllm" else sglang_shapes
    by_family, notes = shapes_of(model, tokens, ranks, columns)
    by_family = {name: shapes for name, shapes in by_family.items() if family in (None, name)}
    if not by_family:
        raise InputError([f"no shape of family {family} in the config files that {engine} looks up", *notes])
    return by_family, notes


def list_from_log(
    logs: Annotated[list[str], typer.Argument(metavar="LOG...", help="Logs of a workload, also gzip; - for stdin.")],
    family: OneFamilyOpt = None,
    m: Annotated[str, typer.Option(metavar="LIST", help="Numbers of tokens of an engine's config files.")] = "",
    model: Annotated[
        Path | None, typer.Option(metavar="CONFIG.json", help="The model of an engine's MoE config files.")
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
    _refuse_two_documents(json_, out)
    name = get_family(family).name if family else None
    misses = count_misses(logs, name)
    complete = partial(file_columns, read_model(model)) if model else None
    misses.add_files(parse_m(m) if m else USUAL_KEYS, _parse_columns(set_), complete)
    source = f"{plural(misses.lines, 'line')} of {plural(len(logs), 'log')}"
    return _write_misses(misses, source, _ListOptions(name, out, _pad_level(pad_m, coarse), force, top, least))


def capture(
    command: Annotated[list[str], typer.Argument(metavar="CMD...", help="The workload, after --.")],
    node: Annotated[str | None, typer.Option(metavar="N", help="Run it on this node, where its workers run.")] = None,
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
    name = get_family(family).name if family else None
    if out.exists() and not force:  # before hours of work, not after
        raise InputError(f"{out} exists; name another file with -o, or replace it with --force")
    if (node is None) != (inventory is None):
        raise InputError("--node and -i belong together: a node, and the inventory that has it")

    log = WorkloadLog(name, partial(print, file=sys.stderr, flush=True))
    if node is not None and inventory is not None:
        known = load_inventory(inventory)
        misses, code = capture_on(known, node, command, log, accept_new_host_keys=accept_new_host_keys)
    else:
        misses, code = capture_here(command, log)
    if misses.files:
        misses.notes.append("config files of vLLM or SGLang are missing: read the log with from-log")
    ended = "" if code == 0 else f", which ended with code {code}"
    source = f"{plural(misses.lines, 'line')} of {command[0]}{ended}"
    page = _write_misses(misses, source, _ListOptions(name, out, _pad_level(pad_m, coarse), force, top, least))
    page.code = int(code != 0)
    return page


class _ListOptions(NamedTuple):
    """The options of `from-log` and `capture` for their lists."""

    family: str | None
    """Only this one."""
    out: Path | None
    pad_level: PadLevel | None
    force: bool
    top: int | None
    """At most this many shapes, the most frequent ones."""
    least: int
    """Only shapes with at least this many lines."""


def _write_misses(misses: Misses, source: str, options: _ListOptions) -> Page:
    """Write the shapes without a tuned row, one list per family, and return the page that says what they are. `source`:
    the log in words. Raises InputError."""
    ranked_of, too_rare = _rank_families(misses, options)
    notes = [*too_rare, *_describe_left_out(misses, options.family)]
    if not ranked_of:
        rarely = f" with at least {plural(options.least, 'line')}" if too_rare else ""
        raise InputError([f"no shape without a tuned row or config file{rarely} in {source}", *notes])
    lines = [source]
    documents: list[dict[str, Any]] = []
    all_risks: list[str] = []
    for name, ranked in ranked_of.items():
        family = FAMILIES[name]
        calls, saving = pad_calls(dict(ranked), family, options.pad_level)
        file = _list_file(options.out, name, list(ranked_of))
        _write_list(file, family, options.force, calls)
        logged = misses.counts[name].total() - misses.repeats[name]
        risks = risk_notes(family, calls)
        all_risks += risks
        target = f" -> {file}" if file else ""
        lines.append(f"{name}: {plural(len(calls), 'shape')} from {plural(logged, 'line')}{target}")
        lines += [f"  {n:8} {describe(key)}" for key, n in ranked[:MOST_SHOWN]]
        if len(ranked) > MOST_SHOWN:
            lines.append(f"  ... and {len(ranked) - MOST_SHOWN} more")
        lines += [f"  {note}" for note in (*saving, *risks)]
        counts = [{**family.named_key(key), "count": n} for key, n in ranked]
        documents.append({"family": name, "file": str(file), "shapes": len(calls), "lines": logged, "counts": counts})
    page = Page({"families": documents, "notes": [*notes, *all_risks]})
    _add_summary(page, options.out, [*lines, *notes])
    if options.out:
        page.line(f"written: {', '.join(document['file'] for document in documents)}")
    return page


def _rank_families(misses: Misses, options: _ListOptions) -> tuple[dict[str, list[tuple[Key, int]]], list[str]]:
    """Return the shapes to list with their lines, by family, and a sentence on each family without a frequent one."""
    ranked_of = {}
    too_rare = []
    for name in misses.families:
        if options.family not in (None, name):
            continue
        ranked = misses.ranked(name, options.top, options.least)
        if ranked:
            ranked_of[name] = ranked
            continue
        [(_, most)] = misses.ranked(name, 1, 1)
        too_rare.append(f"left out {name}: its most frequent shape has {plural(most, 'line')} (--min-count)")
    return ranked_of, too_rare


def _describe_left_out(misses: Misses, family: str | None) -> list[str]:
    """Return the notes on a log, and what was not listed: other families, lines without a family, odd lines."""
    notes = list(misses.notes)
    families = dict.fromkeys([*misses.families, *(name for name, _ in misses.files)])
    others = [other for other in families if family not in (None, other)]
    if others:
        notes.append(f"left out, of other families: {', '.join(others)}")
    if misses.unknown:
        lines = plural(misses.unknown, "line does not name its family", "lines do not name their family")
        notes.append(f"{lines} (a table with a name of its own); give --family")
    notes += [f"left out {plural(n, 'line')}: {clean_text(why, 200)}" for why, n in misses.odd.most_common(5)]
    return notes


def _add_summary(page: Page, out: Path | None, lines: Sequence[str]) -> None:
    """Add lines for a person. Without -o, standard output is the list, so they go to standard error."""
    if out:
        page.line(*lines)
    else:
        page.aside(*lines)


def _list_file(out: Path | None, family: str, families: Sequence[str]) -> Path | None:
    """Return the file of a family's list, None for standard output. Raises InputError where that would hold several
    lists."""
    if len(families) == 1:
        return out
    if out is None:
        raise InputError(
            f"shapes of {', '.join(families)}: name one with --family, or give -o OUT.csv for a list of each"
        )
    return out.with_name(f"{out.stem}-{family}{out.suffix}")


def _parse_columns(words: Sequence[str] | None) -> dict[str, str]:
    """Return the key columns of `--set COLUMN=VALUE`. Raises InputError."""
    wrong = [word for word in words or [] if "=" not in word]
    if wrong:
        raise InputError([f"--set {word[:40]!r}: write COLUMN=VALUE" for word in wrong])
    columns = {}
    for word in words or []:
        name, _, value = word.partition("=")
        columns[name] = value
    return columns


def _is_quantised(columns: dict[str, str]) -> bool:
    """Take `quantization` out of the values of --set. Raises InputError for another value than none."""
    value = columns.pop("quantization", None)
    if value not in (None, "none"):
        raise InputError(f"--set quantization={value[:40]}: only none can be set; name a --family for another format")
    return value is None


def _pad_level(pad_m: bool, coarse: bool) -> PadLevel | None:
    if coarse:
        return "coarse"
    return "fine" if pad_m else None


def _refuse_two_documents(json_: bool, out: Path | None) -> None:
    if json_ and out is None:
        raise InputError("--json needs -o: standard output is the shape list without it")


def _write_list(
    out: Path | None, family: Family, force: bool, calls: Mapping[Key, int], transformers: str = ""
) -> None:
    """Write a list to its file, or to standard output; with columns for the calls and the version of transformers, if
    the model's class listed the weights."""
    if out is not None:
        write_list(out, calls, family, force=force, calls=calls, transformers=transformers)
    else:
        sys.stdout.write(render_shapes(calls, family, calls, transformers))
