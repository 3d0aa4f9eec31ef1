"""`gemmfleet db export`: make AITER use tuned tables, by environment lines or by files."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import BuildOpt, JsonOpt, TableFamilyOpt, opened_build

if TYPE_CHECKING:
    from orchestrator.tables.build import Build
    from orchestrator.tables.tuned import Table
    from worker.families import Family
    from worker.text import Finding


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
    as_json: JsonOpt = False,
) -> None:
    """Make AITER use tuned tables: environment lines or files.

    Exit code 1 where AITER would fail, or would use none of the rows.
    """
    from orchestrator.errors import InputError
    from orchestrator.tables.export import duplicates, in_build, never_selected, refuse_own

    if (gfx is None) != (cu_num is None):
        raise InputError("give --gfx and --cu-num together: they are a pair in the key of a row")
    if model is not None and (env or at is not None):
        raise InputError("--model writes files for AITER's own folder; it excludes --env and --at")
    sources = _read(tables, family)
    files = [s for some in sources.values() for s in some]
    refuse_own(files)
    only_for_image = gfx is not None and build is not None  # then -i names a node that has the image of --build
    chips = _chips(gfx, cu_num, None if only_for_image else inventory)
    found: list[Finding] = []
    lines: list[str] = []
    written: list[str] = []
    with opened_build(build, inventory) as there:
        checked = [f for s in files for f in in_build(s, there)]
        cannot = there is not None and any(f.level == "error" for f in checked)
        for of, some in sources.items() if not cannot else ():
            found += [f for s in some for f in never_selected(s, chips)]
            if out is None and model is None:
                found += duplicates(some)
                paths = [s.path for s in some]
            else:
                folder = out or Path("model_configs")
                paths = _write(some, folder, model, form, force)
                written += [str(p) for p in paths]
                found += _neighbours(paths[0], of, model)
            if model is None:
                lines.append(_line(of, paths, at))
                found.append(_other_tables_note(of, there))
        found += checked
    failed = any(f.level == "error" for f in found)
    _print_export([] if failed else lines, written, found, as_json, wants_env=model is None)
    if failed:
        raise typer.Exit(1)


def _read(tables: list[Path], family: str | None) -> dict[Family, list[Table]]:
    from orchestrator.errors import InputError
    from orchestrator.tables.locate import family_of
    from orchestrator.tables.tuned import read_table

    out: dict[Family, list[Table]] = {}
    faults: list[str] = []
    for path in dict.fromkeys(p / "tuned.csv" if p.is_dir() else p for p in tables):
        try:
            of = family_of(path, family)
            out.setdefault(of, []).append(read_table(path, of, doubled=True))
        except InputError as e:
            faults += e.faults
    if faults:
        raise InputError(faults)
    return out


def _chips(gfx: str | None, cu_num: int | None, inventory: Path | None) -> set[tuple[str, int]]:
    """Return the target chips: those given, or those of the inventory's nodes (as written there, else probed)."""
    out = {(gfx, cu_num)} if gfx is not None and cu_num is not None else set()
    if inventory is None:
        return out
    from orchestrator.errors import NoUsableNodeError
    from orchestrator.inventory import load_inventory
    from orchestrator.nodes.check import check_nodes

    nodes = load_inventory(inventory).nodes
    out |= {(n.gfx, n.cu_num) for n in nodes.values() if n.gfx and n.cu_num}
    unknown = [n for n in nodes.values() if not (n.gfx and n.cu_num)]
    for report in check_nodes(unknown):
        if report.facts.gfx and report.facts.cu_num:
            out.add((report.facts.gfx, report.facts.cu_num))
        else:
            why = "; ".join(report.problems()) or f"{report.node}: its GPU is unknown"
            raise NoUsableNodeError(f"{why}\ngive gfx and cu_num in the inventory, or --gfx and --cu-num")
    return out


