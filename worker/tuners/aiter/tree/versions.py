"""Version and commit of a tree, from its files: git's own, setuptools_scm's, pip's. No git is run: images have none."""

from __future__ import annotations

import json
import re
from pathlib import Path

from worker.text import clean
from worker.tuners.aiter.tree.reading import read_text

_SHA = re.compile(r"[0-9a-f]{40}\Z")
_LOCAL = re.compile(r"\+g([0-9a-f]{7,40})\b")
_DISTRIBUTIONS = ("amd_aiter-*.dist-info", "aiter-*.dist-info", "amd_aiter*.egg-info", "aiter*.egg-info")
_MAX_REFS = 8 << 20


def version_of(root: Path, package: Path) -> str:
    """`0.1.14.post1` and the like: of aiter/_version.py, else of the distribution's metadata, else of git's tags."""
    text = _text(package / "_version.py")
    m = re.search(r"""^__version__\s*(?:=\s*version\s*)?=\s*['"]([^'"]{1,80})['"]""", text, re.M)
    if m:
        return clean(m[1], 80)
    for folder in _distributions(root):
        for name in ("METADATA", "PKG-INFO"):
            m = re.search(r"^Version: *(\S{1,80})$", _text(folder / name), re.M)
            if m:
                return clean(m[1], 80)
    commit = _of_git(root)[0]
    tags = sorted((t for t, sha in _tags(root).items() if sha == commit), key=lambda t: (not t.startswith("v"), t))
    return clean(tags[0].removeprefix("v"), 80) if commit and tags else ""


def commit_of(root: Path, version: str) -> tuple[str, str]:
    """(commit, why there is none): 40 digits from git, the fewer that a version or pip's record holds."""
    commit, why = _of_git(root)
    if commit:
        return commit, ""
    for folder in _distributions(root):
        try:
            commit = str(json.loads(_text(folder / "direct_url.json"))["vcs_info"]["commit_id"])
        except (ValueError, KeyError, TypeError):
            continue
        if _SHA.match(commit):
            return commit, ""
    m = _LOCAL.search(version)
    return (m[1], "") if m else ("", why)


def _of_git(root: Path) -> tuple[str, str]:
    git = _git_folder(root)
    if git is None:
        return "", "there is no .git, so the commit is not known"
    head = _text(git / "HEAD").strip()
    if _SHA.match(head):
        return head, ""
    ref = head.removeprefix("ref:").strip()
    if not ref or not re.fullmatch(r"refs/[\w./+@-]{1,300}", ref) or ".." in ref:
        return "", ".git/HEAD cannot be read, so the commit is not known"
    for folder in (git, _common(git)):
        sha = _text(folder / ref).strip()
        if _SHA.match(sha):
            return sha, ""
        for line in _text(folder / "packed-refs", _MAX_REFS).splitlines():
            if line.endswith(f" {ref}") and _SHA.match(line[:40]):
                return line[:40], ""
    return "", f".git has no {ref}, so the commit is not known"


def _git_folder(root: Path) -> Path | None:
    """.git, or what the file of that name points to (a worktree, a submodule)."""
    git = root / ".git"
    try:
        if git.is_dir():
            return git
    except OSError:
        return None
    to = _text(git).strip()
    if not to.startswith("gitdir:"):
        return None
    return (root / to.removeprefix("gitdir:").strip()).resolve()


def _common(git: Path) -> Path:
    to = _text(git / "commondir").strip()
    return (git / to).resolve() if to else git


def _tags(root: Path) -> dict[str, str]:
    """Tags by name with the commit they mean, those of packed-refs and loose ones."""
    git = _git_folder(root)
    if git is None:
        return {}
    out: dict[str, str] = {}
    last = ""
    for line in _text(_common(git) / "packed-refs", _MAX_REFS).splitlines():
        if line.startswith("^") and last:
            out[last] = line[1:41]  # an annotated tag: what it points to
            continue
        sha, _, ref = line.partition(" ")
        last = ref.removeprefix("refs/tags/") if ref.startswith("refs/tags/") else ""
        if last:
            out[last] = sha
    try:
        for path in sorted((_common(git) / "refs" / "tags").glob("v*"))[:500]:
            out.setdefault(path.name, _text(path).strip())
    except OSError:
        pass
    return out


def _distributions(root: Path) -> list[Path]:
    try:
        return [p for pattern in _DISTRIBUTIONS for p in sorted(root.glob(pattern)) if p.is_dir()]
    except OSError:
        return []


def _text(path: Path, limit: int = 1 << 20) -> str:
    try:
        return read_text(path, limit)
    except (OSError, ValueError):
        return ""
