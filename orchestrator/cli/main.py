"""Entry point: prints version and help without typer, or runs a command and turns errors into exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from orchestrator.cli.commands import VERSION, help_of


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line (default: of this process).

    A user's mistake ends in a message and an exit code, never in a traceback. Raises SystemExit.
    """
    program, words = os.path.basename(sys.argv[0]), list(sys.argv[1:] if argv is None else argv)
    program = "python -m orchestrator" if program == "__main__.py" else program
    shown = VERSION if words == ["--version"] else help_of(program, words)
    if shown is None:
        _run(words)
        return
    try:
        print(shown, flush=True)
    except BrokenPipeError:  # the reader is gone; without this the interpreter complains at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _run(words: list[str]) -> None:
    import errno

    from orchestrator.errors import OrchestratorError

    try:
        from orchestrator.cli.app import app

        app(args=words)
    except OrchestratorError as e:
        from worker.text import uncoloured

        sys.stdout.flush()
        for line in uncoloured(str(e)).splitlines() or [type(e).__name__]:
            print(f"error: {line}" if not line.startswith("  ") else line, file=sys.stderr)
        sys.exit(e.exit_code)
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        sys.stdout.flush()
        where = f"{e.filename}: " if e.filename else ""
        print(f"error: {where}{e.strerror}: free some space, or write elsewhere", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
