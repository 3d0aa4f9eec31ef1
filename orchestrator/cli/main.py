"""The command line. Commands import what they need when they run, so that --help is instant."""

from __future__ import annotations

import errno
import os
import sys

import typer

from orchestrator import __version__
from orchestrator.cli import (
    analyze,
    bench,
    collect,
    compare,
    db,
    image,
    inspect,
    inventory,
    nodes,
    report,
    runs,
    serve,
    shapes,
    tune,
    verify,
)
from orchestrator.errors import OrchestratorError
from worker.text import uncoloured

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
app = typer.Typer(
    name="gemmfleet",
    help="Tunes GPU GEMM kernels across a fleet, and explains every shape that did not make it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"gemmfleet {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Exit codes: 0 all tuned or skipped; 1 some failed; 2 bad input or usage; 3 no usable node; 130 interrupted."""


app.command("tune")(tune.tune)
app.command("status")(inspect.status)
app.command("logs")(inspect.logs)
app.command("explain")(inspect.explain)
app.command("resume")(tune.resume)
app.command("retry")(tune.retry)
app.command("cancel")(tune.cancel)
app.command("analyze")(analyze.analyze)
app.command("bench")(bench.bench)
app.command("collect")(collect.collect)
app.command("compare")(compare.compare)
app.command("verify")(verify.verify)
app.command("report")(report.report)
app.command("serve")(serve.serve)
app.add_typer(nodes.app, name="nodes")
app.add_typer(runs.app, name="runs")
app.add_typer(shapes.app, name="shapes")
app.add_typer(inventory.app, name="inventory")
app.add_typer(db.app, name="db")
app.add_typer(image.app, name="image")


def main() -> None:
    """Runs the command line; a user's mistake is a message and an exit code, never a traceback."""
    try:
        app()
    except OrchestratorError as e:
        sys.stdout.flush()
        for line in uncoloured(str(e)).splitlines() or [type(e).__name__]:
            print(f"error: {line}" if not line.startswith("  ") else line, file=sys.stderr)
        sys.exit(e.exit_code)
    except OSError as e:
        if e.errno not in NO_ROOM:
            raise
        sys.stdout.flush()
        where = f"{e.filename}: " if e.filename else ""
        print(f"error: {where}{e.strerror}: free some space, or write elsewhere", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # whoever read our output is gone; keep the interpreter from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
