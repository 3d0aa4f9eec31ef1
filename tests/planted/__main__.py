"""Plant each bug in a copy of the checkout and run its tests there: `python -m tests.planted` (`make planted`)."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.paths import ROOT
from tests.planted.bugs import BUGS, LAWS, Bug

FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
TIME_LIMIT_S = 300
"""Limit of one test: a bug may make it hang, and then it is caught."""
FAILURES = 1
"""pytest's exit code where tests ran and some failed. With any other one but 0 nothing was judged."""


def copied(root: Path) -> Path:
    """Copy all files of the checkout that git knows or does not ignore."""
    argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for file in filter(None, listed.split("\0")):
        if (ROOT / file).is_file():
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, root / file)
    return root


def plant(bug: Bug, root: Path) -> bool:
    """Put the bug into a tree. False: the old text is not there exactly once, and nothing was changed."""
    path = root / bug.file
    text = path.read_text() if path.is_file() else ""
    if text.count(bug.old) != 1:
        return False
    path.write_text(text.replace(bug.old, bug.new))
    return True


def run_tests(root: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests of a tree up to the first failure: pytest's exit code, and what it printed."""
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--timeout={TIME_LIMIT_S}",
        "-n",
        "0",
    ]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH", ""))))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([*argv, *tests], cwd=root, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def judge(bug: Bug, folder: Path) -> tuple[bool, str]:
    """Plant one bug in a copy of its own: whether a test fails, and that in words."""
    root = copied(folder / bug.name)
    try:
        if not plant(bug, root):
            return False, f"CANNOT BE PLANTED: its text does not stand exactly once in {bug.file}"
        code, out = run_tests(root, bug.tests)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    failed = FAILED.search(out)
    if code == FAILURES and failed is not None:
        return True, f"caught by {failed[1]}"
    return False, "NOT CAUGHT" if code == 0 else f"NOT JUDGED: pytest ended with code {code}\n{out[-2000:]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Judge the bugs and print a line for each; 1 where one is not caught or cannot be planted."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="this bug alone; may be given several times")
    parser.add_argument("-j", type=int, default=2, metavar="N", help="run this number of bugs at once (default 2)")
    options = parser.parse_args(argv)
    names = {b.name for b in BUGS}
    if unknown := sorted(set(options.only or ()) - names):
        parser.error(f"there is no bug {', '.join(unknown)} (there are {', '.join(sorted(names))})")
    bugs = [b for b in BUGS if not options.only or b.name in options.only]
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        folder, lock = Path(name), threading.Lock()
        code, out = run_tests(copied(folder / "sound"), sorted({t for b in bugs for t in b.tests}))
        if code != 0:
            print(f"without any bug these tests fail or do not run, so they can judge nothing:\n{out[-4000:]}")
            return 1

        def one(bug: Bug) -> bool:
            caught, words = judge(bug, folder)
            with lock:
                print(f"{bug.law:2} {bug.name:28} {words}", flush=True)
            return caught

        with ThreadPoolExecutor(max(1, options.j)) as pool:
            missed = [bug for bug, caught in zip(bugs, pool.map(one, bugs), strict=True) if not caught]
    print(f"{len(bugs) - len(missed)} of {len(bugs)} planted bugs were caught")
    for bug in missed:
        print(f"not caught: {bug.name}, law {bug.law} ({LAWS[bug.law]}): {bug.breaks}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
