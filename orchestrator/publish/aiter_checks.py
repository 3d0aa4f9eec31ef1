"""AITER's own checks of its tables, and `verify` on nodes: run before and after a change, with their logs kept.

`test_csv_validation` needs pandas, and reads the shared tables alone. `test_config_shape_collision` (since a77962713b)
drives AITER's own merge; it imports `aiter`, so it needs torch, and skips itself elsewhere. No GPU is needed.
"""

from __future__ import annotations

import json
import os
import re
import site
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.foreign.runner import ForeignCodeError, Limits, run
from worker.text import and_more, tail

CHECKS = ("test_csv_validation", "test_config_shape_collision")
FOLDER = "op_tests/tuning_tests"
"""The folder of the checks in a tree."""
COMMANDS = [f"python3 -m unittest -v op_tests.tuning_tests.{name}" for name in CHECKS]
"""The command of each check; the text of the pull request has them too."""
CHECK_LIMITS = Limits(seconds=1800, memory=32 << 30, output=1 << 30, processes=1024)
MOST_OUTPUT = 4 << 20
"""Bytes of a check's output that are read, its last ones: unittest names the failing tests at the end."""
MAX_LINE = 1000
"""Most characters of a line of it."""
TAIL_LINES = 12
"""Last lines of a check's output that the pull request's text quotes."""
MAX_REASON = 300
"""Most characters of a foreign message in a sentence."""
MAX_TESTS = 5
"""Most tests that a sentence names."""
_FAILED = re.compile(r"^(?:FAIL|ERROR): (.+)$", re.M)


@dataclass(frozen=True, slots=True)
class CheckRun:
    """The outcome of one check in one tree."""

    failing: frozenset[str] = frozenset()
    """Its tests that fail."""
    why: str = ""
    """The reason why no test ran, "" if they did."""
    tail: tuple[str, ...] = ()
    """Its last lines."""


def run_check(tree: Path, name: str, python: str, jit: Path, log: Path) -> CheckRun:
    """Run one check in a tree, with its output in `log`. `jit`: the folder of built modules, which `import aiter` in
    the check may take."""
    if not (tree / FOLDER / f"{name}.py").is_file():
        return CheckRun(why="this AITER has no such check")
    env = {"PYTHONUSERBASE": site.getuserbase()}  # the home that the check sees is empty
    if "PYTHONPATH" in os.environ:
        env["PYTHONPATH"] = os.environ["PYTHONPATH"]
    if any(jit.glob("*.so")):
        env["AITER_JIT_DIR"] = str(jit)
    argv = [python, *COMMANDS[CHECKS.index(name)].split()[1:]]
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("w+b") as output:
            code = run(argv, output, cwd=tree, env=env, limits=CHECK_LIMITS)
            lines = tail(output.fileno(), 0, MOST_OUTPUT).splitlines()
    except ForeignCodeError as e:
        return CheckRun(why=f"it {e}")
    except OSError as e:
        return CheckRun(why=f"it could not be started: {e.strerror or e}")
    return read_output("\n".join(line[:MAX_LINE] for line in lines), code)


def read_output(text: str, code: int) -> CheckRun:
    """The outcome of a run of unittest by its output and exit code."""
    exit_code = f"exit code {code}"
    last_lines = tuple([line for line in text.splitlines() if line.strip()][-TAIL_LINES:])
    tests_run = re.search(r"^Ran (\d+) tests?", text, re.M)
    if tests_run is None:
        last = last_lines[-1] if last_lines else exit_code
        return CheckRun(why=f"it did not run: {last[:MAX_REASON]}", tail=last_lines)
    failing = _FAILED.findall(text)
    if code and not failing:
        failing = [exit_code]
    skipped = re.search(r"skipped=(\d+)", text)
    if not failing and skipped and skipped[1] == tests_run[1]:
        reason = re.search(r"skipped ['\"](.{1,300})['\"]$", text, re.M)
        return CheckRun(why=f"it skips itself: {reason[1] if reason else 'no reason is given'}", tail=last_lines)
    return CheckRun(frozenset(failing), tail=last_lines)


def compare_runs(before: CheckRun, after: CheckRun) -> tuple[bool, str]:
    """(whether no test fails that did not fail on the base, a sentence on the check). If the base did not run, every
    failure counts as new."""
    if after.why:
        return bool(before.why), f"not run: {after.why}"
    new = sorted(after.failing - before.failing)
    if new:
        return False, f"FAILS: {and_more(new, MAX_TESTS)}"
    if after.failing:
        return True, f"fails as on the base: {and_more(sorted(after.failing), MAX_TESTS)}"
    return True, "passes"


def run_verify(words: Sequence[str], table: Path, log: Path) -> tuple[bool, str]:
    """Run the command `verify` on a table: (True if it proved every row, a sentence on it). `words` name the nodes."""
    log.parent.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "orchestrator", "verify", *words, "--table", str(table), "--json", "--verbose"]
    with log.open("w") as stderr:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True, check=False
        )
    try:
        nodes = json.loads(done.stdout)["nodes"]
    except (ValueError, KeyError):
        last = log.read_text(errors="replace").splitlines()[-1:] or [f"exit code {done.returncode}"]
        return False, f"not run: {last[0][:MAX_REASON]}"
    return done.returncode == 0, "; ".join(f"{node['node']}: {_describe_node(node)}" for node in nodes)


def _describe_node(node: Mapping[str, Any]) -> str:
    """The sentence on one node, by the document of `verify`."""
    if node["why"]:
        return str(node["why"])
    proven = sum(1 for row in node["rows"] if row["selected"] and row["verdict"] == "ok")
    text = f"{proven} of {len(node['rows'])} rows used and right"
    how = node.get("aiter", {}).get("how")
    return f"{text} ({how})" if how else text
