"""A table out of a git repository, by `REPOSITORY@REF:FILE`: nothing is checked out, nothing is fetched."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.tables.open import MAX_BYTES

TIMEOUT_S = 120.0
_COMMITTED = re.compile(r"^committer .* (\d{1,11}) [+-]\d{4}$", re.M)


@dataclass(frozen=True, slots=True)
class GitFile:
    """`ref` and `file` of the repository at `repo`, as they were given."""

    repo: Path
    ref: str
    file: str


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit that REF names, and its date (UTC)."""

    sha: str
    committed: str


def parse(text: str) -> GitFile | None:
    """None for what is a plain path (which may well hold an @)."""
    head, colon, file = text.rpartition(":")
    repo, at, ref = head.rpartition("@")
    if not (colon and at and repo and ref and file) or Path(text).exists():
        return None
    return GitFile(Path(repo), ref, file)


def extract(of: GitFile, to: Path) -> Commit:
    """Write the file as it was at REF to `to`. Raises InputError saying what is not there."""
    if not of.repo.is_dir():
        raise InputError(f"{of.repo}: there is no such folder; write REPOSITORY@REF:FILE")
    if shutil.which("git") is None:
        raise InputError("git is not installed here: give the path of the table instead")
    if of.ref.startswith("-") or "\n" in of.ref:
        raise InputError(f"{of.ref[:80]!r}: is no branch, tag or commit")
    said = _git(of.repo, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{of.ref}^{{commit}}")
    if said is None:
        raise InputError(
            f"{of.repo}: has no commit {of.ref[:80]!r} (fetch it there first), is no git repository, or git does not"
            " trust its owner"
        )
    sha = said.strip()
    name = f"{sha}:{of.file}"
    size = _git(of.repo, "cat-file", "-s", name)
    if size is None or _git(of.repo, "cat-file", "-t", name) != "blob\n":
        raise InputError(f"{of.repo}: commit {sha[:12]} has no file {of.file[:200]!r}")
    if int(size) > MAX_BYTES:
        raise InputError(f"{of.file}: is larger than {MAX_BYTES // 2**20} MB, which no tuned table is")
    with to.open("wb") as out:
        if _run(of.repo, ("cat-file", "blob", name), out.fileno()).returncode:
            raise InputError(f"{of.repo}: git could not read {of.file[:200]!r} of commit {sha[:12]}")
    at = _COMMITTED.search(_git(of.repo, "cat-file", "commit", sha) or "")
    return Commit(sha, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(at[1]))) if at else "")


def _git(repo: Path, *words: str) -> str | None:
    """The output of a git command, None where it fails."""
    done = _run(repo, words, subprocess.PIPE)
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


def _run(repo: Path, words: tuple[str, ...], out: int) -> subprocess.CompletedProcess[bytes]:
    # plumbing only, which runs nothing that the repository's own configuration names; no prompt, nothing is fetched
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env |= {"GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0"}
    argv = ["git", "-C", str(repo), *words]
    try:
        return subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.DEVNULL,
            env=env,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"{repo}: git did not answer within {TIMEOUT_S:g} s") from None
