"""`gemmfleet configs`: merge, restore and check Triton config files of AITER, vLLM and SGLang."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

import typer

from orchestrator.cli.build_tree import opened_tree
from orchestrator.cli.options import BuildNodesOpt, RunsOpt
from orchestrator.command_hints import command
from orchestrator.configs import check, merge
from orchestrator.configs.config_tree import FileChange
from orchestrator.configs.coverage import cover, read_layers
from orchestrator.configs.journal import undo_merge
from orchestrator.errors import InputError
from orchestrator.pages import Page
from orchestrator.paths import DEFAULT_RUNS, find_run
from worker.foreign.runner import ForeignCodeError
from worker.text import LEVELS, plural
from worker.triton_configs.engine_package import INSTALL, ServingEngineError, locate_engine, packages_in
from worker.triton_configs.kinds import ConfigKind
from worker.triton_configs.resolve import CONFIGS

MOST_FINDINGS = 60


def merge_configs(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run id or a prefix of it, or its folder.")],
    into: Annotated[
        Path,
        typer.Option(metavar="TREE", help="Folder with `aiter/`, `vllm/` or `sglang/`, or an override folder."),
    ],
    engine: Annotated[
        Path | None,
        typer.Option(metavar="TREE|WHEEL", help="The vLLM or SGLang that reads the override folder of --into."),
    ] = None,
    allow_default: Annotated[
        bool, typer.Option("--allow-default", help="Default files may change, if all their readers were measured.")
    ] = False,
    shapes: Annotated[
        list[Path] | None,
        typer.Option(metavar="CSV", help="Shapes of yours that read a default file; repeatable."),
    ] = None,
    checked: Annotated[
        list[str] | None,
        typer.Option(metavar="OPERATOR", help="An operator that reads it and that you measured; repeatable."),
    ] = None,
    runs: RunsOpt = DEFAULT_RUNS,
) -> Page:
    """Write the winners of a run into files of AITER, vLLM or SGLang.

    The project's own look-up proves every file before and after; `configs undo` takes the merge back.
    """
    folder = Path(run) if Path(run).is_dir() else find_run(runs, run).root
    merged = merge.merge_run(
        folder, into, engine=engine, default=allow_default, lists=shapes or [], checked=checked or []
    )
    page = Page(merged.to_json())
    for change in merged.changes:
        file = merge.path_below(change.path, merged.tree)
        page.line(f"{file}: {', '.join(change.winner_file.winners)} ({_origin_of(change)})")
        if change.readers:
            page.line(f"  read by {', '.join(change.readers)} as well")
    if merged.proof:
        page.line(f"proven by {merged.proof}: {plural(merged.lookups, 'lookup')} as planned, neighbours as before")
    if merged.changes:
        page.line(f"{command(f'configs undo {quote(str(into))}')} takes it back")
    page.aside(*(f"note: {note}" for note in merged.notes))
    return page


def _origin_of(change: FileChange) -> str:
    """Return where the buckets of a written file come from, beside the winners'."""
    if change.before is not None:
        return "changed"
    if change.source == change.path:
        return "new; every other M gets the default as before"
    is_same_name = change.source.name == change.path.name  # of an override folder and its package
    return f"new; other buckets copied from {change.source if is_same_name else change.source.name}"


def undo_configs(tree: Annotated[Path, typer.Argument(metavar="TREE", help="The tree of the merge.")]) -> Page:
    """Take back the last merge into a tree."""
    undone = undo_merge(tree)
    page = Page(undone)
    page.line(f"the merge of {undone['run']} at {undone['time']} is undone")
    for word in ("restored", "removed"):
        page.line(*(f"  {word}: {name}" for name in undone[word]))
    page.line(f"  older merges left: {undone['left']}")
    return page


