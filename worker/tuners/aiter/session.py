"""The AITER of a slot: the image's tree, findings and chip, the slot's folders, and the settings for a family.

Files and chip are read once, when the tuner opens. AITER builds its modules in the slot's own folder, which starts as a
copy of earlier builds on this node for the same image and chip (`ModuleStore`, beside the run folders). A slot never
builds in the store: a finished build is published there under a lock.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from worker import PACKAGE_PARENT
from worker.aiter_tree.kernels import KernelLists
from worker.aiter_tree.locate import NotATreeError, Tree, choose
from worker.device import identify
from worker.families import FAMILIES, Family
from worker.process import exit_words, run_in_foreground
from worker.protocol.paths import AITER_ROOT_ENV, CACHE_ENV, IMAGE_ENV
from worker.text import clean
from worker.tuners.aiter.blocklist import Blocklist, slot_identity
from worker.tuners.aiter.findings import (
    WINDOWS,
    Applied,
    Findings,
    TunerScript,
    WorkaroundRefusedError,
    inspect,
    needed,
    prepare,
)
from worker.tuners.aiter.launch import (
    TUNED,
    UNTUNED,
    batch_size,
    cleared_names,
    environment,
    ignored_options,
    inventory_switches,
    query_device,
    switch_record,
    switch_warnings,
)
from worker.tuners.aiter.rows import KernelNames
from worker.tuners.aiter.spec import Options
from worker.tuners.base import Place

POLL_S = 0.2
_LEFT_OUT = ("build", "__pycache__")
"""Folders of a built tree that we do not keep: objects and sources are large and not needed again."""
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

    def copy_to(self, slot: Path) -> None:
        """Copy what the slot lacks."""
        for path in sorted(self.modules.rglob("*")):
            to = slot / path.relative_to(self.modules)
            if path.is_file() and not path.name.startswith(".") and (to.is_symlink() or not to.exists()):
                to.parent.mkdir(parents=True, exist_ok=True)
                to.unlink(missing_ok=True)
                shutil.copy2(path, to)


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

    Every builder keeps its lock open. So a lock is stale if no process has it open, which can be told if all processes
    of this user can be looked into.
    """
    found = [p for folder in folders for pattern in _LOCKS for p in folder.glob(pattern) if p.is_file()]
    held = _open_files() if found else None
    if held is None:
        return []
    removed: list[str] = []
    for lock in found:
        with suppress(OSError):  # its owner is just done
            info = lock.stat()
            if (info.st_dev, info.st_ino) not in held:
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


BUILD_QUIET_S = 600.0
"""Seconds of silence without a compiler at work that are a hang while modules are built."""


def say(text: str) -> None:
    """Print a line of ours into the slot's log."""
    print(f"gemmfleet: {text}", flush=True)


@dataclass(frozen=True, slots=True)
class AiterImage:
    """`tree`: a scratch copy if workarounds are in use (`applied`). `device`: gfx, cu_num, device name and versions.
    `key` names image and chip. `seen_by_torch`: gfx and cu_num come from torch, as in AITER's rows."""

    tree: Tree
    findings: Findings
    device: Mapping[str, Any]
    key: str
    digest: str
    notes: tuple[str, ...] = ()
    seen_by_torch: bool = False
    applied: tuple[Applied, ...] = ()

    @property
    def gfx(self) -> str:
        return str(self.device.get("gfx") or "")

    def script(self, family: Family) -> TunerScript | None:
        """The family's script in this tree, None if the tree has none."""
        found, path = self.findings.families.get(family.name), self.tree.scripts.get(family.name)
        return replace(found, path=path) if found is not None and path is not None else None

    @property
    def named(self) -> str:
        return f"AITER {self.tree.version or self.tree.commit[:10] or 'of unknown version'} in {self.tree.root}"

    @property
    def warning(self) -> str:
        """Sentence for the user of a run if this AITER is not promised to work, else ""."""
        if self.findings.promised:
            return ""
        return f"{self.named} is not one that gemmfleet promises to drive ({WINDOWS}): look at its rows with care"

    def refusal(self, family: Family) -> str:
        """Reason that no shape of the family can be tuned here, "" if nothing prevents it."""
        if family.aiter.gfx and self.gfx not in family.aiter.gfx:
            chips, here = " or ".join(family.aiter.gfx), self.gfx or "no GPU that is known"
            return f"{family.name} needs {chips}, and this is {here}"
        if self.script(family) is None:
            return f"{self.named} has no tuner script for {family.name}"
        if why := self.findings.misfit:
            return f"{self.warning or self.named}; its candidates cannot be watched: {why}"
        return ""

    def as_json(self) -> dict[str, Any]:
        """Data for the record of the tuner's start, and so for provenance."""
        return {
            "root": str(self.tree.root), "version": self.tree.version, "commit": self.tree.commit, "image": self.digest,
            "key": self.key, "cleared_env": cleared_names(), "shim": self.findings.misfit or "used",
            "warning": self.warning, "notes": list(self.notes)[:20], "env": switch_record(self.device),
        }  # fmt: skip


