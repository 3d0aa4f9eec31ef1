"""Commands in messages, written so that the user can paste them into the shell that showed the message."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path

NAME = "gemmfleet"


def command(words: str) -> str:
    """`gemmfleet WORDS` as the user can type it here; `words` are quoted already."""
    return f"{program()} {words}"


@cache
def program() -> str:
    """The command for this program: `gemmfleet` if it is on the PATH, else the path of the script, or `python -m`."""
    return called(sys.executable, os.environ.get("PATH", ""), Path.cwd())


def called(python: str, path: str, here: Path) -> str:
    """The command for this program, given the interpreter, PATH and working folder."""
    script = Path(python).parent / NAME
    on_path = shutil.which(NAME, path=path)
    if not script.is_file():
        return NAME if on_path else f"{_way(Path(python), here)} -m orchestrator"
    if on_path and Path(on_path).samefile(script):
        return NAME
    return _way(script, here)


def _way(to: Path, here: Path) -> str:
    """The path, relative if it is below the working folder. Not resolved: the python of an environment is a link."""
    return shlex.quote(str(to.relative_to(here) if to.is_relative_to(here) else to))
