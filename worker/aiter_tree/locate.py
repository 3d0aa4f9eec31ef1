"""Trees of AITER on this machine: the one that `import aiter` means, and the scripts, version and commit of each.

A tree is one package `aiter` with what belongs to it: a checkout (`aiter/` beside `csrc/` and `hsa/`), or an
installed wheel (`aiter/` beside `aiter_meta/`). Scripts and package always come from the same tree: an image that
holds two of different dates would otherwise mix them. Nothing is imported here, and no git is run: images have none.
`scratch_tree.py` makes a copy of a tree in which files may be changed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
MAX_PACKED_REFS = 8 << 20
"""Most bytes of git's packed-refs that are read."""
_GFX_FOLDER = re.compile(r"/(gfx[0-9a-f]+)/")
_SHA = re.compile(r"[0-9a-f]{40}\Z")
_DISTRIBUTIONS = ("amd_aiter-*.dist-info", "aiter-*.dist-info", "amd_aiter*.egg-info", "aiter*.egg-info")


class NotATreeError(LookupError):
    """No AITER at that path; the message names what is there instead."""


@dataclass(frozen=True, slots=True)
class Tree:
    """One AITER."""

    root: Path
    """The folder that holds the package: first in PYTHONPATH, it lets a process import `aiter` from this tree alone."""
    package: Path
    """The package, `root/aiter`."""
    meta: Path
    """The folder that holds csrc/, hsa/ and gradlib/: the root, or its aiter_meta/."""
    version: str = ""
    """`0.1.14.post1`; "" if unknown."""
    commit: str = ""
    """Its digits, or the fewer that are known; "" if unknown."""
    scripts: Mapping[str, Path] = field(default_factory=dict)
    """AITER's tuner script of each family, by the family's name; a family without one is missing."""
    imported: bool = False
    """`import aiter` means this tree without any help."""
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
    trees: dict[str, Tree] = {}
    package = imported_package()
    candidates = [*map(Path, roots), *map(Path, PLACES)]
    if package:
        candidates.insert(0, package.parent)
    for i, root in enumerate(candidates):
        try:
            tree = tree_at(root, imported=i == 0 and package is not None, gfx=gfx)
        except NotATreeError:
            continue
        trees.setdefault(os.path.realpath(tree.package), tree)
    return list(trees.values())


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
        tree = tree_at(wanted)  # if it is not a tree either, this says what is there instead
        return tree, _notes_on(tree, trees)
    if not trees:
        raise NotATreeError(
            "there is no AITER here: `import aiter` finds no package, and neither do "
            + ", ".join(PLACES)
            + "; name its folder in the inventory (aiter: {root: PATH})"
        )
    usable = [tree for tree in trees if not family or family in tree.scripts]
    if not usable:
        raise NotATreeError(f"the AITER of this image has no tuner script for {family}: {_named(trees)}")
    chosen = next((tree for tree in usable if tree.imported), usable[0])
    return chosen, _notes_on(chosen, trees)


def tree_at(path: Path, *, imported: bool = False, gfx: str = "") -> Tree:
    """The tree whose root, package or aiter_meta folder this is. Raises NotATreeError with what is there instead."""
    root = Path(os.path.abspath(path))
    try:
        os.listdir(root)
    except OSError as e:
        raise NotATreeError(f"{path} cannot be read: {e.strerror or e}") from e
    if _is_package(root) or (root.name == "aiter_meta" and _is_package(root.parent / "aiter")):
        root = root.parent
    package = root / "aiter"
    if not _is_package(package):
        reason = f", but {package} is" if _is_package(package / "aiter") else ": it has no aiter/jit/core.py"
        raise NotATreeError(f"{path} is not a tree of AITER{reason}")
    meta, notes = _meta_folder(root, package)
    version = version_of(root, package)
    commit = commit_of(root, version)
    if not commit:
        notes.append("neither .git nor the package's metadata name the commit")
    scripts: dict[str, Path] = {}
    for family in FAMILIES.values():
        for name in _scripts_for(family, gfx):
            if _can_tune(meta / name, family):
                scripts[family.name] = meta / name
                break
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


