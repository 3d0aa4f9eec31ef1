"""`gemmfleet publish`: commit winners to a branch of a local checkout (AITER, vLLM, SGLang), with the text of a pull
request."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import RunsOpt, TableFamilyOpt
from orchestrator.errors import InputError
from orchestrator.files.read import read_text
from orchestrator.pages import Page
from orchestrator.paths import DEFAULT_RUNS, find_run
from orchestrator.publish.aiter_publication import AiterPublication, open_aiter_publication
from orchestrator.publish.engine_publication import EnginePublication, open_engine_publication
from orchestrator.publish.publication import Published, PublishRequest, default_branch, publish_winners

MOST_RESULTS = 1 << 16
"""Bytes of a file with end-to-end results: GitHub refuses a longer text."""


def publish(
    sources: Annotated[
        list[str], typer.Argument(metavar="RUN|TABLE...", help="Runs (id or folder) and tuned tables of one model.")
    ],
    onto: Annotated[
        Path, typer.Option(metavar="CHECKOUT", help="Local checkout of AITER, vLLM or SGLang; nothing is pushed.")
    ],
    model: Annotated[
        str, typer.Option(metavar="NAME", help="The model's name: of AITER's files; for an engine its Hugging Face id.")
    ],
    base: Annotated[str, typer.Option(metavar="REF", help="Commit or branch to start from.")] = "HEAD",
    branch: Annotated[
        str, typer.Option(metavar="B", help="Default: gemmfleet/<model>-<families>.", show_default=False)
    ] = "",
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Make the branch again on a newer base, with all checks.")
    ] = False,
    title: Annotated[
        str, typer.Option(metavar="T", help="Title; its data types must be the rows'.", show_default=False)
    ] = "",
    e2e: Annotated[
        str, typer.Option(metavar="CMD", help="Exact command of the end-to-end figures.", show_default=False)
    ] = "",
    e2e_results: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Their results in Markdown, for the text.", show_default=False)
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Run AITER's --run_config on the run's nodes.")] = False,
    inventory: Annotated[
        Path | None, typer.Option("-i", "--inventory", metavar="INV", help="Run AITER's --run_config on these nodes.")
    ] = None,
    python: Annotated[
        str,
        typer.Option(
            metavar="PYTHON",
            help="Interpreter of AITER's own checks; default: this one.",
            show_default=False,
        ),
    ] = "",
    checks: Annotated[
        bool, typer.Option("--checks/--no-checks", help="Run AITER's own checks before and after.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="Text and logs; default: beside the first source."),
    ] = None,
    family: TableFamilyOpt = None,
    runs: RunsOpt = DEFAULT_RUNS,
) -> Page:
    """Commit winners to a branch of AITER, vLLM or SGLang.

    Writes the text of a pull request; exit code 1 where a check finds what the base has not.
    """
    if not model.strip():
        raise InputError("--model is empty: name the model, such as deepseek-ai/DeepSeek-V3")
    paths = [_path_of(source, runs) for source in sources]
    nodes = _words_for_nodes(paths[0], inventory) if verify or inventory else None
    publication = _open_publication(paths, family)
    if nodes and isinstance(publication, EnginePublication):
        raise InputError("--verify, --inventory: for AITER's rows; an engine's own look-up is asked in any case")
    if family and isinstance(publication, EnginePublication):
        raise InputError("--family: for AITER's tables; name the engine's runs that are to be published")
    branch = branch or default_branch(model, publication.branch_words)
    request = PublishRequest(
        paths,
        onto,
        model,
        out or _default_folder(paths[0], branch),
        branch,
        base=base,
        refresh=refresh,
        title=title,
        e2e=e2e,
        e2e_results=_read_results(e2e_results),
        python=_interpreter(python) if checks else "",
        runs=runs,
        verify=nodes,
        argv=sys.argv[1:],
    )
    return _page_of(publish_winners(request, publication))


def _path_of(source: str, runs: Path) -> Path:
    """Return the path of a source: a table's or a run's folder, or the folder of the run in `runs` that it names."""
    path = Path(source)
    return path if path.exists() else find_run(runs, source).root


def _words_for_nodes(first: Path, inventory: Path | None) -> list[str]:
    """Return the words by which the command `verify` gets its nodes: an inventory's, else those of the first source.

    Raises InputError if that is not a run.
    """
    if inventory:
        return ["-i", str(inventory.absolute())]
    if not first.is_dir():
        raise InputError(f"--verify: {first} is not a run; name the nodes with -i INV")
    return [first.name, "--runs", str(first.absolute().parent)]


def _open_publication(paths: Sequence[Path], family: str | None) -> EnginePublication | AiterPublication:
    """Return the publication for the project that the winners are for."""
    return open_engine_publication(paths) or open_aiter_publication(paths, family)


def _default_folder(first: Path, branch: str) -> Path:
    """Return the folder for text and logs beside the first source. Each branch has a pull request, and so a text, of
    its own."""
    parent = first / "publish" if first.is_dir() else first.with_suffix(".publish")
    return parent / branch.removeprefix("gemmfleet/").replace("/", "-")


def _read_results(file: Path | None) -> str:
    """Return the end-to-end results of `--e2e-results`, "" without it."""
    if file is None:
        return ""
    return read_text(file, MOST_RESULTS, InputError).strip()


def _interpreter(python: str) -> str:
    """Return the interpreter of AITER's own checks: a path, a name to look up, or (for "") this process's own."""
    if "/" in python:
        return str(Path(python).absolute())
    return python or sys.executable


def _page_of(published: Published) -> Page:
    """Return the page of a branch that was made."""
    names = ("branch", "base", "commit", "title", "files", "notes", "missing", "ok")
    document = {name: getattr(published, name) for name in names}
    document |= {"text": str(published.text), "rows": published.rows}
    document["checks"] = {check.name: check.result for check in published.checks}
    page = Page(document, int(not published.ok))
    page.line(f"{published.branch}: {published.commit[:12]} on {published.base[:12]}: {published.title}")
    for file, counts in published.files.items():
        page.line(f"  {file}: {', '.join(f'{n} {outcome}' for outcome, n in counts.items())}")
    for outcome in ("kept", "refused"):
        reasons = [row["why"] for row in published.rows if row["outcome"] == outcome]
        example = f", such as: {reasons[0]}" if reasons else ""
        page.line(f"  {outcome}: {len(reasons)}{example}")
    page.line(*(f"  {check.name.replace('`', '')}: {check.result}" for check in published.checks))
    page.line(f"text of the pull request: {published.text}")
    page.aside(*(f"note: a reviewer will ask for this, and it was not recorded: {name}" for name in published.missing))
    return page
