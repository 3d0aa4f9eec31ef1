"""Environment variables and build folders of AITER's processes.

Inherited variables that would change the result are cleared, and recorded. Precedence for GPU_ARCHS, CU_NUM and the
switches of single tuners: the inventory's `aiter:` section, its `env:`, the slot's own chip, the image.

AITER builds its modules in a folder of the slot's own, which begins as a copy of what was built on this node before for
the image and chip (`ModuleStore`, beside the run folders). A slot never builds into the store: a finished build is
published there under a lock. Locks that AITER's builders leave behind are removed only if their owner is provably dead.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.process import is_alive
from worker.protocol.paths import AITER_CLEARED, AITER_SWITCHES, CLEARED_ENV, INVENTORY_ENV

KNOWN_TO_AITER = ("gfx942", "gfx950")
"""Chips whose name AITER's build takes in GPU_ARCHS at every date; others it queries from the driver (`native`)."""

POLL_S = 0.2
_LEFT_OUT = ("build", "__pycache__")
"""Folders of a built tree that are not kept: objects and sources are large and never read again."""


@dataclass(frozen=True, slots=True)
class Chip:
    """The slot's chip, as rows are labelled with it."""

    gfx: str = ""
    cu_num: int | None = None

    def variables(self) -> dict[str, str]:
        """GPU_ARCHS and CU_NUM: `get_gfx()` takes the last entry of a list, which an image is built with."""
        if not self.gfx.startswith("gfx"):
            return {}
        arch = self.gfx if self.gfx in KNOWN_TO_AITER else "native"
        return {"GPU_ARCHS": arch, "CU_NUM": str(self.cu_num or 0)}


def inventory_switches(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Switches that the inventory sets, with their values; AITER gets them."""
    named = base.get(INVENTORY_ENV, "").split()
    return {n: base[n] for n in named if n in base and AITER_SWITCHES.fullmatch(n) and not AITER_CLEARED.fullmatch(n)}


def cleared_names(base: Mapping[str, str] = os.environ) -> list[str]:
    """Names of inherited variables that AITER does not get, those that tune.sh cleared among them."""
    earlier = [word.partition("=")[0] for word in base.get(CLEARED_ENV, "").split()]
    return sorted({*earlier, *(name for name in base if _taken(name, base))})


def switch_record(chip: Chip, base: Mapping[str, str] = os.environ) -> dict[str, dict[str, str]]:
    """Switches for provenance: `set` (ours), `overridden` (what the image had of those), `kept` (the inventory's)."""
    kept = inventory_switches(base)
    ours = {n: v for n, v in chip.variables().items() if n not in kept}
    earlier = dict(word.split("=", 1) for word in base.get(CLEARED_ENV, "").split() if "=" in word)
    had = {**earlier, **{n: v for n, v in base.items() if n not in kept}}
    overridden = {n: had[n] for n, v in ours.items() if had.get(n, v) != v}
    return {"set": ours, "overridden": overridden, "kept": kept}


def switch_warnings(chip: Chip, base: Mapping[str, str] = os.environ) -> list[str]:
    """Warnings about switches of the inventory that change the candidates."""
    kept, out = inventory_switches(base), []
    arch = kept.get("GPU_ARCHS", "").split(";")[-1].strip()
    if arch and arch not in ("native", chip.gfx):
        out.append(
            f"GPU_ARCHS={kept['GPU_ARCHS']} of the inventory is kept: AITER looks for the kernels of {arch}, and this "
            f"slot is {chip.gfx or 'of no chip that is known'}; candidates are missing or wrong for it"
        )
    if "CU_NUM" in kept and kept["CU_NUM"].strip() not in ("0", str(chip.cu_num)):
        out.append(
            f"CU_NUM={kept['CU_NUM']} of the inventory is kept, and this slot has {chip.cu_num} compute units: rows "
            "would be looked up for another chip"
        )
    others = sorted(n for n in kept if n not in ("GPU_ARCHS", "CU_NUM"))
    if others:
        out.append(f"{', '.join(others)} of the inventory: kept, which changes AITER's candidates or their verdicts")
    return out


def environment(
    base: Mapping[str, str],
    *,
    paths: list[Path],
    jit: Path,
    tmp: Path,
    shim: Path | None = None,
    journal: Path | None = None,
    blocked: Path | None = None,
    worker_code: Path | None = None,
    chip: Chip | None = None,
) -> dict[str, str]:
    """The environment of one process. `paths`: where `aiter` is imported from, first; `jit`, `tmp`: the slot's own.

    `worker_code` (our own package's folder) is taken off the path: nothing of ours is AITER's to import.
    """
    env = {k: v for k, v in base.items() if not _taken(k, base)}
    env = {**(chip.variables() if chip else {}), **env}
    inherited = [
        p for p in base.get("PYTHONPATH", "").split(os.pathsep)
        if p and not (worker_code and os.path.realpath(p) == os.path.realpath(worker_code))
    ]  # fmt: skip
    ours = [str(shim)] if shim else []
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*ours, *map(str, paths), *inherited]))
    env["PYTHONUNBUFFERED"] = "1"  # prints would come in blocks else
    env["PYTHONFAULTHANDLER"] = "1"
    env["AITER_JIT_DIR"] = str(jit)
    env["TMPDIR"] = str(tmp)
    for name, path in (("GEMMFLEET_AITER_JOURNAL", journal), ("GEMMFLEET_AITER_BLOCKED", blocked)):
        env.pop(name, None)
        if shim and path:
            env[name] = str(path)
    return env