def _write(some: list[Table], folder: Path, model: str | None, form: str | None, force: bool) -> list[Path]:
    from orchestrator.errors import InputError
    from orchestrator.tables.export import FORMS, best_rows, model_names, usual_form
    from orchestrator.tables.write import write_csv

    of = some[0].family
    header, rows = best_rows(some)
    names = [of.tuned_csv]
    if model is not None:
        chosen = next((f for f in FORMS if f == form), None)
        if form is not None and chosen is None:
            raise InputError(f"--form {form[:40]!r}: is none of {', '.join(FORMS)}")
        names = list(model_names(model, of, chosen or usual_form(of), rows))
    contents: list[tuple[tuple[str, ...], list[dict[str, str]]]] = [(header, rows)]
    if len(names) > 1:
        shapes = list({tuple(r.get(n, "") for n in of.key_names): r for r in rows}.values())
        contents.append((of.key_names, shapes))
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in names]
    there = [str(p) for p in paths if p.exists()]
    if there and not force:
        raise InputError(f"{', '.join(there)}: exists; name another folder with -o, or --force to replace")
    for path, (columns, table) in zip(paths, contents, strict=True):
        write_csv(path, of.to_aiter(columns), ([row.get(c, "") for c in columns] for row in table))
    return paths


def _neighbours(written: Path, of: Family, model: str | None) -> list[Finding]:
    """Return duplicates of keys in the same model_configs folder, and in the configs folder above it."""
    if model is None:
        return []
    from orchestrator.tables.export import duplicates
    from orchestrator.tables.locate import shipped_tables
    from orchestrator.tables.tuned import read_table

    folder = written.parent
    above = folder.parent / of.tuned_csv
    files = [*([above] if above.is_file() and folder.name == "model_configs" else []), *shipped_tables(folder, of)]
    return duplicates([read_table(p, of, lenient=True) for p in files])


def _other_tables_note(of: Family, build: Build | None) -> Finding:
    from worker.text import Finding

    text = (
        f"{of.name}: with {of.env} set, AITER reads the listed tables only, none of its own;"
        " name its tables too (with -o DIR) to keep their rows"
    )
    return Finding("note", "tables", "", 0, text + (f": {build.configs / of.tuned_csv}, ..." if build else ""))


def _line(of: Family, paths: list[Path], at: str | None) -> str:
    from orchestrator.errors import InputError

    words = [f"{at.rstrip('/')}/{p.name}" if at is not None else str(p.absolute()) for p in paths]
    bad = [w for w in words if os.pathsep in w]
    if bad:
        raise InputError(f"{bad[0]}: AITER splits the variable at {os.pathsep!r}; give the table another name or place")
    doubled = {w for w in words if words.count(w) > 1}
    if doubled:
        raise InputError(f"--at {at}: two tables would be {min(doubled)}; write one with -o DIR")
    return f"export {of.env}={shlex.quote(os.pathsep.join(words))}"


def _print_export(
    lines: list[str], written: list[str], found: list[Finding], as_json: bool, *, wants_env: bool
) -> None:
    """Print what was exported; with `wants_env` standard output is for `eval` and holds nothing but `lines`."""
    from orchestrator.tables.faults import escaped

    rebuild = any("AITER_REBUILD=1" in f.text for f in found)
    if as_json:
        document: dict[str, Any] = {
            "env": lines,
            "files": written,
            "rebuild": rebuild,
            "findings": [{"level": "fatal" if f.level == "error" else f.level, "text": f.text} for f in found],
        }
        print(json.dumps(document))
        return
    for line in lines:
        print(line)
    if rebuild and lines:
        print("# once, then never again: export AITER_REBUILD=1")
    for name in written:
        print(f"written: {escaped(name)}", file=sys.stderr if wants_env else sys.stdout)
    for f in found:
        first, *rest = f.text.splitlines()
        print("\n".join((f"{f.level}: {escaped(first)}", *map(escaped, rest))), file=sys.stderr)
