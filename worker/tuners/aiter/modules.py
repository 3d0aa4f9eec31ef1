"""Build folders of AITER's modules.

AITER builds its modules in a folder of the slot's own, which begins as a copy of what was built on this node before for
the image and chip (`ModuleStore`, beside the run folders). A slot never builds into the store: a finished build is
published there under a lock. Locks that AITER's builders leave behind are removed only if their owner is provably dead.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from worker.process import is_alive

POLL_S = 0.2
_LEFT_OUT = ("build", "__pycache__")
"""Folders of a built tree that are not kept: objects and sources are large and never read again."""
_LOCKS = ("build/lock_*", "build/*/build/lock", "build/**/.ninja_lock", "*.lock")


class ModuleStore:
    """The node's store of built modules for one image and chip."""

    def __init__(self, cache: Path, key: str) -> None:
        self.root = cache / "aiter" / key
        self.modules = self.root / "jit"
        self.blocklist = self.root / "blocklist.jsonl"
        self.repro = self.root / "repro"

    def is_warm(self, what: str) -> bool:
        """True if the modules of `what` (a family) were built and published."""
        return (self.root / f"{what}.warm").exists()

    @contextmanager
    def building(self, alive_now: Callable[[], None]) -> Iterator[None]:
        """Hold the node's right to build for this image. Waits, calling `alive_now`; a dead holder's ends by itself."""
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.root / "building", "ab") as f:
            while True:
                try:
                    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    alive_now()
                    time.sleep(POLL_S)
            yield

    def publish(self, slot: Path, what: str) -> None:
        """Publish what a slot built; every file by a rename, so that a copy never sees half of one."""
        for path in sorted(slot.rglob("*")):
            inside = path.relative_to(slot)
            if path.is_symlink() or not path.is_file() or inside.parts[0] in _LEFT_OUT:
                continue
            to = self.modules / inside
            to.parent.mkdir(parents=True, exist_ok=True)
            aside = to.with_name(f".{to.name}.{os.getpid()}")
            shutil.copy2(path, aside)
            os.replace(aside, to)
        (self.root / f"{what}.warm").touch()

    def copy_to(self, slot: Path) -> int:
        """Copy what the slot lacks; how many files."""
        count = 0
        for path in sorted(self.modules.rglob("*")):
            to = slot / path.relative_to(self.modules)
            if path.is_file() and not path.name.startswith(".") and (to.is_symlink() or not to.exists()):
                to.parent.mkdir(parents=True, exist_ok=True)
                to.unlink(missing_ok=True)
                shutil.copy2(path, to)
                count += 1
        return count


def link_shipped_modules(slot: Path, package: Path) -> int:
    """Link the modules that the image brings along: with a build folder of its own, AITER would not look for them.

    A builder removes the link and writes a file of its own. Returns how many.
    """
    slot.mkdir(parents=True, exist_ok=True)
    missing = [p for p in sorted((package / "jit").glob("*.so")) if not os.path.lexists(slot / p.name)]
    for path in missing:
        (slot / path.name).symlink_to(path)
    return len(missing)


def clear_stale_locks(folders: list[Path]) -> list[str]:
    """Remove locks of dead owners; sentences about what was removed.

    A lock file holds its owner's number and host since 2026-07, and a lock of another host is left alone. Otherwise a
    lock is stale if no process has it open, because every builder keeps its lock open; that can be told if all
    processes of this user can be looked into.
    """
    found = [p for folder in folders for pattern in _LOCKS for p in folder.glob(pattern) if p.is_file()]
    held = _open_files() if found else None
    removed: list[str] = []
    for lock in found if held is not None else ():
        with suppress(OSError):  # its owner is just done
            info, owner = lock.stat(), lock.read_text(errors="replace").split()
            lives = bool(owner) and owner[0].isdigit() and is_alive(int(owner[0]))
            here = owner[1:2] in ([], [socket.gethostname()])
            if held is not None and (info.st_dev, info.st_ino) not in held and here and not lives:
                lock.unlink()
                removed.append(f"removed the stale lock {lock.name} in {lock.parent}: nobody holds it")
    return removed


def _open_files() -> set[tuple[int, int]] | None:
    """(device, inode) of every file that a process of ours has open; None if one cannot be looked into."""
    out: set[tuple[int, int]] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if entry.stat().st_uid != os.geteuid():
                continue
            for fd in os.listdir(entry / "fd"):
                with suppress(OSError):
                    info = os.stat(entry / "fd" / fd)
                    out.add((info.st_dev, info.st_ino))
        except PermissionError:
            return None
        except OSError:  # it ended meanwhile
            continue
    return out