def check_configs(
    build: Annotated[
        str,
        typer.Option(metavar="TREE|WHEEL|IMAGE", help="AITER, vLLM or SGLang: its folder, wheel or image."),
    ],
    inventory: BuildNodesOpt = None,
    engine: Annotated[
        str | None,
        typer.Option(metavar="TREE|WHEEL|IMAGE", help="The vLLM that reads the override folder of --build."),
    ] = None,
    project: Annotated[
        Literal["aiter", "vllm", "sglang"] | None,
        typer.Option(help="Which one to check, if there are several."),
    ] = None,
    gfx: Annotated[str | None, typer.Option(metavar="G", help="AITER: only this chip; default: all.")] = None,
    family: Annotated[str | None, typer.Option(metavar="F", help="AITER: only this family, or kind of config.")] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="D", help="vLLM and SGLang: only files of this device, as their names spell it."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(metavar="N=..,K=..", help="Only files of this shape (MoE: E=..,N=..), and the default."),
    ] = None,
    compiling: Annotated[bool, typer.Option("--compile", help="Compile every entry as well; needs Triton.")] = False,
    coverage: Annotated[
        Path | None,
        typer.Option(metavar="LIST|LOG", help="vLLM and SGLang: only say which devices have a file for these layers."),
    ] = None,
) -> Page:
    """Check Triton config files on this machine's CPU.

    Exit code 1 on an error.
    """
    kinds = check.kinds_named(family)
    override = Path(build).expanduser() if engine else None
    if override is not None and not override.is_dir():
        raise InputError(f"--build {build}: with --engine, name an override folder (VLLM_TUNED_CONFIG_FOLDER)")
    with opened_tree(engine or build, inventory, triton=True) as root:
        name = project or ("vllm" if engine else _only_project(root))
        if project and not engine:
            _refuse_missing_project(build, root, project)
        if name == "aiter":
            _refuse_options(name, {"--device": device, "--engine": engine})
        else:
            _refuse_options(name, {"--gfx": gfx, "--family": family})
        if coverage is not None:
            return _show_coverage(root, name, coverage, device)
        if name != "aiter":
            return _check_engine(root, name, override, device, check.sizes_of(shape, "NK", "EN"), compiling)
        sizes = check.sizes_of(shape, "NK")
        chips = [gfx] if gfx else check.chips_of(root)
        if not chips:
            way_out = "give the folder that holds `aiter/`, or for an override folder its vLLM with --engine"
            raise InputError(f"{build}: holds no Triton GEMM configs; {way_out}")
        return _check_aiter(root, chips, kinds, sizes, compiling)


def _only_project(root: Path) -> str:
    """Return the project whose configs lie in a folder; "aiter" if it holds no configs. Raises InputError if it holds
    those of several projects."""
    projects = _projects_in(root)
    if len(projects) > 1:
        raise InputError(f"there are {', '.join(projects)}: say with --project which one to check")
    return projects[0] if projects else "aiter"


def _projects_in(root: Path) -> list[str]:
    """Return the projects whose configs lie in a folder."""
    projects = ["aiter"] if (root / CONFIGS).is_dir() else []
    return projects + [package.project for package in packages_in(root)]


def _refuse_missing_project(build: str, root: Path, project: str) -> None:
    """Raise InputError if a folder holds other projects, and not this one."""
    projects = _projects_in(root)
    if projects and project not in projects:
        raise InputError(f"--project {project}: {build} holds {', '.join(projects)}; leave out --project to check that")


def _refuse_options(project: str, options: Mapping[str, str | None]) -> None:
    """Raise InputError if an option is given that is not for the configs of this project."""
    misplaced = [option for option, value in options.items() if value]
    if misplaced:
        raise InputError(f"{', '.join(misplaced)}: not for the configs of {project}")


def _check_aiter(
    root: Path, chips: Sequence[str], kinds: Sequence[ConfigKind], sizes: dict[str, int], compiling: bool
) -> Page:
    """Check the config files of AITER for these chips."""
    checked = [check.check(root, chip, kinds, sizes, compiling=compiling, progress=_progress) for chip in chips]
    levels = [finding.level for chip in checked for finding in chip.findings]
    errors = levels.count("error")
    warnings = levels.count("warning")
    page = Page({"chips": [asdict(chip) for chip in checked], "errors": errors, "warnings": warnings}, int(errors > 0))
    for chip in checked:
        _add_chip(page, chip)
    page.line(f"{plural(errors, 'error')}, {plural(warnings, 'warning')}")
    return page


