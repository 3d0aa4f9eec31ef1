"""A checkout of AITER: a commit made in a worktree of its own, the branch that names it at the very end, and AITER's
own checks of its tables, run from a worktree before and after a change, with their logs kept.

The user's work tree, index and hooks are left alone; nothing is fetched or pushed. `test_csv_validation` needs pandas,
and reads the shared tables alone. `test_config_shape_collision` (since a77962713b) drives AITER's own merge; it imports
`aiter`, so it needs torch, and skips itself elsewhere. No GPU is needed.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import InputError
from worker.foreign.runner import ForeignCodeError, Limits, run
from worker.text import and_more

TRAILER = "Published-by: gemmfleet"
"""The last line of every message of ours: a branch with any other commit is not made again."""
SCRATCH, LOCK = "gemmfleet-publish-", "lock"
"""The folder of a worktree begins so; its lock is held as long as its process lives."""
GIT_S = 600.0
_KEPT = ("GIT_AUTHOR_", "GIT_COMMITTER_")
_CONFIG = ("-c", "core.hooksPath=/dev/null", "-c", "core.autocrlf=false")


class Checkout:
    """The repository at `folder`. Every method raises InputError with git's own words."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("rev-parse", "--git-dir")

    def git(self, *words: str, at: Path | None = None) -> str:
        """The output of a git command, in the folder or at `at`."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_") or k.startswith(_KEPT)}
        env |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
        argv = ["git", "-C", str(at or self.folder), *_CONFIG, *words]
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, timeout=GIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            raise InputError(f"{self.folder}: git {words[0]} did not end: {e}") from None
        if done.returncode:
            said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise InputError(f"{self.folder}: git {words[0]}: {said[:500]}")
        return done.stdout

    def commit_of(self, ref: str) -> str:
        """The commit that a ref names."""
        try:
            return self.git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}").strip()
        except InputError:
            raise InputError(f"{self.folder}: has no commit {ref[:80]!r}; fetch it there first") from None

    def refuse(self, branch: str, base: str, *, refresh: bool) -> None:
        """Raise InputError where a branch cannot be made, or holds commits that would be lost when it is made again."""
        self.git("check-ref-format", "--branch", branch)
        where = f"{self.folder}: {branch}"
        if not self.git("for-each-ref", f"refs/heads/{branch}").strip():
            if refresh:
                raise InputError(f"{where} is not a branch there, so there is nothing to refresh; leave out --refresh")
            return
        if not refresh:
            raise InputError(f"{where} is there: --refresh makes it again on the newer base, --branch names another")
        if f"branch refs/heads/{branch}\n" in self.git("worktree", "list", "--porcelain"):
            raise InputError(f"{where} is checked out; switch to another branch, such as main, first")
        commits = self.git("log", "--format=%h %s%x1f%B%x00", f"refs/heads/{branch}", "--not", base).split("\0")
        foreign = [c.partition("\x1f")[0].strip() for c in commits if c.strip() and TRAILER not in c]
        if foreign:
            raise InputError(
                f"{where} has commits that publish did not make ({', '.join(foreign[:3])}), which --refresh would lose:"
                " rebase it by hand and run `db check --build` on it, or name another --branch"
            )

    @contextmanager
    def worktree(self, base: str) -> Iterator[Path]:
        """A worktree at a commit, which is gone afterwards; those of processes that were killed are removed first."""
        self._remove_dead_worktrees()
        with tempfile.TemporaryDirectory(prefix=SCRATCH) as scratch, open(Path(scratch) / LOCK, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            tree = Path(scratch) / "aiter"
            self.git("worktree", "add", "--quiet", "--detach", str(tree), base)
            try:
                yield tree
            finally:
                self.git("worktree", "remove", "--force", str(tree))

    def _remove_dead_worktrees(self) -> None:
        """Remove the worktrees of ours whose folder is gone, or whose lock nobody holds."""
        for line in self.git("worktree", "list", "--porcelain").splitlines():
            tree = Path(line.removeprefix("worktree "))
            if not (line.startswith("worktree ") and tree.name == "aiter" and tree.parent.name.startswith(SCRATCH)):
                continue
            with suppress(OSError), ExitStack() as held:
                if tree.parent.exists():
                    fcntl.flock(held.enter_context(open(tree.parent / LOCK)), fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.git("worktree", "remove", "--force", str(tree))
                shutil.rmtree(tree.parent, ignore_errors=True)

    def commit(self, tree: Path, texts: Mapping[str, str], message: str) -> str:
        """Write files in a worktree and commit them; the commit."""
        for name, text in texts.items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(text, newline="")
        self.git("add", "--force", "--", *texts, at=tree)
        self.git("commit", "--quiet", "-m", f"{message}\n\n{TRAILER}", at=tree)
        return self.git("rev-parse", "HEAD", at=tree).strip()

    def point(self, branch: str, commit: str) -> None:
        """Let the branch name the commit."""
        self.git("branch", "--no-track", "--force", branch, commit)


CHECKS = ("test_csv_validation", "test_config_shape_collision")
FOLDER = "op_tests/tuning_tests"
COMMANDS = [f"python3 -m unittest -v op_tests.tuning_tests.{name}" for name in CHECKS]
CHECK_LIMITS = Limits(seconds=1800, memory=32 << 30, output=1 << 30, processes=1024)
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
    env = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    env["PYTHONUSERBASE"] = site.getuserbase()  # the home that the check sees is empty
    if any(jit.glob("*.so")):
        env["AITER_JIT_DIR"] = str(jit)
    argv = [python, *COMMANDS[CHECKS.index(name)].split()[1:]]
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("w+b") as out:
            code = run(argv, out, cwd=tree, env=env, limits=CHECK_LIMITS)
    except (OSError, ForeignCodeError) as e:
        return CheckRun(why=f"it {e}")
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
        right, how = f"{proven} of {len(node['rows'])} rows used and right", node.get("aiter", {}).get("how")
        found.append(f"{node['node']}: " + (node["why"] or (f"{right} ({how})" if how else right)))
    return done.returncode == 0, "; ".join(found)
