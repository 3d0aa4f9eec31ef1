"""`gemmfleet db` and `gemmfleet configs`: compare, change, check and export tuned tables and Triton config files."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from orchestrator.cli.options import BuildNodesOpt, BuildOpt, RunsOpt, TableFamilyOpt
from orchestrator.cli.printer import Page
from orchestrator.command_hints import command
from orchestrator.errors import InputError
from orchestrator.paths import DEFAULT_RUNS, find_run
from worker.text import LEVELS, plural

if TYPE_CHECKING:
    from orchestrator.configs.check import CheckedChip
    from orchestrator.tables.check import Build, Checked
    from orchestrator.tables.policy import MergeRow

MOST_FINDINGS = 60
MOST_PROBLEMS = 200


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A tuned table.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one, of the same family.")],
    family: TableFamilyOpt = None,
) -> Page:
    """Compare two tuned tables row by row.

    Lists the rows added, gone and changed from A to B, with the speed-up of each.
    """
    from orchestrator.tables import locate, merge

    found = merge.diff(a, b, locate.one_family([a, b], family))
    page = Page(found)
    page.lines(map(_diff_line, found["rows"]))
    page.line(*(f"columns {w}: {', '.join(found[f'columns_{w}'])}" for w in ("gone", "added") if found[f"columns_{w}"]))
    words = {"added": "added", "gone": "gone", "kernel": "of another kernel", "us": "of another time"}
    words |= {"cells": "of other cells", "same": "the same"}
    page.line(", ".join(f"{n} {words[c]}" for c, n in found["counts"].items() if n) or "no rows")
    return page


def _diff_line(row: dict[str, Any]) -> str:
    sides = [s for s in (row["a"], row["b"]) if s is not None]
    times = " -> ".join("no time" if s["us"] is None else f"{s['us']:g} us" for s in sides)
    kernels = " -> ".join(dict.fromkeys(s["kernel"][:60] or "no kernel" for s in sides))
    faster = f"  {row['speedup']:.3f}x" if row["speedup"] is not None else ""
    cells = f"  ({', '.join(row['cells'])})" if row["change"] == "cells" else ""
    return f"{row['change']:6} {shape_of(row['key'])}  {times}{faster}  {kernels}{cells}"


def merge(
    new: Annotated[
        list[Path], typer.Argument(metavar="NEW...", help="Tuned tables, profiles, runs' folders: of one family.")
    ],
    into: Annotated[Path, typer.Option("--into", metavar="DB", help="Tuned table to change; created if missing.")],
    policy: Annotated[
        Literal["best", "noise", "replace"],
        typer.Option(
            "--policy",
            help="Replace an old row if the new one is faster by more than the noise, at all (best), or always"
            " (replace).",
        ),
    ] = "noise",
    profile: Annotated[
        list[Path] | None,
        typer.Option("--profile", metavar="P.csv", help="Profile measured with NEW; repeatable."),
    ] = None,
    allow_mixed: Annotated[
        bool, typer.Option("--allow-mixed", help="Merge although images or tuner versions differ.")
    ] = False,
    err_ratio: Annotated[
        float, typer.Option("--err-ratio", min=0.0, max=1.0, help="Largest share of wrong elements of a newcomer.")
    ] = 0.05,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and write nothing.")] = False,
    family: TableFamilyOpt = None,
) -> Page:
    """Merge the fastest newcomer of each key into a tuned table.

    The old table is kept; `db undo` restores it.
    """
    from orchestrator.results.export import RunFacts
    from orchestrator.tables import locate, merge

    opened = locate.open_sources(new, profile or [], into, family, RunFacts)
    report = merge.merge(
        opened.newcomers(), into, opened.family, profile=opened.beside(), facts=opened.facts, policy=policy,
        err_ratio=err_ratio, allow_mixed=allow_mixed, dry_run=dry_run,
    )  # fmt: skip
    notes = list(dict.fromkeys((*opened.notes, *report.notes)))
    page = Page({**report.to_json(), "family": opened.family.name, "notes": notes})
    page.lines(map(_merge_line, report.rows))
    counts = ", ".join(f"{n} {a}" for a, n in report.to_json()["counts"].items() if n)
    fair = sum(1 for r in report.rows if r.judged == "same profile")
    how = f"; {fair} judged against the old kernel in the same profile" if fair else ""
    how += "; nothing was written (--dry-run)" if dry_run else ""
    page.line(f"{report.path}: {counts or 'no newcomers'} ({report.policy}){how}")
    if report.backup:
        page.line(f"the old table is kept as {report.backup}; {command(f'db undo {report.path}')} restores it")
    page.aside(*(f"note: {note}" for note in notes))
    return page


def shape_of(key: dict[str, int | str]) -> str:
    """Return chip and shape of a key: `gfx950/256 16x1280x8192`."""
    from orchestrator.shapes.model import describe
    from orchestrator.tables.tuned import chip_name

    return f"{chip_name(key['gfx'], key['cu_num'])} {describe(v for k, v in key.items() if k != 'cu_num')}"


def _merge_line(row: MergeRow) -> str:
    kernel = f"  {row.new_kernel[:60]}" if row.action in ("added", "replaced") else ""
    return f"{row.action:8} {shape_of(row.key)}  {row.times}  {row.why}{kernel}"


def undo(
    table: Annotated[Path, typer.Argument(metavar="DB", help="The tuned table.")],
) -> Page:
    """Restore a tuned table as it was before its last merge.

    Restores the provenance records of its rows as well.
    """
    from orchestrator.tables import journal

    done = journal.undo(table)
    page = Page(done)
    words = {"restored": "restored", "removed": "removed (there were none before)", "left": "unchanged"}
    page.line(f"{done['path']}: restored from {Path(done['restored']).name}")
    page.line(f"  provenance records: {words[done['records']]}", f"  the replaced table: {done['aside']}")
    page.line(f"  older versions left: {done['left']}")
    return page


def check(
    tables: Annotated[
        list[Path], typer.Argument(metavar="DB...", help="Tuned tables, a run's folder, or a folder of AITER's tables.")
    ],
    family: TableFamilyOpt = None,
    build: BuildOpt = None,
    inventory: BuildNodesOpt = None,
    env: Annotated[
        bool, typer.Option("--env", help="With --build: AITER_CONFIG_... will name them, so AITER's own are not read.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 on a warning, too.")] = False,
    err_ratio: Annotated[
        float, typer.Option("--err-ratio", min=0.0, max=1.0, help="Above it, a warning; with --build, an error.")
    ] = 0.05,
) -> Page:
    """Check tuned tables against AITER's rules.

    Each table alone and all together, with --build as that AITER would serve them; exit code 1 on an error.
    """
    from orchestrator.tables import check, rules

    with opened_build(build, inventory) as there:
        found, faults = check.check(tables, family, err_ratio, there, alone=env)
    errors, warnings = (sum(c.count(level) for c in found) for level in ("error", "warning"))
    problems = [p for c in found for p in c.problems()] if there else []
    verdict = "unsafe" if faults else check.verdict_of(found)
    document = {"tables": [c.to_json() for c in found], "errors": errors, "warnings": warnings, "faults": faults}
    unclean = any(f.rule != rules.REBUILD for c in found for f in c.findings)
    page = Page(
        document | ({"verdict": verdict, "problems": problems} if there else {}), bool(errors or (strict and unclean))
    )
    for c in found:
        _add_table(page, c)
    page.lines((text for c in found for text in c.problem_lines()), "problem", most=MOST_PROBLEMS)
    counts = [(len(found), "table"), (sum(c.rows for c in found), "row"), (errors, "error"), (warnings, "warning")]
    words = [plural(n, what) for n, what in counts]
    held_to = f"{check.VERDICTS[verdict]} {there.name}: " if there else ""
    page.line(f"{held_to}{', '.join(words[:2])}: {', '.join(words[2:])}")
    page.error = InputError(faults) if faults else None
    return page


def _add_table(page: Page, c: Checked) -> None:
    chips = ", ".join(f"{n} of {chip}" for chip, n in sorted(c.chips.items()))
    page.line(f"{c.path}: {c.family or 'unknown family'}, {plural(c.rows, 'row')}" + (f" ({chips})" if chips else ""))
    if c.has_records:
        stale = plural(c.stale, "record")
        page.line(f"  provenance: {plural(c.known, 'row')} known, {c.rows - c.known} not, {stale} stale")
    if c.build:
        words = {
            "loads": "can be loaded", "rebuild": "after a rebuild only", "cannot": "cannot be loaded",
            "unread": "could not be read",
        }  # fmt: skip
        page.line("  build: " + ", ".join(f"{plural(n, 'row')} {words[s]}" for s, n in c.build.items()))


def export(
    tables: Annotated[list[Path], typer.Argument(metavar="DB...", help="Tuned tables, of one family or several.")],
    env: Annotated[bool, typer.Option("--env", help="Print the environment lines (default without --model).")] = False,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Write files named as in AITER's model_configs.")
    ] = None,
    form: Annotated[
        str | None, typer.Option("--form", metavar="FORM", help="model-first or table-first (default: by family).")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="Write one table per family here, one row per key."),
    ] = None,
    at: Annotated[
        str | None, typer.Option("--at", metavar="DIR", help="Folder of the tables as the container of AITER sees it.")
    ] = None,
    family: TableFamilyOpt = None,
    gfx: Annotated[str | None, typer.Option("--gfx", metavar="GFX", help="The chip that will use them.")] = None,
    cu_num: Annotated[int | None, typer.Option("--cu-num", min=1, metavar="N", help="Its compute units.")] = None,
    inventory: Annotated[
        Path | None, typer.Option("-i", "--inventory", metavar="INV", help="Take the chips of these nodes.")
    ] = None,
    build: BuildOpt = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> Page:
    """Make AITER use tuned tables: environment lines or files.

    Exit code 1 where AITER would fail, or would use none of the rows.
    """
    from orchestrator.controller.node_check import chips_of
    from orchestrator.tables import export

    if (gfx is None) != (cu_num is None):
        raise InputError("give --gfx and --cu-num together: they are a pair in the key of a row")
    if model is not None and (env or at is not None):
        raise InputError("--model writes files for AITER's own folder; it excludes --env and --at")
    sources = export.read(tables, family)
    chips = {(gfx, cu_num)} if gfx is not None and cu_num is not None else set()
    if inventory is not None and not (chips and build):  # with both, -i names a node that has the image of --build
        chips |= chips_of(inventory)
    with opened_build(build, inventory) as there:
        made = export.export(sources, chips, there, out=out, model=model, form=form, at=at, force=force)
    rebuild = any("AITER_REBUILD=1" in f.text for f in made.findings)
    findings = [{"level": "fatal" if f.level == "error" else f.level, "text": f.text} for f in made.findings]
    document = {"env": made.env, "files": made.files, "rebuild": rebuild, "findings": findings}
    page = Page(document, made.failed)
    page.line(*made.env)
    if rebuild and made.env:
        page.line("# once, then never again: export AITER_REBUILD=1")
    # without --model standard output is for `eval` and holds nothing but lines of a shell
    (page.aside if model is None else page.line)(*(f"written: {name}" for name in made.files))
    for f in made.findings:
        page.aside(*f"{f.level}: {f.text}".splitlines())
    return page


def merge_configs(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run id or a prefix of it, or its folder.")],
    into: Annotated[
        Path,
        typer.Option("--into", metavar="TREE", help="Folder with `aiter/` or `vllm/`, or an override folder."),
    ],
    engine: Annotated[
        Path | None,
        typer.Option("--engine", metavar="TREE|WHEEL", help="The vLLM that reads the override folder of --into."),
    ] = None,
    allow_default: Annotated[
        bool, typer.Option("--allow-default", help="Default files may change, if all their readers were measured.")
    ] = False,
    shapes: Annotated[
        list[Path] | None,
        typer.Option("--shapes", metavar="CSV", help="Shapes of yours that read a default file; repeatable."),
    ] = None,
    checked: Annotated[
        list[str] | None,
        typer.Option(
            "--checked", metavar="OPERATOR", help="An operator that reads it and that you measured; repeatable."
        ),
    ] = None,
    runs: RunsOpt = DEFAULT_RUNS,
) -> Page:
    """Write the winners of a run into the files that AITER or vLLM loads.

    The project's own look-up proves every file before and after; `configs undo` takes the merge back.
    """
    from orchestrator.configs import merge

    folder = Path(run) if Path(run).is_dir() else find_run(runs, run).root
    done = merge.merge_run(
        folder, into, engine=engine, default=allow_default, lists=shapes or [], checked=checked or []
    )
    page = Page(done.to_json())
    for c in done.changes:
        word = f"new; other buckets copied from {c.source.name}" if c.before is None else "changed"
        word = "new; every other M gets the default as before" if c.before is None and c.source == c.path else word
        page.line(f"{merge.path_below(c.path, done.tree)}: {', '.join(c.won.winners)} ({word})")
        page.line(*[f"  read by {', '.join(c.callers)} as well"] * bool(c.callers))
    if done.proof:
        page.line(f"proven by {done.proof}: {plural(done.lookups, 'lookup')} as planned, neighbours as before")
    if done.changes:
        page.line(f"{command(f'configs undo {into}')} takes it back")
    page.aside(*(f"note: {note}" for note in done.notes))
    return page


def undo_configs(tree: Annotated[Path, typer.Argument(metavar="TREE", help="The tree of the merge.")]) -> Page:
    """Take back the last merge into a tree."""
    from orchestrator.configs import merge

    done = merge.undo_merge(tree)
    page = Page(done)
    page.line(f"the merge of {done['run']} at {done['time']} is undone")
    page.line(*(f"  {word}: {n}" for word in ("restored", "removed") for n in done[word]))
    page.line(f"  older merges left: {done['left']}")
    return page


def check_configs(
    build: Annotated[
        str,
        typer.Option("--build", metavar="TREE|WHEEL|IMAGE", help="AITER, vLLM or SGLang: its folder, wheel or image."),
    ],
    inventory: BuildNodesOpt = None,
    project: Annotated[
        Literal["aiter", "vllm", "sglang"] | None,
        typer.Option("--project", help="Which one to check, if there are several."),
    ] = None,
    gfx: Annotated[str | None, typer.Option("--gfx", metavar="G", help="AITER: only this chip; default: all.")] = None,
    family: Annotated[
        str | None, typer.Option("--family", metavar="F", help="AITER: only this family, or kind of config.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="D", help="vLLM and SGLang: only files of this device, as their names spell it."
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape", metavar="N=..,K=..", help="Only files of this shape (MoE: E=..,N=..), and the default."
        ),
    ] = None,
    compiling: Annotated[bool, typer.Option("--compile", help="Compile every entry as well; needs Triton.")] = False,
) -> Page:
    """Check Triton config files on this machine's CPU.

    Exit code 1 on an error.
    """
    from orchestrator.configs import check

    kinds = check.kinds_named(family)
    with opened_tree(build, inventory, triton=True) as root:
        name = _project(root, project)
        foreign = {"--device": device} if name == "aiter" else {"--gfx": gfx, "--family": family}
        if given := [option for option, value in foreign.items() if value]:
            raise InputError(f"{', '.join(given)}: not for the configs of {name}")
        if name != "aiter":
            return _check_engine(root, name, device, check.sizes_of(shape, "NK", "EN"), compiling)
        size = check.sizes_of(shape, "NK")
        chips = [gfx] if gfx else check.chips_of(root)
        if not chips:
            raise InputError(f"{build}: holds no Triton GEMM configs; give the folder that holds `aiter/`")
        sizes = size.get("N"), size.get("K")
        found = [check.check(root, g, kinds, sizes, compiling=compiling, progress=_progress) for g in chips]
    levels = [f.level for c in found for f in c.findings]
    errors, warnings = levels.count("error"), levels.count("warning")
    page = Page({"chips": [asdict(c) for c in found], "errors": errors, "warnings": warnings}, bool(errors))
    for c in found:
        _add_chip(page, c)
    page.line(f"{plural(errors, 'error')}, {plural(warnings, 'warning')}")
    return page


def _project(root: Path, asked: str | None) -> str:
    """The project whose configs are checked. Raises InputError if there are several."""
    there = [
        p
        for p in ("aiter", "vllm", "sglang")
        if p == Path(os.path.abspath(root)).name or any((root / d / p).is_dir() for d in (".", "python"))
    ]
    if asked is None and len(there) > 1:
        raise InputError(f"there are {', '.join(there)}: say with --project which one to check")
    return asked or next(iter(there), "aiter")


def _check_engine(root: Path, project: str, device: str | None, sizes: dict[str, int], compiling: bool) -> Page:
    from worker.foreign.runner import ForeignCodeError
    from worker.triton_configs.engine_package import ServingEngineError

    try:
        from orchestrator.configs import engine_check

        own = root / project
        c = engine_check.check(own if own.is_dir() else root, device, sizes, compiling=compiling, say=_say)
    except (ServingEngineError, ImportError, ForeignCodeError) as e:
        raise InputError(str(e)) from e
    findings = c["findings"]
    page = Page({**c, "findings": [asdict(f) for f in findings]}, bool(c["errors"]))
    about = f"{c['project']} {c['version']}, Triton {c['triton']}"
    page.line(f"{about}: {plural(c['files'], 'file')}, {c['entries']:,} distinct entries")
    rows = [(f.level, f.rule, f"{f.path}:{f.line}" if f.line else f.path, f.text) for f in findings]
    page.table(("level", "rule", "file:line", "finding"), rows, "finding", most=MOST_FINDINGS)
    page.line(", ".join(plural(c[f"{level}s"], level) for level in LEVELS))
    return page


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        _say(text)


def _say(text: str) -> None:
    print(text, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr)


def _add_chip(page: Page, c: CheckedChip) -> None:
    compiled = {(b.path, b.bucket): b for b in c.buckets if not b.skipped}
    spilling = sum(b.spills > 0 for b in compiled.values())
    page.line(f"{c.gfx}: {plural(c.files, 'file')}, {plural(len(compiled), 'bucket')} compiled, {spilling} with spills")
    if skipped := sorted({b.kind for b in c.buckets if b.skipped}):
        page.line(f"  not compiled: {', '.join(skipped)}")
    rows = []
    for f in c.findings:
        b = compiled.get((f.path, f.bucket))
        numbers = (str(b.spills), str(b.vgprs), str(b.lds)) if b and not b.error else ("", "", "")
        where = f"{Path(f.path).name}:{f.line}" if f.line else f.path
        rows.append((f.level, f.rule, where, f.bucket, *numbers, f.text))
    heads = ("level", "rule", "file:line", "bucket", "spills", "vgprs", "lds", "finding")
    page.table(heads, rows, "finding", right=heads[4:7], most=MOST_FINDINGS)


@contextmanager
def opened_build(build: str | None, inventory: Path | None) -> Iterator[Build | None]:
    """Yield the build of `--build TREE|IMAGE`, None without one. Raises as `opened_tree`."""
    from orchestrator.tables.check import Build

    if build is None:
        yield None
        return
    with opened_tree(build, inventory) as path:
        yield Build(path, build, whole=not Path(build).expanduser().is_dir())


@contextmanager
def opened_tree(build: str, inventory: Path | None, *, triton: bool = False) -> Iterator[Path]:
    """Yield the folder of `--build TREE|IMAGE`, which holds `aiter/`; `triton`: an image's Triton operators suffice.

    The files of an image are copied out of a container that is created and never started, by the Docker of this
    machine, or of the first node of the inventory that has the image. Raises InputError, NodeError.
    """
    path = Path(build).expanduser()
    if path.is_dir():
        yield path
        return
    wheel = triton and path.suffix == ".whl"
    if not wheel and (path.exists() or build.startswith(("/", "./", "../", "~")) or not build):
        raise InputError(
            f"--build {build}: is neither a folder with an AITER (a checkout, or site-packages) nor an image"
        )
    from orchestrator.image.build import ENGINES, EVERYTHING, TRITON, take_out
    from worker.triton_configs.engine_package import ServingEngineError, unpack_wheel

    with tempfile.TemporaryDirectory(prefix="gemmfleet-build-") as scratch:
        if not wheel:
            take_out(build, Path(scratch), inventory, (*TRITON, *ENGINES) if triton else EVERYTHING)
        try:
            yield unpack_wheel(path, Path(scratch)) if wheel else Path(scratch)
        except ServingEngineError as e:
            raise InputError(f"--build {build}: {e}") from e
