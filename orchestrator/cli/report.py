"""`gemmfleet report`: write the page of a run, or serve it live."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import JsonOpt, RunArg, RunsOpt
from orchestrator.command_hints import command
from orchestrator.errors import InputError
from orchestrator.ledger.reader import LedgerReader
from orchestrator.pages import Page
from orchestrator.paths import DEFAULT_RUNS, RunPaths, find_run
from orchestrator.report.page import write_report


def report(
    run: RunArg = None,
    runs: RunsOpt = DEFAULT_RUNS,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Write the page here; default: report.html in the run's folder.", metavar="F"),
    ] = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="Write no file: show the page live in a browser here, until Ctrl-C."),
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --live: port; 0: any free one.")] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser of this machine.")] = False,
    json_: JsonOpt = False,
) -> Page | None:
    """Write the page of a run: one HTML file, no server needed.

    With --live: the same page from a server, read-only, updated as the run goes on.
    """
    paths = find_run(runs, run)
    if live and (out is not None or json_):
        raise InputError("--live writes no file: leave --out and --json out")
    if live:
        _serve(paths, port, open_=open_)
        return None
    file, document = write_report(paths, out)
    summary = {"run": document["run"], "state": document["state"], "shapes": document["counts"]}
    result = Page({**summary, "file": str(file), "bytes": file.stat().st_size})
    result.line(*document["sentences"], str(file))
    if open_:
        webbrowser.open(file.absolute().as_uri())
    return result


def _serve(paths: RunPaths, port: int, *, open_: bool) -> None:
    """Serve the page until Ctrl-C. Raises InputError if the server is not installed."""
    try:
        from orchestrator.report.live import PageServer  # uvicorn and starlette are an extra of their own
    except ModuleNotFoundError as e:
        raise InputError(
            f"--live needs {e.name}, which is not installed: make report ARGS=--live, or"
            f" pip install '.[live]' in a checkout of gemmfleet; {command(f'report {paths.named}')} without"
            " --live does not need it"
        ) from e
    LedgerReader.open_readonly(paths.ledger).close()  # a fault of the ledger is reported before anything listens
    server = PageServer(paths, port)
    print(f"run {paths.run}: {server.url}", flush=True)
    print(
        "for the browser of this machine only; from elsewhere: ssh -L PORT:127.0.0.1:PORT; Ctrl-C ends it", flush=True
    )
    if open_:
        webbrowser.open(server.url)
    try:
        server.run()
    except KeyboardInterrupt:
        print("server ended; the run is not affected")
