"""Quoting of command lines and paths for the POSIX shell of a node."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence


def command_line(argv: Sequence[str]) -> str:
    """Command line for the node's login shell. `exec`: no built-in and no keyword of that shell can be meant.

    Raises ValueError for what no command line can carry.
    """
    if not argv or any("\0" in w for w in argv):
        raise ValueError("a command needs words without NUL characters")
    return "exec " + " ".join(map(quote, argv))


def limited_line(argv: Sequence[str], seconds: float) -> str:
    """Command line for a command that the node itself ends, with all that it started in its process group, when it
    takes longer; where the node has `timeout` (of GNU, or a busybox: there the command alone). Who started it need
    not live. Its code is 128 and the number of the signal that ended it.

    Raises ValueError for what no command line can carry.
    """
    words, limit = command_line(argv).removeprefix("exec "), math.ceil(seconds)
    return (
        f'set -- {words}; if timeout -s KILL 9 true 2>/dev/null; then timeout -s KILL {limit} "$@";'
        ' else (exec "$@"); fi; exit "$?"'
    )


def quote(word: str) -> str:
    """Quote as shlex.quote; also `A=b` and a `~` at the beginning."""
    return (
        shlex.quote(word) if "=" not in word and not word.startswith("~") else "'" + word.replace("'", "'\"'\"'") + "'"
    )


def absolute(folder: str) -> str:
    """A path that no command takes for an option; relative ones begin where commands do."""
    return folder if folder.startswith("/") else f"./{folder}"
