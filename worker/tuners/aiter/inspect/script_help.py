"""A script's flags by its own --help, where its files do not tell: argparse names options and what takes a value."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from worker.process import Child

HELP_TIMEOUT_S = 300.0
"""A script imports torch and AITER before it reads its arguments."""
_OPTION = re.compile(r"^ {1,8}(-\S.*?)(?: {2,}|$)", re.MULTILINE)
_LONG = re.compile(r"(--[A-Za-z][\w-]*)((?:[ =]\S+)?)")


def flags_of(text: str) -> dict[str, str]:
    """The long options of an argparse help, each `flag` or `value`."""
    out: dict[str, str] = {}
    for m in _OPTION.finditer(text):
        found = _LONG.findall(m[1])
        value = any(v.strip() for _, v in found) or bool(re.search(r"-\w [A-Z{\[]", m[1]))
        for name, _ in found:
            out[name.rstrip(",")] = "value" if value else "flag"
    return out


def ask_help(
    script: Path, env: Mapping[str, str], cwd: Path, log: Path, alive: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """Run the script with --help; its flags, empty where it does not answer."""
    try:
        with open(log, "wb") as out:
            process = Child([sys.executable, str(script), "--help"], env=env, cwd=cwd, out=out.fileno())
    except OSError:
        return {}
    until = time.monotonic() + HELP_TIMEOUT_S
    try:
        while process.returncode is None and time.monotonic() < until:
            alive()
            time.sleep(0.05)
    finally:
        process.kill()
    return flags_of(log.read_text(errors="replace")) if process.returncode == 0 else {}
