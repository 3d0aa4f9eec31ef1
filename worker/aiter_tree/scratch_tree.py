"""A scratch copy of a tree of AITER, in which files may be changed: for fixes that a tuner needs, and for a benchmark's
config files.

The copy is a folder of links to the real tree, in which single files are copies of their own. A process that has the
copy first in PYTHONPATH imports `aiter` from it, and finds csrc/, hsa/ and the rest beside it as in the real tree
(aiter/jit/core.py does not resolve links). The real tree is only read.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from worker.aiter_tree.locate import Tree

_NOT_LINKED = frozenset((".git", "__pycache__"))


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
        # a wheel lies in a site-packages, whose other packages do not belong to it
        _link_all(real.root, ("aiter", "aiter_meta") if real.wheel else os.listdir(real.root), folder)
        return cls(real, folder)

    @classmethod
    def with_files(cls, real: Tree, folder: Path, files: Mapping[str, str], gone: Iterable[str] = ()) -> Tree:
        """A fresh copy in which these files are as given, new ones too, and the files `gone` are not there.

        Paths are relative to the root. Raises OSError, also for a path that leads out of it.
        """
        scratch = cls.make(real, folder)
        for name in gone:
            scratch._own_path(name).unlink()
        for name, text in files.items():
            scratch.write(name, text.encode())
        return scratch.tree

    def write(self, name: str, data: bytes) -> None:
        """Let the copy have a file of its own with this content. `name`: its path below the root. Raises OSError."""
        path = self._own_path(name)
        path.unlink(missing_ok=True)
        path.write_bytes(data)

    def link(self, name: str, target: str) -> None:
        """Make a link to `target` in the copy, where nothing was. Raises FileExistsError."""
        self._own_path(name).symlink_to(target)

    def _own_path(self, name: str) -> Path:
        """The path of a file in the copy. All folders above it become the copy's own, with links to what the real ones
        hold: nothing is ever changed through a link."""
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise OSError(f"{name} lies outside of the tree")
        folder = self.folder
        for part in Path(name).parts[:-1]:
            folder = folder / part
            if folder.is_symlink():
                real = Path(os.path.realpath(folder))
                folder.unlink()
                folder.mkdir()
                _link_all(real, os.listdir(real), folder)
            folder.mkdir(exist_ok=True)
        return self.folder / name


def _link_all(real: Path, names: Iterable[str], folder: Path) -> None:
    """Make links in a folder to what has these names in the real one."""
    for name in names:
        if name not in _NOT_LINKED:
            (folder / name).symlink_to(real / name)


def digest(path: Path) -> str:
    """sha256 of a file's content; of its target's name for a relative link, which stays in the copy; "" for nothing."""
    try:
        if path.is_symlink() and not path.readlink().is_absolute():
            return hashlib.sha256(f"link to {path.readlink()}".encode()).hexdigest()
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
