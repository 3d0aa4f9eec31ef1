"""`gemmfleet configs merge`, `undo` and `check`: AITER's JSON configs of its Triton GEMMs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import DEFAULT_RUNS, JsonOpt, RunsOpt, opened_tree
from worker.text import plural

if TYPE_CHECKING:
    from orchestrator.configs.check import Checked, Size

SHOWN = 60


def merge(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run id or a prefix of it, or its folder.")],
    into: Annotated[Path, typer.Option("--into", metavar="TREE", help="Folder that holds `aiter/`.")],
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
    as_json: JsonOpt = False,
) -> None:
    """Write the winners of a run into the files that AITER loads.

    AITER's own `get_gemm_config` proves every file before and after; `configs undo` takes the merge back.
    """
    from orchestrator.command_hints import command
    from orchestrator.configs.merge import merge as merge_winners
    from orchestrator.paths import find_run
    from orchestrator.tables.faults import escaped

    folder = Path(run) if Path(run).is_dir() else find_run(runs, run).root
    done = merge_winners(folder, into, default=allow_default, lists=shapes or [], checked=checked or [])
    if as_json:
        print(json.dumps(done.to_json(), indent=1))
        return
    for c in done.changes:
        word = f"new; other buckets copied from {c.source.name}" if c.before is None else "changed"
        print(escaped(f"{c.path.relative_to(into)}: {', '.join(c.buckets)} ({word})"))
        if c.callers:
            print(f"  read by {', '.join(c.callers)} as well")
    if done.proof:
        print(f"proven by {done.proof}: {plural(done.lookups, 'lookup')} as planned, neighbours as before")
    if done.changes:
        print(f"{command(f'configs undo {escaped(str(into))}')} takes it back")
    for note in done.notes:
        print(f"note: {escaped(note)}", file=sys.stderr)


def undo(
    tree: Annotated[Path, typer.Argument(metavar="TREE", help="Folder that holds `aiter/`.")], as_json: JsonOpt = False
) -> None:
    """Take back the last merge into a tree."""
    from orchestrator.configs.merge import undo as take_back
    from orchestrator.tables.faults import escaped

    done = take_back(tree)
    if as_json:
        print(json.dumps(asdict(done), indent=1))
        return
    print(f"the merge of {escaped(done.run)} at {escaped(done.time)} is undone")
    for name in (*(f"restored: {n}" for n in done.restored), *(f"removed: {n}" for n in done.removed)):
        print(escaped(f"  {name}"))
    print(f"  older merges left: {done.left}")


def check(
    build: Annotated[
        str, typer.Option("--build", metavar="TREE|IMAGE", help="The folder that holds `aiter/`, or an image.")
    ],
    inventory: Annotated[
        Path | None, typer.Option("-i", "--inventory", metavar="INV", help="Nodes that may have the image of --build.")
    ] = None,
    gfx: Annotated[str | None, typer.Option("--gfx", metavar="G", help="Only this chip; default: all.")] = None,
    family: Annotated[
        str | None, typer.Option("--family", metavar="F", help="Only this family, or kind of config.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option("--shape", metavar="N=..,K=..", help="Only files of this shape, and the default.")
    ] = None,
    lint_only: Annotated[bool, typer.Option("--lint-only", help="Compile nothing; needs no Triton.")] = False,
    as_json: JsonOpt = False,
) -> None:
    """Check AITER's Triton configs on this machine's CPU.

    Lints every file and compiles every bucket; exit code 1 on an error.
    """
    from orchestrator.configs.check import check as check_files
    from orchestrator.configs.check import chips_of
    from orchestrator.errors import InputError
    from worker.triton_configs.kinds import KINDS, kinds_of

    kinds = kinds_of(family) if family else KINDS
    if not kinds:
        known = ", ".join(dict.fromkeys(name for k in KINDS for name in (k.family, k.name) if name))
        raise InputError(f"--family {family}: has no Triton configs; there are {known}")
    size = _size(shape)
    with opened_tree(build, inventory, triton=True) as root:
        chips = [gfx] if gfx else chips_of(root)
        if not chips:
            raise InputError(f"{build}: holds no Triton GEMM configs; give the folder that holds `aiter/`")
        found = [check_files(root, g, kinds, size, compiling=not lint_only, progress=_progress) for g in chips]
    levels = [f.level for c in found for f in c.findings]
    errors, warnings = levels.count("error"), levels.count("warning")
    if as_json:
        print(json.dumps({"chips": [asdict(c) for c in found], "errors": errors, "warnings": warnings}, indent=1))
    else:
        for c in found:
            _print_chip(c)
        print(f"{plural(errors, 'error')}, {plural(warnings, 'warning')}")
    if errors:
        raise typer.Exit(1)


def _size(text: str | None) -> Size:
    """Return N and K of `N=..,K=..`. Raise InputError."""
    from orchestrator.errors import InputError

    parts = dict(p.strip().partition("=")[::2] for p in text.split(",")) if text else {}
    if not parts.keys() <= {"N", "K"} or not all(v.isascii() and v.isdigit() and int(v) for v in parts.values()):
        raise InputError(f"--shape {text}: give N=1280,K=8192 (K the logical one), or one of the two")
    return tuple(int(parts[name]) if name in parts else None for name in "NK")  # type: ignore[return-value]


def _progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {plural(of, 'bucket')} compiled", end="\n" if done == of else "", file=sys.stderr)


def _print_chip(c: Checked) -> None:
    from rich.console import Console
    from rich.table import Table

    compiled = {(b.path, b.bucket): b for b in c.buckets if not b.skipped}
    spilling = sum(b.spills > 0 for b in compiled.values())
    print(f"{c.gfx}: {plural(c.files, 'file')}, {plural(len(compiled), 'bucket')} compiled, {spilling} with spills")
    if skipped := sorted({b.kind for b in c.buckets if b.skipped}):
        print(f"  not compiled: {', '.join(skipped)}")
    table = Table(box=None, pad_edge=False)
    for name in ("level", "rule", "file:line", "bucket", "spills", "vgprs", "lds", "finding"):
        table.add_column(name, justify="right" if name in ("spills", "vgprs", "lds") else "left")
    for f in c.findings[:SHOWN]:
        b = compiled.get((f.path, f.bucket))
        numbers = (str(b.spills), str(b.vgprs), str(b.lds)) if b and not b.error else ("", "", "")
        table.add_row(
            f.level, f.rule, f"{Path(f.path).name}:{f.line}" if f.line else f.path, f.bucket, *numbers, f.text
        )
    if c.findings:
        Console(width=None if sys.stdout.isatty() else 10_000, highlight=False, markup=False).print(table)
    if len(c.findings) > SHOWN:
        print(f"... and {plural(len(c.findings) - SHOWN, 'more finding')} (all with --json)")