def inspect_image(options: Options) -> AiterImage:
    """Find AITER, read its files, query the chip. Raises NotATreeError with the ways out, RuntimeError if the chip
    gives no answer."""
    here = identify()
    tree, notes = tree_here(str(here["gfx"] or ""), options.family, options.root)
    answer = query_device("facts", environment(os.environ, tree.root, None, {}))
    if "error" in answer:
        raise RuntimeError(f"the GPU cannot be queried: {answer['error']}")
    device = {k: answer.get(k) or here.get(k) for k in ("gfx", "cu_num", "device")}
    versions = {k: answer[k] for k in ("torch", "hip") if answer.get(k)}
    gfx, digest = str(device["gfx"] or ""), os.environ.get(IMAGE_ENV, "")
    findings = inspect(tree, gfx)
    seen = {
        "image": digest, "gfx": gfx, "root": str(tree.root), "python": str(here["python"]), **findings.files,
        **{k: str(v) for k, v in versions.items()}, **inventory_switches(),
    }  # fmt: skip
    text = "\n".join(f"{k}={seen[k]}" for k in sorted(seen) if seen[k])
    more = [answer["absent"]] if "absent" in answer else []
    return AiterImage(
        tree=tree,
        findings=findings,
        device={**device, **versions},
        key=hashlib.sha256(text.encode()).hexdigest()[:16],
        digest=digest,
        notes=(*notes, *more, *(f"warning: {w}" for w in switch_warnings(device))),
        seen_by_torch="absent" not in answer,
    )


def tree_here(gfx: str, family: str, root: str = "") -> tuple[Tree, tuple[str, ...]]:
    """The tree of this machine that serves a family, with notes on the choice. Raises NotATreeError."""
    wanted = root or os.environ.get(AITER_ROOT_ENV, "")
    return choose(wanted, family=family, gfx=gfx if gfx.startswith("gfx") else "")


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that shapes of a family are tuned with.

    `slot`: the slot's own folder, with `jit` and `tmp`. `batch`: shapes that AITER takes at once. `names`: kernel names
    of the family as far as they are known, filled as rows come. `err_ratio`: the largest error. `quiet_s`: seconds of
    silence that are a hang. `grace_s`: seconds from SIGINT to SIGKILL.
    """

    image: AiterImage
    slot: Path
    family: Family
    script: TunerScript
    options: Options
    batch: int
    names: KernelNames
    err_ratio: float
    quiet_s: float = BUILD_QUIET_S
    grace_s: float = 5.0

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the untuned CSV, by our names."""
        return self.family.from_aiter(self.script.columns)

    def env(self, watched: Path | None = None) -> dict[str, str]:
        """The environment of a process of AITER; `watched`: its folder, if the shim is to report its candidates."""
        return environment(os.environ, self.image.tree.root, self.slot, self.image.device, watched)


@dataclass(slots=True)
class Session:
    """The slot's AITER from the tuner's start to its end. `image`: with its own tree."""

    image: AiterImage
    slot: Path
    store: ModuleStore
    blocklist: Blocklist
    kernels: KernelLists
    _names: dict[str, KernelNames] = field(default_factory=dict)
    _images: dict[tuple[str, ...], AiterImage] = field(default_factory=dict)

    @classmethod
    def make(cls, image: AiterImage, place: Place) -> Session:
        """Make the folders, link what the image has built, clear stale locks. Raises OSError."""
        node = (place.node_dir or Path.cwd()).absolute()
        slot = node / "aiter" / place.slot
        for folder in ("jit/build", "tmp"):
            (slot / folder).mkdir(parents=True, exist_ok=True)
        link_shipped_modules(slot / "jit", image.tree.package)
        for text in clear_stale_locks([slot / "jit", Path("/tmp/aiter_configs")]):
            say(text)
        store = ModuleStore(Path(os.environ.get(CACHE_ENV) or node / "cache"), image.key)
        blocklist = Blocklist(store.blocklist, slot_identity(place, image.digest or image.key))
        return cls(image, slot, store, blocklist, KernelLists(image.tree))

    def adapted(self, family: Family, keys: Iterable[Mapping[str, object]] = ()) -> AiterImage:
        """The image with a scratch copy of its tree that has the workarounds which these shapes need; the image itself
        if they need none. Raises OSError."""
        names = tuple(needed(self.image.findings, family, keys))
        if names and names not in self._images:
            self._images[names] = self._with_workarounds(names)
        return self._images.get(names, self.image)

    def _with_workarounds(self, names: tuple[str, ...]) -> AiterImage:
        try:
            scratch, applied = prepare(self.image.findings, names, self.slot / "-".join(("tree", *names)))
        except WorkaroundRefusedError as e:
            say(f"a workaround is not applied: {e}")
            return self.image
        for one in applied:
            say(f"{one['name']} is applied to a scratch copy ({'; '.join(one['evidence'][:2])})")
        return replace(self.image, tree=scratch.tree, applied=applied)

    @property
    def applied(self) -> tuple[Applied, ...]:
        """Every workaround in use so far."""
        return tuple({a["name"]: a for image in self._images.values() for a in image.applied}.values())

    def job(self, family: Family, options: Options, keys: Iterable[Mapping[str, object]] = ()) -> Job:
        """The job for shapes of these keys, with the limits of gemmfleet's own tiny shapes. Raises OSError, LookupError
        if the tree has no script of the family."""
        image = self.adapted(family, keys)
        script = image.script(family)
        assert script is not None  # else `refusal` says so
        for note in ignored_options(script, options):
            say(note)
        names, batch = self._names.setdefault(family.name, KernelNames()), batch_size(family, script, options)
        return Job(image, self.slot, family, script, options, batch, names, family.aiter.err_ratio)

    def env(self) -> dict[str, str]:
        """The environment of a process that tunes nothing."""
        return environment(os.environ, self.image.tree.root, self.slot, self.image.device)


