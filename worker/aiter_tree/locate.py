"""Trees of AITER on this machine: the one that `import aiter` means, and the scripts, version and commit of each.

A tree is one package `aiter` with what belongs to it: a checkout (`aiter/` beside `csrc/` and `hsa/`), or an
installed wheel (`aiter/` beside `aiter_meta/`). Scripts and package always come from the same tree: an image that
holds two of different dates would otherwise mix them. Nothing is imported here, and no git is run: images have none.

A scratch copy of a tree is a folder of links to the real one, in which single files are copies that may be changed. A
process that has the copy first in PYTHONPATH imports `aiter` from it, and finds csrc/, hsa/ and the rest beside it as
in the real tree (aiter/jit/core.py does not resolve links). The real tree is only read.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from worker.families import FAMILIES, Family
from worker.text import clean

PLACES = (
    "/root/aiter",
    "/app/aiter-test",
    "/app/aiter",
    "/opt/aiter",
    "/workspace/aiter",
    "/aiter",
    "/sgl-workspace/aiter",
)
"""Folders of AITER in published images."""
DEFAULT_GFX = "gfx950"
"""The chip that a tree is read for where none is named."""
MAX_BYTES = 4 << 20
"""`read_text` refuses a larger file. The largest that we read in AITER has some 300 KB (2026-08)."""
_GFX_FOLDER = re.compile(r"/(gfx[0-9a-f]+)/")
_SHA = re.compile(r"[0-9a-f]{40}\Z")
_DISTRIBUTIONS = ("amd_aiter-*.dist-info", "aiter-*.dist-info", "amd_aiter*.egg-info", "aiter*.egg-info")


class NotATreeError(LookupError):
    """No AITER at that path; the message names what is there instead."""


@dataclass(frozen=True, slots=True)
class Tree:
    """One AITER. `root` holds the package: first in PYTHONPATH, it lets a process import `aiter` from this tree and no
    other. `meta` holds csrc/, hsa/ and gradlib/ (the root, or its aiter_meta/).

    `version` and `commit` are "" where unknown; `scripts` is the family's script by its name; `imported` says
    whether `import aiter` means this tree without any help.
    """

    root: Path
    package: Path
    meta: Path
    version: str = ""
    commit: str = ""
    scripts: Mapping[str, Path] = field(default_factory=dict)
    imported: bool = False
    notes: tuple[str, ...] = ()

    @property
    def wheel(self) -> bool:
        """True for an installed wheel."""
        return self.meta.name == "aiter_meta"

    def as_json(self) -> dict[str, object]:
        scripts = {name: str(path.relative_to(self.root)) for name, path in self.scripts.items()}
        return {
            "root": str(self.root),
            "package": str(self.package),
            "meta": str(self.meta),
            "wheel": self.wheel,
            "version": self.version,
            "commit": self.commit,
            "imported": self.imported,
            "scripts": scripts,
            "notes": list(self.notes),
        }


def find_trees(roots: Iterable[Path] = (), *, gfx: str = "") -> list[Tree]:
    """Every AITER of this machine, the imported one first, then `roots`, then PLACES. `gfx`: only scripts for this
    chip; "": for any."""
    found: dict[str, Tree] = {}
    package = imported_package()
    candidates = [(package.parent, True)] if package else []
    candidates += [(r, False) for r in (*map(Path, roots), *map(Path, PLACES))]
    for root, imported in candidates:
        try:
            tree = tree_at(root, imported=imported, gfx=gfx)
        except NotATreeError:
            continue
        found.setdefault(os.path.realpath(tree.package), tree)
    return list(found.values())


def choose(wanted: str, *, family: str = "", gfx: str = "") -> tuple[Tree, tuple[str, ...]]:
    """The tree of this machine to use, and notes on the choice; `wanted`: the folder that the inventory names, or "".
    Raises NotATreeError with the ways out."""
    root = Path(wanted) if wanted else None
    return pick(find_trees([root] if root else [], gfx=gfx), root, family)


def pick(trees: Sequence[Tree], wanted: Path | None = None, family: str = "") -> tuple[Tree, tuple[str, ...]]:
    """The wanted tree, else the imported one, else the first that has the family's script; notes on the choice. Raises
    NotATreeError with the ways out."""
    if wanted is not None:
        real = os.path.realpath(wanted)
        for tree in trees:
            if real in (os.path.realpath(p) for p in (tree.root, tree.package, tree.meta)):
                return tree, _notes_on(tree, trees)
        # if it is not a tree either, `tree_at` says what is there instead
        return (tree := tree_at(wanted)), _notes_on(tree, trees)
    if not trees:
        raise NotATreeError(
            "there is no AITER here: `import aiter` finds no package, and neither do "
            + ", ".join(PLACES)
            + "; name its folder in the inventory (aiter: {root: PATH})"
        )
    usable = [t for t in trees if not family or family in t.scripts]
    if not usable:
        raise NotATreeError(f"the AITER of this image has no tuner script for {family}: {_named(trees)}")
    chosen = next((t for t in usable if t.imported), usable[0])
    return chosen, _notes_on(chosen, trees)


def tree_at(path: Path, *, imported: bool = False, gfx: str = "") -> Tree:
    """The tree whose root, package or aiter_meta folder this is. Raises NotATreeError with what is there instead."""
    typed, path = path, Path(os.path.abspath(path))
    try:
        os.listdir(path)
    except OSError as e:
        raise NotATreeError(f"{typed} cannot be read: {e.strerror or e}") from e
    root = path
    if _is_package(path) or (path.name == "aiter_meta" and _is_package(path.parent / "aiter")):
        root = path.parent
    package = root / "aiter"
    if not _is_package(package):
        inside = f", but {package} is" if _is_package(package / "aiter") else ": it has no aiter/jit/core.py"
        raise NotATreeError(f"{typed} is not a tree of AITER{inside}")
    meta, notes = _meta(root, package)
    version = version_of(root, package)
    commit = commit_of(root, version)
    if not commit:
        notes.append("neither .git nor the package's metadata name the commit")
    scripts: dict[str, Path] = {}
    for family in FAMILIES.values():
        there = (meta / rel for rel in _for_chip(family.aiter.scripts, gfx))
        if found := next((path for path in there if _serves(family, path)), None):
            scripts[family.name] = found
    if not scripts:
        notes.append(f"no tuner script lies below {meta}")
    return Tree(root, package, meta, version, commit, scripts, imported, tuple(notes))


def imported_package() -> Path | None:
    """The folder of the package that `import aiter` would load, or None. Nothing is imported."""
    try:
        spec = importlib.util.find_spec("aiter")
    except (ImportError, ValueError, AttributeError, OSError):
        return None
    # a folder `aiter` without __init__.py (a checkout beside the script) is a namespace package, not AITER
    if spec is None or not spec.origin or not spec.has_location:
        return None
    return Path(spec.origin).parent


def _serves(family: Family, script: Path) -> bool:
    """True if the script is there and can tune this family. If other families use the script too, it must have the
    switch for this one."""
    others = (s for f in FAMILIES.values() if f.name != family.name for s in f.aiter.scripts)
    flags = family.aiter.flags if any(script.name == Path(s).name for s in others) else ()
    text = _text(script, MAX_BYTES)
    return bool(text) and all(re.search(rf"""['"]{re.escape(flag)}['"]""", text) for flag in flags)


