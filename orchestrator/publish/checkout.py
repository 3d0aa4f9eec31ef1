"""A local git checkout: commits made in a worktree of its own, and the branch that names them at the very end.

`publication.py` calls `refuse_branch` first, then `commit` within a `worktree`, and `point_branch` last. The user's
work tree, index and hooks are left alone; nothing is fetched or pushed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from orchestrator.errors import InputError

TRAILER = "Published-by: gemmfleet"
"""The last line of every message of ours: a branch with any other commit is not made again."""
SCRATCH = "gemmfleet-publish-"
"""The folder of a worktree begins so."""
LOCK = "lock"
"""A file in that folder, locked as long as the process of the worktree lives."""
GIT_S = 600.0
"""Limit of one git command; a worktree of AITER takes some seconds, on a slow disk minutes."""
_KEPT_VARIABLES = ("GIT_AUTHOR_", "GIT_COMMITTER_")
"""Beginnings of the variables of git that a commit needs; others could point git at another repository."""
_CONFIG = ("-c", "core.hooksPath=/dev/null", "-c", "core.autocrlf=false")


class Checkout:
    """The repository at `folder`. Every method raises InputError with git's own words."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("rev-parse", "--git-dir")

    def git(self, *words: str, folder: Path | None = None) -> str:
        """The output of a git command, in the checkout or in `folder`."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_") or k.startswith(_KEPT_VARIABLES)}
        env |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
        argv = ["git", "-C", str(folder or self.folder), *_CONFIG, *words]
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

    def refuse_branch(self, branch: str, base: str, *, refresh: bool) -> None:
        """Raise InputError where a branch cannot be made, or holds commits that would be lost when it is made again."""
        try:
            self.git("check-ref-format", "--branch", branch)
        except InputError as e:
            raise InputError(f"{e}; name another with --branch") from None
        where = f"{self.folder}: {branch}"
        branches = self.git("for-each-ref", "--format=%(refname:lstrip=2)", "refs/heads/").splitlines()
        for other in branches:  # git keeps x/y as a file y in a folder x
            if other.startswith(f"{branch}/") or branch.startswith(f"{other}/"):
                raise InputError(f"{where} cannot be beside the branch {other}; name another with --branch")
        if branch not in branches:
            if refresh:
                raise InputError(f"{where} is not a branch there, so there is nothing to refresh; leave out --refresh")
            return
        if not refresh:
            raise InputError(f"{where} is there: --refresh makes it again on the newer base, --branch names another")
        if f"branch refs/heads/{branch}\n" in self.git("worktree", "list", "--porcelain"):
            raise InputError(f"{where} is checked out; switch to another branch first")
        self._refuse_foreign_commits(branch, base)

    def _refuse_foreign_commits(self, branch: str, base: str) -> None:
        """Raise InputError if a branch has a commit that is not in the base and that we did not make (TRAILER)."""
        where = f"{self.folder}: {branch}"
        commits = self.git("log", "--format=%h %s%x1f%B%x00", f"refs/heads/{branch}", "--not", base).split("\0")
        foreign = [c.partition("\x1f")[0].strip() for c in commits if c.strip() and TRAILER not in c]
        if foreign:
            raise InputError(
                f"{where} has commits that publish did not make ({', '.join(foreign[:3])}), which --refresh would lose:"
                " rebase it by hand and run `db check --build` on it, or name another --branch"
            )
        last, _, message = self.git("log", "-1", "--format=%h %s%x1f%B", f"refs/heads/{branch}").partition("\x1f")
        if TRAILER not in message:  # such as main, whose commits the base has all
            raise InputError(
                f"{where} is not a branch that publish made (its last commit: {last}); name another with --branch"
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
        self.git("add", "--force", "--", *texts, folder=tree)
        self.git("commit", "--quiet", "-m", f"{message}\n\n{TRAILER}", folder=tree)
        return self.git("rev-parse", "HEAD", folder=tree).strip()

    def point_branch(self, branch: str, commit: str) -> None:
        """Let the branch name the commit."""
        self.git("branch", "--no-track", "--force", branch, commit)
