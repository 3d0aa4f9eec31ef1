"""`gemmfleet publish`: winners as a branch of a local checkout of AITER, with the text of a pull request."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import DEFAULT_RUNS, JsonOpt, RunsOpt, TableFamilyOpt

if TYPE_CHECKING:
    from orchestrator.tables.publish import Published


def publish(
    sources: Annotated[
        list[str], typer.Argument(metavar="RUN|TABLE...", help="Runs (id or folder) and tuned tables of one model.")
    ],
    onto: Annotated[
        Path, typer.Option("--onto", metavar="CHECKOUT", help="Local checkout of AITER; nothing is pushed.")
    ],
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="The model's name in the names of its files.")],
    base: Annotated[str, typer.Option("--base", metavar="REF", help="Commit or branch to start from.")] = "HEAD",
    branch: Annotated[
        str, typer.Option("--branch", metavar="B", help="Default: gemmfleet/<model>-<families>.", show_default=False)
    ] = "",
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Make the branch again on a newer base, with all checks.")
    ] = False,
    title: Annotated[
        str, typer.Option("--title", metavar="T", help="Title; its data types must be the rows'.", show_default=False)
    ] = "",
    e2e: Annotated[
        str, typer.Option("--e2e", metavar="CMD", help="Exact command of the end-to-end figures.", show_default=False)
    ] = "",
    verify: Annotated[bool, typer.Option("--verify", help="Run AITER's --run_config on the run's nodes.")] = False,
    inventory: Annotated[
        Path | None, typer.Option("-i", "--inventory", metavar="INV", help="Run AITER's --run_config on these nodes.")
    ] = None,
    python: Annotated[
        str,
        typer.Option(
            "--python",
            metavar="PYTHON",
            help="Interpreter of AITER's own checks; default: this one.",
            show_default=False,
        ),
    ] = "",
    checks: Annotated[
        bool, typer.Option("--checks/--no-checks", help="Run AITER's own checks before and after.")
    ] = True,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="Text and logs; default: beside the first source.")
    ] = None,
    family: TableFamilyOpt = None,
    runs: RunsOpt = DEFAULT_RUNS,
    as_json: JsonOpt = False,
) -> None:
    """Commit winners to a branch of a local checkout of AITER.

    Writes the text of a pull request; exit code 1 where a check finds what the base has not.
    """
    from orchestrator.configs.merge import to_publish
    from orchestrator.errors import InputError
    from orchestrator.paths import find_run
    from orchestrator.results.run_facts import RunFacts
    from orchestrator.tables.publish import publish as make

    paths = [Path(s) if Path(s).exists() else find_run(runs, s).root for s in sources]
    first = paths[0]
    nodes = ["-i", str(inventory.absolute())] if inventory else [first.name, "--runs", str(first.absolute().parent)]
    if verify and not inventory and not first.is_dir():
        raise InputError(f"--verify: {first} is no run; name the nodes with -i INV")
    out = out or (first / "publish" if first.is_dir() else first.with_suffix(".publish"))
    runner = str(Path(python).absolute()) if "/" in python else python or sys.executable
    words = nodes if verify or inventory else None
    found = make(
        paths, onto, model, out, RunFacts, to_publish, base=base, branch=branch, refresh=refresh, family=family,
        title=title, e2e=e2e, python=runner if checks else "", runs=runs, verify=words, argv=sys.argv[1:],
    )  # fmt: skip
    _print(found, as_json)
    if not found.ok:
        raise typer.Exit(1)


def _print(found: Published, as_json: bool) -> None:
    from orchestrator.tables.faults import escaped

    rows = [
        {"family": p.family.name, "key": dict(zip(("gfx", "cu_num", *p.family.key_names), r.new.key, strict=True)),
         "outcome": r.action, "why": r.why, "before_us": r.before.us if r.before else None, "after_us": r.after.us,
         "paired": r.rival is not None, "rebuild": r.rebuild}
        for p in found.parts for r in p.rows
    ]  # fmt: skip
    if as_json:
        names = ("branch", "base", "commit", "title", "files", "notes", "missing", "ok")
        document = {n: getattr(found, n) for n in names} | {"text": str(found.text), "rows": rows}
        print(json.dumps({**document, "checks": {name: result for name, result, _ in found.checks}}, indent=1))
        return
    print(escaped(f"{found.branch}: {found.commit[:12]} on {found.base[:12]}: {found.title}"))
    for name, counts in found.files.items():
        print(escaped(f"  {name}: {', '.join(f'{n} {what}' for what, n in counts.items())}"))
    for outcome in ("kept", "refused"):
        some = [r for r in rows if r["outcome"] == outcome]
        print(f"  {outcome}: {len(some)}" + (f", such as: {escaped(str(some[0]['why']))}" if some else ""))
    for name, result, _ in found.checks:
        print(escaped(f"  {name.replace('`', '')}: {result}"))
    print(escaped(f"text of the pull request: {found.text}"))
    for name in found.missing:
        print(escaped(f"note: a review will want it, and it is not recorded: {name}"), file=sys.stderr)