def chip_of(device: Mapping[str, Any]) -> Chip:
    """The chip of a device as probe and torch name it."""
    number = device.get("cu_num")
    return Chip(str(device.get("gfx") or ""), int(number) if number else None)


def _taken(name: str, base: Mapping[str, str]) -> bool:
    """True if AITER does not get an inherited variable."""
    if AITER_CLEARED.fullmatch(name):
        return True
    return bool(AITER_SWITCHES.fullmatch(name)) and name not in base.get(INVENTORY_ENV, "").split()


def image_key(facts: Mapping[str, str]) -> str:
    """A name for the image and chip: by its digest where that is known, else by what was read of it."""
    text = "\n".join(f"{k}={facts[k]}" for k in sorted(facts) if facts[k])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
        for path in sorted(self.modules.rglob("*")) if self.modules.is_dir() else ():
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
    count = 0
    for path in sorted((package / "jit").glob("*.so")):
        to = slot / path.name
        if not to.is_symlink() and not to.exists():
            to.symlink_to(path)
            count += 1
    return count


def clear_stale_locks(folders: list[Path]) -> list[str]:
    """Remove locks of dead owners; sentences about what was removed.

    A lock file holds its owner's number and host since 2026-07, and a lock of another host is left alone. Otherwise a
    lock is stale if no process has it open, as every builder keeps its lock open; that can be told if all processes of
    this user can be looked into.
    """
    found = [lock for folder in folders for lock in _locks(folder)]
    held = _open_files() if found else None
    removed: list[str] = []
    for lock in found:
        if held is None:
            break
        with suppress(OSError):  # its owner is just done
            info, owner = lock.stat(), lock.read_text(errors="replace").split()
            lives = owner[:1] != [] and owner[0].isdigit() and is_alive(int(owner[0]))
            if (info.st_dev, info.st_ino) not in held and owner[1:2] in ([], [socket.gethostname()]) and not lives:
                lock.unlink()
                removed.append(f"removed the stale lock {lock.name} in {lock.parent}: nobody holds it")
    return removed


def _locks(folder: Path) -> list[Path]:
    build = folder / "build"
    found = [*build.glob("lock_*"), *build.glob("*/build/lock"), *build.glob("**/.ninja_lock"), *folder.glob("*.lock")]
    return [p for p in found if p.is_file()]


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
