"""Commands of the command line, run in this process."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from typing import Any

from orchestrator.cli.main import main


@dataclass(frozen=True, slots=True)
class Done:
    """A command that ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Its output, read as one JSON document."""
        return json.loads(self.out)


def command(*argv: str) -> Done:
    """Run `gemmfleet ARGV`; standard output, standard error and the exit code. No user's mistake is a traceback."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    before, sys.argv = sys.argv, ["gemmfleet", *argv]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(argv)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    finally:
        sys.argv = before
    return Done(code, out.getvalue(), err.getvalue())
