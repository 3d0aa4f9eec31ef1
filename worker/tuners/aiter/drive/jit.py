"""Where AITER builds its modules: a folder of the slot's own, begun as a copy of what was built on this node before.

What is built once for an image and a chip is kept beside the run folders (`Store`). A slot never builds into it: a
finished build is published there under a lock, and every slot of every run copies it. Locks that AITER's builders leave
behind are cleared when their owner is provably dead, and only then.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from worker.process import is_alive

CACHE_ENV = "GEMMFLEET_CACHE"
"""The node's folder for what outlives a run."""
IMAGE_ENV = "GEMMFLEET_IMAGE_DIGEST"
POLL_S = 0.2
_LEFT_OUT = ("build", "__pycache__")
"""Of a built tree only the modules count; objects and sources are large and never read again."""


def image_key(facts: Mapping[str, str]) -> str:
    """A name for the image and chip: by its digest where that is known, else by what was read of it."""
    text = "\n".join(f"{k}={facts[k]}" for k in sorted(facts) if facts[k])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Store:
    """What is kept on the node for one image and chip."""

    def __init__(self, cache: Path, key: str) -> None:
        self.root = cache / "aiter" / key
        self.modules = self.root / "jit"
        self.blocklist = self.root / "blocklist.jsonl"
        self.repro = self.root / "repro"

    def is_warm(self, what: str) -> bool:
        """Whether the modules of `what` (a family and its types) were built and published."""
        return (self.root / f"{what}.warm").exists()

    @contextmanager
    def building(self, alive_now: Callable[[], None]) -> Iterator[None]:
        """Hold the node's right to build for this image. Waits, calling `alive_now`; a dead holder's ends by itself."""
        self.root.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.root / "building", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    alive_now()
                    time.sleep(POLL_S)
            yield
        finally:
            os.close(fd)

    def publish(self, slot: Path, what: str) -> None:
        """Take in what a slot built; every file by a rename, so that a copy never sees half of one."""
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
        for path in sorted(self.modules.rglob("*")) if self.modules.is_dir() else ():
            to = slot / path.relative_to(self.modules)
            if path.is_file() and not path.name.startswith(".") and (to.is_symlink() or not to.exists()):
                to.parent.mkdir(parents=True, exist_ok=True)
                to.unlink(missing_ok=True)
                shutil.copy2(path, to)
                count += 1
        return count


def seed(slot: Path, package: Path) -> int:
    """Link the modules that the image brings along: with a build folder of its own, AITER would not look for them.

    A builder removes the link and writes a file of its own. Returns how many.
    """
    slot.mkdir(parents=True, exist_ok=True)
    count = 0
    for path in sorted((package / "jit").glob("*.so")):
        to = slot / path.name
        if not to.is_symlink() and not to.exists():
            to.symlink_to(path)
            count += 1
    return count


def clear_stale_locks(folders: list[Path]) -> list[str]:
    """Remove locks whose owner is provably dead; what was removed, in words.

    A lock file holds its owner's number and host since 2026-07; every builder keeps the file open while it lives. Dead
    is an owner of this host that is gone, or a lock that no process has open (where all of ours can be looked into).
    """
    told = []
    found = [lock for folder in folders for lock in _locks(folder)]
    held = _open_files() if found else set()
    for lock in found:
        owner = _owner(lock)
        if owner is not None:
            pid, host = owner
            dead, why = host == socket.gethostname() and not is_alive(pid), f"process {pid} on this host is gone"
        else:
            dead, why = held is not None, "no process has it open"
        if dead and (held is None or not _is_open(lock, held)):
            lock.unlink(missing_ok=True)
            told.append(f"removed the stale lock {lock.name} in {lock.parent}: {why}")
    return told


def _locks(folder: Path) -> list[Path]:
    build = folder / "build"
    found = [*build.glob("lock_*"), *build.glob("*/build/lock"), *build.glob("**/.ninja_lock"), *folder.glob("*.lock")]
    return [p for p in found if p.is_file()]


def _owner(lock: Path) -> tuple[int, str] | None:
    try:
        lines = lock.read_text().split()
        return (int(lines[0]), lines[1]) if len(lines) == 2 else None
    except (OSError, ValueError):
        return None


def _open_files() -> set[tuple[int, int]] | None:
    """(device, inode) of every file that a process of ours has open; None where one cannot be looked into."""
    out: set[tuple[int, int]] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            if os.stat(f"/proc/{entry}").st_uid != os.geteuid():
                continue
            for fd in os.listdir(f"/proc/{entry}/fd"):
                try:
                    info = os.stat(f"/proc/{entry}/fd/{fd}")
                except OSError:
                    continue
                out.add((info.st_dev, info.st_ino))
        except PermissionError:
            return None
        except OSError:  # gone meanwhile
            continue
    return out


def _is_open(lock: Path, held: set[tuple[int, int]]) -> bool:
    try:
        info = lock.stat()
    except OSError:
        return False
    return (info.st_dev, info.st_ino) in held