VERIFY_MARK = "GEMMFLEET-VERIFY "


def verify(table: Path, name: str, slot_env: Mapping[str, str], until_eof: bool) -> int:
    """`worker verify`: run AITER's own production operators with a tuned table, by `--run_config` if it is there.

    Prints what AITER prints, between two lines of ours: which AITER it is, and how the script ended. Status 0 if the
    operators could be run at all.
    """
    here = identify()
    gfx = str(here["gfx"] or "")
    try:
        tree, notes = tree_here(gfx, name)
    except NotATreeError as e:
        return _report(supported=False, why=str(e))
    found = inspect(tree, gfx).families.get(name)
    answer: dict[str, Any] = {
        "gfx": gfx, "cu_num": here["cu_num"], "root": str(tree.root), "version": tree.version, "commit": tree.commit,
        "notes": list(notes)[:10],
    }  # fmt: skip
    if found is None:
        return _report(supported=False, why=f"this AITER has no script of {name}", **answer)
    lacks = "" if found.has("--run_config") else "this AITER has no --run_config (it came on 2026-04-14)"
    if lacks and not FAMILIES[name].format:
        return _report(supported=False, why=f"{lacks}, and bench has no inputs for {name}", **answer)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=os.environ.get("TMPDIR")) as scratch:
        folder = Path(scratch)
        for inside in ("jit/build", "tmp"):
            (folder / inside).mkdir(parents=True)
        link_shipped_modules(folder / "jit", tree.package)
        argv = _verify_command(found, name, table, folder)
        how = f"the operator itself: {lacks}" if lacks else ""
        env = {**environment({**os.environ, **slot_env}, tree.root, folder, here), "AITER_LOG_TUNED_CONFIG": "1"}
        if fault := _import_fault(env, tree.root):
            return _report(supported=False, why=f"the AITER in {tree.root} cannot be imported: {fault}", **answer)
        _report(supported=True, table=str(folder / TUNED), how=how, **answer)
        if lacks:
            argv = [sys.executable, "-m", "worker.bench.verify", name, str(folder / TUNED)]
            path = os.pathsep.join([str(PACKAGE_PARENT), env["PYTHONPATH"]])
            env |= {FAMILIES[name].env: str(folder / TUNED), AITER_ROOT_ENV: str(tree.root), "PYTHONPATH": path}
        code = run_in_foreground(argv, env, tree.root, until_eof=until_eof)
    print(flush=True)
    return _report(code=code)


def _import_fault(env: Mapping[str, str], root: Path) -> str:
    """The last line of an `import aiter` that fails, or "". Otherwise every row would fail for this one reason."""
    argv = [sys.executable, "-c", "import aiter"]
    try:
        done = subprocess.run(argv, env=env, cwd=root, capture_output=True, timeout=BUILD_QUIET_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no end within {BUILD_QUIET_S:g} s"
    if done.returncode == 0:
        return ""
    return clean("".join(done.stderr.decode(errors="replace").splitlines()[-1:]), 300) or exit_words(done.returncode)


def _verify_command(script: TunerScript, name: str, table: Path, folder: Path) -> list[str]:
    """The command line, with copies of the table and a list of its shapes, because the script has no default list."""
    family, unused = FAMILIES[name], folder / "unused.csv"
    for copy in (folder / TUNED, unused):
        copy.write_bytes(table.read_bytes())
    with table.open(newline="") as f, (folder / UNTUNED).open("w", newline="") as to:
        writer = csv.writer(to, lineterminator="\n")
        writer.writerow(family.key_names)
        writer.writerows([row.get(c, "") for c in family.key_names] for row in csv.DictReader(f))
    words = [sys.executable, str(script.path), "--run_config", str(folder / TUNED), "-i", str(folder / UNTUNED)]
    return [*words, "-o", str(unused), *(f for f in family.aiter.flags if script.has(f))]


def _report(**what: Any) -> int:
    """Print one of our lines; return 0."""
    print(VERIFY_MARK + json.dumps(what), flush=True)
    return 0
