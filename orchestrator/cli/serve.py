"""serve: the page of a run, live."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.options import DEFAULT_RUNS, RunArg, RunsOpt


def serve(
    run: RunArg = None,
    runs: RunsOpt = DEFAULT_RUNS,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: any that is free.")] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser of this machine.")] = False,
) -> None:
    """Show the page of a run live in a browser of this machine.

    Read-only, until Ctrl-C.
    """
    from orchestrator.analysis.report.write import run_or_folder
    from orchestrator.ledger import LedgerReader
    from orchestrator.serve.server import PageServer

    paths = run_or_folder(runs, run)
    LedgerReader.open_readonly(paths.ledger).close()  # what is wrong with it is said before anything listens
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
        print("ended; the run goes on without it")