def _for_chip(scripts: Sequence[str], gfx: str) -> Iterator[str]:
    """Scripts that lie in a chip's folder count for that chip alone, where the chip is known."""
    for rel in scripts:
        m = _GFX_FOLDER.search(rel)
        if not gfx or m is None or m[1] == gfx:
            yield rel


def _meta(root: Path, package: Path) -> tuple[Path, list[str]]:
    """The folder of csrc/, hsa/ and gradlib/, by the rule of aiter/jit/core.py; notes on what contradicts it."""
    notes: list[str] = []
    wheel = root / "aiter_meta"
    mode = _text(package / "install_mode").strip()
    meta = wheel if mode == "install" else root
    other = root if meta == wheel else wheel
    if not (meta / "csrc").is_dir() and (other / "csrc").is_dir():
        meta = other
        if mode:
            notes.append(f"aiter/install_mode says {mode!r}, but csrc/ lies in {other}: AITER may miss its own files")
    return meta, notes


def _notes_on(chosen: Tree, trees: Sequence[Tree]) -> tuple[str, ...]:
    """The chosen tree's own notes, and one on the other trees of the image if there are some."""
    others = [t for t in trees if t is not chosen]
    notes = list(chosen.notes)
    imported = next((t for t in others if t.imported), None)
    if imported:
        notes.append(
            f"`import aiter` means {imported.root} here; {chosen.root} is used for scripts and package alike "
            "(PYTHONPATH), never a mix"
        )
    elif others:
        notes.append(f"this image holds further trees of AITER, which are left alone: {_named(others)}")
    return tuple(notes)


