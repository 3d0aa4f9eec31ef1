"""Entry point: runs a command and turns errors into exit codes."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from orchestrator.errors import OrchestratorError
from worker.text import uncoloured

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line (default: of this process).

    A user's mistake ends in a message and an exit code, never in a traceback. Raises SystemExit.
    """
    _check_standard_streams()
    try:
        from orchestrator.cli.app import app  # here, because Ctrl-C may come while typer is imported

        app(args=argv)
    except OrchestratorError as e:
        sys.stdout.flush()
        for line in uncoloured(str(e)).splitlines() or [type(e).__name__]:
            print(line if line.startswith("  ") else f"error: {line}", file=sys.stderr)
        sys.exit(e.exit_code)
    except OSError as e:
        if e.errno not in DISK_FULL and not e.filename:
            raise
        sys.stdout.flush()
        print(f"error: {_describe_file_error(e)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        _say_what_was_unprotected()


def _check_standard_streams() -> None:
    """Exit with code 1 if standard output is closed, as by `>&-`. Open /dev/null for the others.

    Python then has None for the stream: `isatty` fails, and what is printed to standard error goes to standard output.
    The next file that is opened gets the number of the closed one, so what a child prints could end up in a ledger.
    """
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if sys.stdout is None:
        print("error: standard output is closed; let it go to a file or to /dev/null", file=sys.stderr)
        sys.exit(1)


def _describe_file_error(error: OSError) -> str:
    """Return what happened to which file, and what to do."""
    where = f"{error.filename}: " if error.filename else ""
    if error.errno == errno.EROFS:
        return f"{where}{error.strerror}: copy it to a disk that can be written, or write elsewhere"
    if error.errno in DISK_FULL:
        return f"{where}{error.strerror}: free some space, or write elsewhere"
    return f"{where}{error.strerror}: was it removed meanwhile, or is it not yours?"


def _say_what_was_unprotected() -> None:
    """Print that code of a tree ran without namespaces of its own. Only a command that ran such code has the module."""
    runner = sys.modules.get("worker.foreign.runner")
    note = runner.unprotected() if runner else ""
    if note:
        print(f"note: {note}", file=sys.stderr)
