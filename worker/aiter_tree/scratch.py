"""A scratch copy of a tree: a folder of links to the real one, in which single files are copies that may be changed.

A process that has the copy first in PYTHONPATH imports `aiter` from it, and finds csrc/, hsa/ and the rest beside it
as in the real tree (aiter/jit/core.py makes no real paths of its own). The real tree is only read.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from worker.aiter_tree.locate import Tree

MARK = ".gemmfleet-scratch"
_LEFT_OUT = frozenset((".git", "__pycache__", MARK))
_OF_A_WHEEL = ("csrc", "hsa", "gradlib", "3rdparty")
"""Folders of a wheel's aiter_meta that AITER of 2025-08 looks for in the root, not knowing that it is installed."""


class ScratchTree:
    """The copy of `real` in a folder. `tree` is the copy as a tree of its own."""

    def __init__(self, real: Tree, folder: Path) -> None:
        self.real = real
        self.folder = folder
        meta = folder / real.meta.relative_to(real.root)
        scripts = {name: folder / path.relative_to(real.root) for name, path in real.scripts.items()}
        self.tree = replace(
            real, root=folder, package=folder / "aiter", meta=meta, scripts=scripts, imported=False, notes=()
        )

    @classmethod
    def make(cls, real: Tree, folder: Path) -> ScratchTree:
        """A fresh copy in `folder`, which is replaced if it is an older one. Raises OSError, FileExistsError for a
        folder that holds anything else."""
        folder = Path(os.path.abspath(folder))
        if folder.exists():
            if not (folder / MARK).is_file() and any(folder.iterdir()):
                raise FileExistsError(f"{folder} is no scratch copy, and not empty: it is left alone")
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        (folder / MARK).write_text(f"links to {real.root}\n")
        made = cls(real, folder)
        if real.wheel:
            for name in ("aiter", "aiter_meta"):
                (folder / name).symlink_to(real.root / name)
            for name in _OF_A_WHEEL:
                if (real.meta / name).exists():
                    (folder / name).symlink_to(Path("aiter_meta") / name)
        else:
            made._link_all(real.root, folder)
        return made

    @classmethod
    def with_files(cls, real: Tree, folder: Path, files: Mapping[str, str], emptied: Iterable[str] = ()) -> Tree:
        """A fresh copy in which these files are as given, new ones too, and the folders `emptied` hold no others.

        Paths are relative to the root. Raises OSError, also for a path that leads out of it.
        """
        made = cls.make(real, folder)
        for rel in emptied:
            made.open_up((folder / rel).parent)
            (folder / rel).unlink()
        for rel, text in files.items():
            if Path(rel).is_absolute() or ".." in Path(rel).parts:
                raise OSError(f"{rel} lies outside of the tree")
            parent = (folder / rel).parent
            there = parent
            while not there.exists():
                there = there.parent
            made.open_up(there)
            parent.mkdir(parents=True, exist_ok=True)
            path = made._inside(rel)
            path.unlink(missing_ok=True)
            path.write_bytes(text.encode())
        return made.tree

    def write(self, rel: str, data: bytes) -> None:
        """Let the copy have a file of its own with this content. Raises OSError where there is none to replace."""
        path = self._inside(rel)
        mode = path.stat().st_mode
        if path.is_symlink():
            path.unlink()
        path.write_bytes(data)
        path.chmod(mode & 0o777 | 0o200)

    def link(self, rel: str, target: str) -> None:
        """A link to something else in the copy, where nothing was. Raises FileExistsError."""
        self._inside(rel).symlink_to(target)

    def _inside(self, rel: str) -> Path:
        """The path, all folders above it being the copy's own: nothing is ever changed through a link."""
        path = self.folder / rel
        self.open_up(path.parent)
        if Path(os.path.realpath(path.parent)) != Path(os.path.realpath(self.folder)) / Path(rel).parent:
            raise OSError(f"{path} lies behind a link")
        return path

    def open_up(self, folder: Path) -> None:
        """Make every folder down to this one a real one, full of links."""
        at = self.folder
        for part in folder.relative_to(self.folder).parts:
            at = at / part
            if at.is_symlink():
                behind = Path(os.path.realpath(at))
                at.unlink()
                at.mkdir()
                self._link_all(behind, at)

    def _link_all(self, behind: Path, folder: Path) -> None:
        with os.scandir(behind) as entries:
            for entry in entries:
                if entry.name not in _LEFT_OUT:
                    (folder / entry.name).symlink_to(entry.path)


def digest(path: Path) -> str:
    """sha256 of a file, or of where a link leads that stays in the copy; "" for nothing."""
    try:
        if path.is_symlink() and not path.readlink().is_absolute():
            return hashlib.sha256(f"link to {path.readlink()}".encode()).hexdigest()
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ""