def _named(trees: Sequence[Tree]) -> str:
    return ", ".join(f"{t.root} ({t.version or t.commit[:10] or 'unknown version'})" for t in trees)


def _is_package(folder: Path) -> bool:
    return folder.name == "aiter" and os.path.isfile(folder / "jit" / "core.py")


def read_text(path: Path, limit: int = MAX_BYTES) -> str:
    """A regular file's text, bytes that are no UTF-8 replaced. Raises OSError, and ValueError where it is too large."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would wait for a writer for ever
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a regular file")
        if found.st_size > limit:
            raise ValueError(f"it has {found.st_size} bytes, more than the {limit} that such a file may have")
        with open(fd, "rb", closefd=False) as f:
            return f.read(limit).decode(errors="replace")
    finally:
        os.close(fd)


class TreeFiles:
    """The files of a tree by their paths below its root, each read once. `problems`: files that could not be read."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.problems: list[str] = []
        self.text = cache(self._read)

    def name(self, path: Path) -> str:
        """The path below the root."""
        return path.relative_to(self.tree.root).as_posix()

    def problem(self, text: str) -> None:
        """Keep a sentence about what could not be read, once."""
        if text not in self.problems:
            self.problems.append(text)

    def at(self, path: Path, pattern: str) -> list[str]:
        """The first place where a regular expression matches, as `file:line: what stands there`; else nothing."""
        text = self.text(path)
        found = re.search(pattern, text, re.M)
        if found is None:
            return []
        number = text.count("\n", 0, found.start()) + 1
        return [f"{self.name(path)}:{number}: {clean(text.splitlines()[number - 1], 200)}"]

    def _read(self, path: Path) -> str:
        try:
            return read_text(path)
        except FileNotFoundError:
            return ""
        except (OSError, ValueError) as e:
            self.problem(f"{clean(self.name(path), 200)} cannot be read: {e}")
            return ""


def version_of(root: Path, package: Path) -> str:
    """`0.1.14.post1` and the like: of aiter/_version.py, else of the distribution's metadata."""
    assigned = r"""^__version__\s*(?:=\s*version\s*)?=\s*['"]([^'"]{1,80})['"]"""
    places = [(package / "_version.py", assigned)]
    places += [(f / n, r"^Version: *(\S{1,80})$") for f in _distributions(root) for n in ("METADATA", "PKG-INFO")]
    found = (re.search(pattern, _text(path), re.M) for path, pattern in places)
    return next((clean(m[1], 80) for m in found if m), "")


def commit_of(root: Path, version: str) -> str:
    """40 digits by git's files or pip's record, else the fewer that the version holds; "" if unknown."""
    pip = (re.search(r'"commit_id": *"([0-9a-f]{40})"', _text(f / "direct_url.json")) for f in _distributions(root))
    short = re.search(r"\+g([0-9a-f]{7,40})\b", version)
    return _of_git(root) or next((m[1] for m in (*pip, short) if m), "")