def _show_coverage(root: Path, project: str, source: Path, device: str | None) -> Page:
    """Show which devices have a config file of vLLM or SGLang for the layers of a list or log."""
    if project == "aiter":
        raise InputError("--coverage is for the configs of vLLM and SGLang: name a folder with one of them by --build")
    try:
        package = locate_engine(root, project)
    except ServingEngineError as e:
        raise InputError(str(e)) from e
    layers = cover(package, read_layers(source), device)
    page = Page({"project": package.project, "version": package.version, "layers": layers})
    page.line(f"{package.project} {package.version}: {plural(len(layers), 'layer')}")
    rows: list[tuple[str, str, str, str]] = []
    for layer in layers:
        devices = layer["devices"] or {"no device": []}
        rows += [(layer["layer"], layer["dtype"], name, ", ".join(folders)) for name, folders in devices.items()]
    page.table(("layer", "dtype", "device", "folder"), rows, "folder", most=MOST_FINDINGS)
    return page


def _check_engine(
    root: Path, project: str, override: Path | None, device: str | None, sizes: dict[str, int], compiling: bool
) -> Page:
    """Check the config files of vLLM or SGLang: its own, or those of an override folder."""
    try:
        from orchestrator.configs import engine_check  # imports triton
    except ImportError as e:
        raise InputError(f"the configs of {project} are checked with torch and triton ({e}): {INSTALL}") from e
    try:
        package = locate_engine(root, project)
        document = engine_check.check(package, device, sizes, override=override, compiling=compiling, say=_say)
    except ServingEngineError as e:
        raise InputError(str(e)) from e
    except ForeignCodeError as e:
        raise InputError(f"the code of {root} {e}") from e
    findings = document["findings"]
    page = Page({**document, "findings": [asdict(f) for f in findings]}, int(document["errors"] > 0))
    software = f"{document['project']} {document['version']}, Triton {document['triton']}"
    page.line(f"{software}: {plural(document['files'], 'file')}, {document['entries']:,} distinct entries")
    rows = [(f.level, f.rule, f"{f.path}:{f.line}" if f.line else f.path, f.text) for f in findings]
    page.table(("level", "rule", "file:line", "finding"), rows, "finding", most=MOST_FINDINGS)
    page.line(", ".join(plural(document[f"{level}s"], level) for level in LEVELS))
    return page


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        _say(text)


def _say(text: str) -> None:
    print(text, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr)


def _add_chip(page: Page, chip: check.CheckedChip) -> None:
    """Add the findings on the configs of a chip, each with what the compiler made of its bucket."""
    compiled = {(b.path, b.bucket): b for b in chip.buckets if not b.skipped}
    spilling = sum(b.spills > 0 for b in compiled.values())
    buckets = f"{plural(len(compiled), 'bucket')} compiled, {spilling} with spills"
    page.line(f"{chip.gfx}: {plural(chip.files, 'file')}, {buckets}")
    skipped = sorted({b.kind for b in chip.buckets if b.skipped})
    if skipped:
        page.line(f"  not compiled: {', '.join(skipped)}")
    rows = []
    for finding in chip.findings:
        bucket = compiled.get((finding.path, finding.bucket))
        numbers = ("", "", "")
        if bucket and not bucket.error:
            numbers = (str(bucket.spills), str(bucket.vgprs), str(bucket.lds))
        where = f"{Path(finding.path).name}:{finding.line}" if finding.line else finding.path
        rows.append((finding.level, finding.rule, where, finding.bucket, *numbers, finding.text))
    numeric = ("spills", "vgprs", "lds")
    heads = ("level", "rule", "file:line", "bucket", *numeric, "finding")
    page.table(heads, rows, "finding", right=numeric, most=MOST_FINDINGS)
