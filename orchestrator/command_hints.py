"""Commands as the user can type them: what is suggested must run where it is read."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path

NAME = "gemmfleet"


def command(words: str) -> str:
    """`gemmfleet WORDS` as it can be typed here; `words` are quoted already."""
    return f"{program()} {words}"


@cache
def program() -> str:
    """Command of this program: `gemmfleet` where the PATH has it, else the path of the script or the module."""
    return called(sys.executable, os.environ.get("PATH", ""), Path.cwd())


def called(python: str, path: str, here: Path) -> str:
    """Command of this program for an interpreter, a PATH and a working folder."""
    script, found = Path(python).parent / NAME, shutil.which(NAME, path=path)
    if not script.is_file():
        return NAME if found else f"{_way(Path(python), here)} -m orchestrator"
    if found and Path(found).samefile(script):
        return NAME
    return _way(script, here)


def _way(to: Path, here: Path) -> str:
    """Short where it lies below the working folder; not resolved, for an environment's python is a link."""
    return shlex.quote(str(to.relative_to(here) if to.is_relative_to(here) else to))