def _can_tune(script: Path, family: Family) -> bool:
    """True if the script exists and can tune this family. If other families use the script too, it must have the
    switch for this one."""
    text = _text(script, MAX_BYTES)
    if not text:
        return False
    others = (other for other in FAMILIES.values() if other is not family)
    is_shared = any(script.name == Path(name).name for other in others for name in other.aiter.scripts)
    flags = family.aiter.flags if is_shared else ()
    return all(re.search(rf"""['"]{re.escape(flag)}['"]""", text) for flag in flags)


def _scripts_for(family: Family, gfx: str) -> Iterator[str]:
    """The names of a family's script. One that lies in a chip's folder counts for that chip alone, if the chip is
    known."""
    for name in family.aiter.scripts:
        chip = _GFX_FOLDER.search(name)
        if not gfx or chip is None or chip[1] == gfx:
            yield name


def _meta_folder(root: Path, package: Path) -> tuple[Path, list[str]]:
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
    others = [tree for tree in trees if tree is not chosen]
    notes = list(chosen.notes)
    imported = next((tree for tree in others if tree.imported), None)
    if imported:
        notes.append(
            f"`import aiter` means {imported.root} here; {chosen.root} is used for scripts and package alike "
            "(PYTHONPATH), never a mix"
        )
    elif others:
        notes.append(f"this image holds further trees of AITER, which are left alone: {_named(others)}")
    return tuple(notes)


def _named(trees: Sequence[Tree]) -> str:
    return ", ".join(f"{tree.root} ({tree.version or tree.commit[:10] or 'unknown version'})" for tree in trees)


def _is_package(folder: Path) -> bool:
    return folder.name == "aiter" and os.path.isfile(folder / "jit" / "core.py")


def read_text(path: Path, limit: int = MAX_BYTES) -> str:
    """A regular file's text, bytes that are no UTF-8 replaced. Raises OSError, and ValueError where it is too large."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would wait for a writer for ever
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > limit:
            raise ValueError(f"it has {status.st_size} bytes, more than the {limit} that such a file may have")
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
        match = re.search(pattern, text, re.M)
        if match is None:
            return []
        number = text.count("\n", 0, match.start()) + 1
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
    if match := re.search(assigned, _text(package / "_version.py"), re.M):
        return clean(match[1], 80)
    for distribution in _distributions(root):
        for name in ("METADATA", "PKG-INFO"):
            if match := re.search(r"^Version: *(\S{1,80})$", _text(distribution / name), re.M):
                return clean(match[1], 80)
    return ""


def commit_of(root: Path, version: str) -> str:
    """40 digits by git's files or pip's record, else the fewer that the version holds; "" if unknown."""
    if commit := _commit_by_git(root):
        return commit
    for distribution in _distributions(root):
        if match := re.search(r'"commit_id": *"([0-9a-f]{40})"', _text(distribution / "direct_url.json")):
            return match[1]
    in_version = re.search(r"\+g([0-9a-f]{7,40})\b", version)
    return in_version[1] if in_version else ""


def _commit_by_git(root: Path) -> str:
    """The commit of a checkout, also of a submodule, where .git is a file that names a folder."""
    git = root / ".git"
    text = _text(git).strip()
    if text.startswith("gitdir:"):
        git = root / text.removeprefix("gitdir:").strip()
    head = _text(git / "HEAD").strip()
    ref = head.removeprefix("ref:").strip()
    if not re.fullmatch(r"refs/[\w./+@-]{1,300}", ref) or ".." in ref:
        return head if _SHA.match(head) else ""
    lines = [_text(git / ref).strip()]
    lines += [line for line in _text(git / "packed-refs", MAX_PACKED_REFS).splitlines() if line.endswith(f" {ref}")]
    return next((line[:40] for line in lines if _SHA.match(line[:40])), "")


def _distributions(root: Path) -> list[Path]:
    return [p for pattern in _DISTRIBUTIONS for p in sorted(root.glob(pattern)) if p.is_dir()]


def _text(path: Path, limit: int = 1 << 20) -> str:
    try:
        return read_text(path, limit)
    except (OSError, ValueError):
        return ""
