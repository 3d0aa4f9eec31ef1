"""The modules that AITER builds: the node's store of them, the slot's folder, and the locks of dead builders.

AITER builds its modules (for minutes) in the slot's own folder, which starts as a copy of earlier builds on this node
for the same image and chip (`ModuleStore`, beside the run folders). A slot never builds in the store: tuner.py takes
`building`, builds in the slot's folder, and publishes the finished build. A folder for each slot is needed because
before 2026-07-09 (f8afb99ccc) a lock that a killed build left in AITER's folder blocks every later process for ever,
and after it the test for a dead builder is wrong in containers that share the host's name.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

POLL_S = 0.2
_NOT_KEPT = ("build", "__pycache__")
"""Folders of a built tree that we do not keep: objects and sources are large and not needed again."""
_LOCKS = ("build/lock_*", "build/*/build/lock", "build/**/.ninja_lock", "*.lock")
SECOND_LOOK_S = 0.5
"""AITER closes a lock and then removes the file (FileBaton.release), and fails if the file is gone by then."""
Inode = tuple[int, int]
"""The device and the inode of a file."""


class ModuleStore:
    """The node's store of built modules for one image and chip."""

    def __init__(self, cache: Path, key: str) -> None:
        self.root = cache / "aiter" / key
        self.modules = self.root / "jit"
        self.blocked_file = self.root / "blocklist.jsonl"
        self.repro = self.root / "repro"

    def is_warm(self, family: str) -> bool:
        """True if the modules of the family were built and published."""
        return (self.root / f"{family}.warm").exists()

    @contextmanager
    def building(self, alive: Callable[[], None]) -> Iterator[None]:
        """Wait for the node's right to build for this image, calling `alive`; a dead slot's right ends by itself."""
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.root / "building", "ab") as f:
            while True:
                try:
                    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    alive()
                    time.sleep(POLL_S)
            yield

    def publish(self, slot: Path, family: str) -> None:
        """Publish what a slot built; every file by a rename, so that a copy never sees half of one."""
        for path in sorted(slot.rglob("*")):
            inside = path.relative_to(slot)
            if path.is_symlink() or not path.is_file() or inside.parts[0] in _NOT_KEPT:
                continue
            published = self.modules / inside
            published.parent.mkdir(parents=True, exist_ok=True)
            hidden = published.with_name(f".{published.name}.{os.getpid()}")
            shutil.copy2(path, hidden)
            os.replace(hidden, published)
        (self.root / f"{family}.warm").touch()

    def copy_to(self, slot: Path) -> None:
        """Copy what the slot lacks."""
        for path in sorted(self.modules.rglob("*")):
            target = slot / path.relative_to(self.modules)
            is_lacking = target.is_symlink() or not target.exists()  # a link leads to a module of the image
            if path.is_file() and not path.name.startswith(".") and is_lacking:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)
                shutil.copy2(path, target)


def link_shipped_modules(slot: Path, package: Path) -> None:
    """Link the modules that the image brings along: with a build folder of its own, AITER would not look for them.

    A builder removes the link and writes a file of its own.
    """
    slot.mkdir(parents=True, exist_ok=True)
    for path in (package / "jit").glob("*.so"):
        if not os.path.lexists(slot / path.name):
            (slot / path.name).symlink_to(path)


def clear_stale_locks(folders: list[Path]) -> list[str]:
    """Remove locks of dead owners; sentences about what was removed.

    Every builder keeps its lock open until just before it removes it. So a lock is stale if no process has it open at
    two looks, which can be told if all processes of this user can be looked into. Other users' locks are left alone.
    """
    locks = _unheld(_locks_of(folders))
    if locks:
        time.sleep(SECOND_LOOK_S)
        locks = _unheld(locks)
    removed: list[str] = []
    for lock, inode in locks.items():
        with suppress(OSError):  # its owner is just done
            if _inode_of(lock) == inode:  # else it is a new one, of a living builder
                lock.unlink()
                removed.append(f"removed the stale lock {lock.name} in {lock.parent}: nobody holds it")
    return removed


def _locks_of(folders: list[Path]) -> dict[Path, Inode]:
    """The locks of this user in the folders."""
    locks: dict[Path, Inode] = {}
    for folder in folders:
        for pattern in _LOCKS:
            for path in folder.glob(pattern):
                with suppress(OSError):  # its owner is just done
                    if path.is_file() and path.stat().st_uid == os.geteuid():
                        locks[path] = _inode_of(path)
    return locks


def _unheld(locks: dict[Path, Inode]) -> dict[Path, Inode]:
    """The locks that no process has open; none if that cannot be told."""
    opened = _open_files() if locks else None
    if opened is None:
        return {}
    return {lock: inode for lock, inode in locks.items() if inode not in opened}


def _inode_of(path: Path) -> Inode:
    info = path.stat()
    return (info.st_dev, info.st_ino)


def _open_files() -> set[Inode] | None:
    """Every file that a process of ours has open; None if one cannot be looked into."""
    opened: set[Inode] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if entry.stat().st_uid != os.geteuid():
                continue
            for fd in os.listdir(entry / "fd"):
                with suppress(OSError):
                    info = os.stat(entry / "fd" / fd)
                    opened.add((info.st_dev, info.st_ino))
        except PermissionError:
            return None
        except OSError:  # it ended meanwhile
            continue
    return opened
