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
from dataclasses import dataclass
from pathlib import Path

from tests.paths import ROOT
from tests.planted.bugs import BUGS, LAWS, Bug

FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
TIME_LIMIT_S = 300
"""Limit of one test: a bug may make it hang, and then it is caught."""
FAILURES = 1
"""pytest's exit code where tests ran and some failed. With any other one but 0 nothing was judged."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one bug, in words for its line of the table."""

    bug: Bug
    text: str
    caught: bool = False


class Copies:
    """Copies of the checkout as it is now, in one temporary folder."""

    def __init__(self, folder: Path) -> None:
        argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        self._files = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
        self._folder = folder

    def make(self, name: str) -> Path:
        """Copy all files that git knows or does not ignore."""
        root = self._folder / name
        for file in self._files:
            target = root / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, target)
        return root


def plant(bug: Bug, root: Path) -> bool:
    """Put the bug into a tree. False: the old text is not there exactly once, and nothing was changed."""
    path = root / bug.file
    text = path.read_text() if path.is_file() else ""
    if text.count(bug.old) != 1:
        return False
    path.write_text(text.replace(bug.old, bug.new))
    return True


def run_tests(root: Path, tests: Sequence[str], *, whole: bool = False) -> tuple[int, str]:
    """Run tests of a tree up to the first failure: pytest's exit code, and what it printed."""
    few = ["-n", "4", "--dist", "loadgroup"] if whole else ["-n", "0", *tests]
    argv = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--timeout={TIME_LIMIT_S}", *few]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH", ""))))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(argv, cwd=root, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def judge(bug: Bug, copies: Copies, *, whole: bool) -> Verdict:
    """Plant one bug in a copy of its own, and see whether a test fails."""
    root = copies.make(bug.name)
    try:
        if not plant(bug, root):
            return Verdict(bug, f"CANNOT BE PLANTED: its text does not stand exactly once in {bug.file}")
        code, out = run_tests(root, bug.tests, whole=whole)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    failed = FAILED.search(out)
    if code == FAILURES and failed is not None:
        return Verdict(bug, f"caught by {failed[1]}", caught=True)
    if code == 0:
        return Verdict(bug, "NOT CAUGHT")
    return Verdict(bug, f"NOT JUDGED: pytest ended with code {code}\n{out[-2000:]}")


def main(argv: Sequence[str] | None = None) -> int:
    """Judge the bugs and print a line for each; 1 where one is not caught or cannot be planted."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="this bug alone; may be given several times")
    parser.add_argument("-j", type=int, default=2, metavar="N", help="run this number of bugs at once (default 2)")
    parser.add_argument("--whole", action="store_true", help="run the whole suite against each, not its tests alone")
    options = parser.parse_args(argv)
    names = {b.name for b in BUGS}
    if unknown := sorted(set(options.only or ()) - names):
        parser.error(f"there is no bug {', '.join(unknown)} (there are {', '.join(sorted(names))})")
    bugs = [b for b in BUGS if not options.only or b.name in options.only]
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copies = Copies(Path(folder))
        if not options.whole:
            tests = sorted({t for b in bugs for t in b.tests})
            code, out = run_tests(copies.make("sound"), tests)
            if code != 0:
                print(f"without any bug these tests fail or do not run, so they can judge nothing:\n{out[-4000:]}")
                return 1
        lock = threading.Lock()

        def one(bug: Bug) -> Verdict:
            found = judge(bug, copies, whole=options.whole)
            with lock:
                print(f"{bug.law:2} {bug.name:28} {found.text}", flush=True)
            return found

        with ThreadPoolExecutor(max(1, options.j)) as pool:
            verdicts = list(pool.map(one, bugs))
    missed = [v.bug for v in verdicts if not v.caught]
    print(f"{len(verdicts) - len(missed)} of {len(verdicts)} planted bugs were caught")
    for bug in missed:
        print(f"not caught: {bug.name}, law {bug.law} ({LAWS[bug.law]}): {bug.breaks}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