def _of_git(root: Path) -> str:
    """The commit of a checkout, also of a submodule, where .git is a file that names a folder."""
    git = root / ".git"
    if (to := _text(git).strip()).startswith("gitdir:"):
        git = root / to.removeprefix("gitdir:").strip()
    head = _text(git / "HEAD").strip()
    ref = head.removeprefix("ref:").strip()
    if not re.fullmatch(r"refs/[\w./+@-]{1,300}", ref) or ".." in ref:
        return head if _SHA.match(head) else ""
    packed = (line for line in _text(git / "packed-refs", 8 << 20).splitlines() if line.endswith(f" {ref}"))
    return next((line[:40] for line in (_text(git / ref).strip(), *packed) if _SHA.match(line[:40])), "")


def _distributions(root: Path) -> list[Path]:
    return [p for pattern in _DISTRIBUTIONS for p in sorted(root.glob(pattern)) if p.is_dir()]


def _text(path: Path, limit: int = 1 << 20) -> str:
    try:
        return read_text(path, limit)
    except (OSError, ValueError):
        return ""


_LEFT_OUT = frozenset((".git", "__pycache__"))


class ScratchTree:
    """A scratch copy of `real` that is in a folder already; `make` creates one. `tree` describes the copy."""

    def __init__(self, real: Tree, folder: Path) -> None:
        self.folder = folder
        meta = folder / real.meta.relative_to(real.root)
        scripts = {name: folder / path.relative_to(real.root) for name, path in real.scripts.items()}
        self.tree = replace(
            real, root=folder, package=folder / "aiter", meta=meta, scripts=scripts, imported=False, notes=()
        )

    @classmethod
    def make(cls, real: Tree, folder: Path) -> ScratchTree:
        """A fresh copy in `folder`, which is replaced if it is an older one. Raises OSError."""
        folder = Path(os.path.abspath(folder))
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        _link(real.root, ("aiter", "aiter_meta") if real.wheel else os.listdir(real.root), folder)
        return cls(real, folder)

    @classmethod
    def with_files(cls, real: Tree, folder: Path, files: Mapping[str, str], gone: Iterable[str] = ()) -> Tree:
        """A fresh copy in which these files are as given, new ones too, and the files `gone` are not there.

        Paths are relative to the root. Raises OSError, also for a path that leads out of it.
        """
        made = cls.make(real, folder)
        for rel in gone:
            made._inside(rel).unlink()
        for rel, text in files.items():
            made.write(rel, text.encode())
        return made.tree

    def write(self, rel: str, data: bytes) -> None:
        """Let the copy have a file of its own with this content. Raises OSError."""
        path = self._inside(rel)
        path.unlink(missing_ok=True)
        path.write_bytes(data)

    def link(self, rel: str, target: str) -> None:
        """A link to something else in the copy, where nothing was. Raises FileExistsError."""
        self._inside(rel).symlink_to(target)

    def _inside(self, rel: str) -> Path:
        """The path. All folders above it become the copy's own: nothing is ever changed through a link."""
        if Path(rel).is_absolute() or ".." in Path(rel).parts:
            raise OSError(f"{rel} lies outside of the tree")
        at = self.folder
        for part in Path(rel).parts[:-1]:
            at = at / part
            if at.is_symlink():
                behind = Path(os.path.realpath(at))
                at.unlink()
                at.mkdir()
                _link(behind, os.listdir(behind), at)
            at.mkdir(exist_ok=True)
        return self.folder / rel


def _link(behind: Path, names: Iterable[str], folder: Path) -> None:
    for name in names:
        if name not in _LEFT_OUT:
            (folder / name).symlink_to(behind / name)


def digest(path: Path) -> str:
    """sha256 of a file's content; of its target's name for a relative link, which stays in the copy; "" for nothing."""
    try:
        if path.is_symlink() and not path.readlink().is_absolute():
            return hashlib.sha256(f"link to {path.readlink()}".encode()).hexdigest()
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
