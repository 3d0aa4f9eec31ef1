"""`gemmfleet report` and `serve`: the page of a run, as one file or live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import DEFAULT_RUNS, JsonOpt, RunArg, RunsOpt


def report(
    run: RunArg = None,
    runs: RunsOpt = DEFAULT_RUNS,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Write the page here; default: report.html in the run's folder.", metavar="F"),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser of this machine.")] = False,
    json_: JsonOpt = False,
) -> None:
    """Write the page of a run: one HTML file, no server needed."""
    import json

    from orchestrator.analysis.report.page import run_or_folder, write_report

    written = write_report(run_or_folder(runs, run, collected=True), out)
    if json_:
        document = written.document
        about = {"run": document["run"], "state": document["state"], "shapes": document["counts"]}
        print(json.dumps({**about, "file": str(written.path), "bytes": written.bytes}, indent=1))
    else:
        for sentence in written.document["sentences"]:
            print(_plain(sentence))
        print(written.path)
    if open_:
        import webbrowser

        webbrowser.open(written.path.absolute().as_uri())


def _plain(text: str) -> str:
    from orchestrator.cli.output.terminal import plain

    return plain(text, 2000)


def serve(
    run: RunArg = None,
    runs: RunsOpt = DEFAULT_RUNS,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: any that is free.")] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser of this machine.")] = False,
) -> None:
    """Show the page of a run live in a browser of this machine.

    Read-only, until Ctrl-C.
    """
    from orchestrator.analysis.report.page import run_or_folder
    from orchestrator.ledger import LedgerReader
    from orchestrator.serve.server import PageServer

    paths = run_or_folder(runs, run)
    LedgerReader.open_readonly(paths.ledger).close()  # a fault of the ledger is reported before anything listens
    server = PageServer(paths, port)
    print(f"run {paths.run}: {server.url}", flush=True)
    print(
        "for the browser of this machine only; from elsewhere: ssh -L PORT:127.0.0.1:PORT; Ctrl-C ends it", flush=True
    )
    if open_:
        import webbrowser

        webbrowser.open(server.url)
    try:
        server.run()
    except KeyboardInterrupt:
        print("server ended; the run is not affected")
