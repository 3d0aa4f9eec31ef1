"""Entry point: runs a command and turns errors into exit codes."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line (default: of this process).

    A user's mistake ends in a message and an exit code, never in a traceback. Raises SystemExit.
    """
    from orchestrator.cli.app import app
    from orchestrator.errors import OrchestratorError

    try:
        app(args=argv)
    except OrchestratorError as e:
        from worker.text import uncoloured

        sys.stdout.flush()
        for line in uncoloured(str(e)).splitlines() or [type(e).__name__]:
            print(f"error: {line}" if not line.startswith("  ") else line, file=sys.stderr)
        sys.exit(e.exit_code)
    except OSError as e:
        is_full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
        if not (is_full or e.filename):
            raise
        sys.stdout.flush()
        where = f"{e.filename}: " if e.filename else ""
        hint = "free some space, or write elsewhere" if is_full else "was it removed meanwhile, or is it not yours?"
        print(f"error: {where}{e.strerror}: {hint}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        _say_what_was_unprotected()


def _say_what_was_unprotected() -> None:
    """Only a command that ran code of a tree has this module."""
    runner = sys.modules.get("worker.foreign.runner")
    if runner and (note := runner.unprotected()):
        print(f"note: {note}", file=sys.stderr)
