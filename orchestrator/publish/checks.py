"""AITER's own checks of its tables, run from a worktree before and after a change, with their logs kept.

`test_csv_validation` needs pandas, and reads the shared tables alone. `test_config_shape_collision` (since a77962713b)
drives AITER's own merge; it imports `aiter`, so it needs torch, and skips itself elsewhere. No GPU is needed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from worker.text import and_more

CHECKS = ("test_csv_validation", "test_config_shape_collision")
FOLDER = "op_tests/tuning_tests"
COMMANDS = [f"python3 -m unittest -v op_tests.tuning_tests.{name}" for name in CHECKS]
LIMIT_S = 1800.0
TAIL = 12
_FAILED = re.compile(r"^(?:FAIL|ERROR): (.+)$", re.M)


@dataclass(frozen=True, slots=True)
class CheckRun:
    """One check of one tree. `failing`: its tests that fail; `why`: the reason for which none ran; `tail`: its last
    lines."""

    failing: frozenset[str] = frozenset()
    why: str = ""
    tail: tuple[str, ...] = ()


def run_check(tree: Path, name: str, python: str, jit: Path, log: Path) -> CheckRun:
    """One check of a tree. `jit`: the folder of built modules, which its import may take."""
    if not (tree / FOLDER / f"{name}.py").is_file():
        return CheckRun(why="this AITER has no such check")
    env = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",
        **({"AITER_JIT_DIR": str(jit)} if any(jit.glob("*.so")) else {}),
    }
    argv = [python, *COMMANDS[CHECKS.index(name)].split()[1:]]
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("w") as out:
            code = subprocess.run(
                argv, cwd=tree, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                timeout=LIMIT_S, check=False,
            ).returncode  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as e:
        return CheckRun(why=f"it did not end: {e}")
    return read_output(log.read_text(errors="replace"), code)


def read_output(text: str, code: int) -> CheckRun:
    """The outcome of a run of unittest, by its output and exit code."""
    tail = tuple([line for line in text.splitlines() if line.strip()][-TAIL:])
    ran, skipped = re.search(r"^Ran (\d+) tests?", text, re.M), re.search(r"skipped=(\d+)", text)
    if ran is None:
        return CheckRun(why=f"it did not run: {(tail or (f'exit code {code}',))[-1][:300]}", tail=tail)
    failing = frozenset(_FAILED.findall(text) or ([f"exit code {code}"] if code else []))
    if not failing and skipped and skipped[1] == ran[1]:
        reason = re.search(r"skipped ['\"](.{1,300})['\"]$", text, re.M)
        return CheckRun(why=f"it skips itself: {reason[1] if reason else 'no reason is given'}", tail=tail)
    return CheckRun(failing, tail=tail)


def judged(before: CheckRun, after: CheckRun) -> tuple[bool, str]:
    """(True where nothing fails that held before, a sentence on the check)."""
    new = sorted(after.failing - before.failing)
    if after.why:
        return bool(before.why), f"not run: {after.why}"
    if new:
        return False, f"FAILS: {and_more(new, 5)}"
    return True, f"fails as on the base: {and_more(sorted(after.failing), 5)}" if after.failing else "passes"


def run_verify(words: Sequence[str], table: Path, log: Path) -> tuple[bool, str]:
    """(True where `verify` proved every row of a table, a sentence on it). `words` name the nodes."""
    log.parent.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "orchestrator", "verify", *words, "--table", str(table), "--json", "--verbose"]
    with log.open("w") as out:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=out, text=True, check=False
        )
    try:
        nodes = json.loads(done.stdout)["nodes"]
    except (ValueError, KeyError):
        last = log.read_text(errors="replace").splitlines()[-1:] or [f"exit code {done.returncode}"]
        return False, f"not run: {last[0][:300]}"
    found = []
    for node in nodes:
        proven = sum(row["selected"] and row["verdict"] == "ok" for row in node["rows"])
        found.append(f"{node['node']}: " + (node["why"] or f"{proven} of {len(node['rows'])} rows used and right"))
    return done.returncode == 0, "; ".join(found)
