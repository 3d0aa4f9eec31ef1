"""A slot's AITER: the image's tree, findings and chip, the slot's folders, and the context that a family is tuned in.

Files and chip are read once, when the tuner opens.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from worker import PACKAGE_PARENT
from worker.aiter_tree.kernel_lists import KernelLists
from worker.aiter_tree.locate import Tree, choose
from worker.device.probe import identify
from worker.families import Family
from worker.process import Child
from worker.protocol.paths import AITER_ROOT_ENV, CACHE_ENV, IMAGE_ENV
from worker.text import clean
from worker.tuners.aiter.command import ProcessFiles, Strategy, strategy
from worker.tuners.aiter.device_query import query_device
from worker.tuners.aiter.environment import (
    Chip,
    ModuleStore,
    chip_of,
    clear_stale_locks,
    cleared_names,
    environment,
    image_key,
    inventory_switches,
    link_shipped_modules,
    switch_record,
    switch_warnings,
)
from worker.tuners.aiter.findings import WINDOWS, Findings, TunerScript, inspect
from worker.tuners.aiter.known_issues.catalogue import diagnose
from worker.tuners.aiter.progress import KernelNames
from worker.tuners.aiter.spec import Options
from worker.tuners.aiter.workarounds import (
    SHIM,
    AppliedWorkaround,
    ShimFit,
    WorkaroundRefusedError,
    needed,
    prepare,
    shim_fit,
)
from worker.tuners.base import Place, TunerFault

ASK_TIMEOUT_S = 240.0
HELP_TIMEOUT_S = 300.0
"""Limit of a script's --help: it imports torch and AITER before it reads its arguments."""
BUILD_QUIET_S = 600.0
"""Seconds of silence without a compiler at work that are a hang while modules are built."""
_OPTION = re.compile(r"^ {1,8}(-\S.*?)(?: {2,}|$)", re.MULTILINE)
_LONG = re.compile(r"(--[A-Za-z][\w-]*)((?:[ =]\S+)?)")


@dataclass(frozen=True, slots=True)
class AiterImage:
    """`device`: gfx, cu_num, device name and versions; `key` names image and chip."""

    tree: Tree
    findings: Findings
    device: Mapping[str, Any]
    key: str
    digest: str
    watch: ShimFit
    notes: tuple[str, ...] = ()
    cleared: tuple[str, ...] = ()
    seen_by_torch: bool = False
    """True if gfx and cu_num come from torch, as in AITER's rows."""
    applied: tuple[AppliedWorkaround, ...] = ()
    """Workarounds in use: the tree is a scratch copy then."""
    options: Options = field(default_factory=Options)
    """The node's own: they name the family that the run is about."""

    @property
    def package(self) -> Path:
        return self.tree.package

    @property
    def cwd(self) -> Path:
        """Working directory of AITER's processes: default paths of the scripts are relative to the tree."""
        return self.tree.root

    @property
    def gfx(self) -> str:
        return str(self.device.get("gfx") or "")

    @property
    def chip(self) -> Chip:
        return chip_of(self.device)

    def script(self, family: Family) -> TunerScript | None:
        """The family's script as this tree has it, None where the tree has none."""
        found, path = self.findings.families.get(family.name), self.tree.scripts.get(family.name)
        return replace(found, path=path) if found is not None and path is not None else None

    def on(self, scratch: Tree, applied: tuple[AppliedWorkaround, ...]) -> AiterImage:
        """The same image with a scratch copy of its tree."""
        return replace(self, tree=scratch, applied=applied)

    @property
    def named(self) -> str:
        return f"AITER {self.tree.version or self.tree.commit[:10] or 'of unknown version'} in {self.tree.root}"

    @property
    def warning(self) -> str:
        """Sentence for the user of a run if this AITER is not promised to work, else ""."""
        if self.findings.promised:
            return ""
        return f"{self.named} is not one that gemmfleet promises to drive ({WINDOWS}): look at its rows with care"

    def as_json(self) -> dict[str, Any]:
        """Data for the record of the tuner's start, and so for provenance."""
        return {
            "root": str(self.tree.root), "version": self.tree.version, "commit": self.tree.commit, "image": self.digest,
            "key": self.key, "cleared_env": list(self.cleared), "shim": self.watch.as_json(),
            "warning": self.warning, "notes": list(self.notes)[:20], "env": switch_record(self.chip),
        }  # fmt: skip


def inspect_image(options: Options) -> AiterImage:
    """Find AITER, read its files, query the chip. Raises NotATreeError with the ways out, RuntimeError where the chip
    gives no answer."""
    here = identify()
    gfx = str(here["gfx"] or "")
    chip = gfx if gfx.startswith("gfx") else ""
    wanted = options.root or os.environ.get(AITER_ROOT_ENV, "")
    tree, notes = choose(wanted, family=options.family, gfx=chip)
    plain = environment(
        os.environ, paths=[tree.root], jit=Path(os.devnull), tmp=Path("/tmp"), worker_code=PACKAGE_PARENT
    )
    plain.pop("AITER_JIT_DIR", None)
    plain.pop("TMPDIR", None)
    answer = query_device("facts", plain, ASK_TIMEOUT_S, lambda: None)
    if "error" in answer:
        raise RuntimeError(f"the GPU cannot be queried: {answer['error']}")
    more = [answer["absent"]] if "absent" in answer else []
    device = {k: answer.get(k) or here.get(k) for k in ("gfx", "cu_num", "device")}
    versions = {k: answer[k] for k in ("torch", "hip") if answer.get(k)}
    gfx = str(device["gfx"] or "")
    findings = inspect(tree, gfx) if gfx.startswith("gfx") else inspect(tree)
    digest = os.environ.get(IMAGE_ENV, "")
    seen = {
        "image": digest, "gfx": gfx, "root": str(tree.root), "python": str(here["python"]), **findings.files,
        **{k: str(v) for k, v in versions.items()}, **inventory_switches(),
    }  # fmt: skip
    return AiterImage(
        tree=tree,
        findings=findings,
        device={**device, **versions},
        key=image_key(seen),
        digest=digest,
        watch=shim_fit(tree.package),
        notes=(*notes, *more, *(f"warning: {w}" for w in switch_warnings(chip_of(device)))),
        cleared=tuple(cleared_names()),
        seen_by_torch="absent" not in answer,
        options=options,
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an attempt: the largest error, seconds of silence that are a hang, seconds from SIGINT to SIGKILL."""

    err_ratio: float
    quiet_s: float
    grace_s: float = 5.0


@dataclass(frozen=True, slots=True)
class TuningContext:
    """Constants of the tuning of one group's shapes.

    `image`: its tree is a scratch copy where workarounds are in use. `slot`: the slot's own folder, with `jit`
    (AITER_JIT_DIR) and `tmp` (TMPDIR). `strategy`: how a group is given to this version. `names`: kernel names of the
    family as far as they are known, filled as rows come.
    """

    image: AiterImage
    slot: Path
    family: Family
    script: TunerScript
    options: Options
    limits: Limits
    strategy: Strategy
    names: KernelNames

    @property
    def jit(self) -> Path:
        """The slot's build folder."""
        return self.slot / "jit"

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the untuned CSV, by our names."""
        return self.family.from_aiter(self.script.columns)

    def env(self, files: ProcessFiles | None = None) -> dict[str, str]:
        """The environment of a process of AITER; `files`: those of a tuning process, which gets the shim."""
        return slot_environment(self.image, self.slot, files)


@dataclass(slots=True)
class Session:
    """The slot's AITER from the tuner's start to its end."""

    image: AiterImage
    """The image with its own tree."""
    slot: Path
    store: ModuleStore
    kernels: KernelLists
    _names: dict[str, KernelNames] = field(default_factory=dict)
    _flags: dict[str, dict[str, str]] = field(default_factory=dict)
    _trees: dict[tuple[str, ...], AiterImage] = field(default_factory=dict)

    @classmethod
    def make(cls, image: AiterImage, place: Place) -> Session:
        """Make the folders, link what the image has built, clear stale locks. Raises OSError."""
        slot = (place.node_dir or Path.cwd()).absolute() / "aiter" / place.slot
        for folder in ("jit/build", "tmp"):
            (slot / folder).mkdir(parents=True, exist_ok=True)
        link_shipped_modules(slot / "jit", image.package)
        for text in clear_stale_locks([slot / "jit", Path("/tmp/aiter_configs")]):
            print(f"gemmfleet: {text}", flush=True)
        cache = os.environ.get(CACHE_ENV, "")
        root = Path(cache) if cache else (place.node_dir or Path.cwd()).absolute() / "cache"
        return cls(image, slot, ModuleStore(root, image.key), KernelLists(image.tree))

    def adapted(self, family: Family, keys: Iterable[Mapping[str, object]] = ()) -> AiterImage:
        """The image with a scratch copy of its tree that has the workarounds which these shapes need; the image itself
        where they need none. Raises OSError."""
        keys = list(keys)
        names = tuple(needed(self.image.findings, family, keys))
        if names and names not in self._trees:
            self._trees[names] = self._with(names, family, keys)
        return self._trees[names] if names else self.image

    def _with(self, names: tuple[str, ...], family: Family, keys: list[Mapping[str, object]]) -> AiterImage:
        try:
            scratch, applied = prepare(self.image.findings, family, keys, self.slot / "-".join(("tree", *names)))
        except WorkaroundRefusedError as e:
            print(f"gemmfleet: a workaround is not applied: {e}", flush=True)
            return self.image
        if scratch is None:
            return self.image
        for one in applied:
            print(f"gemmfleet: {one.name} is applied to a scratch copy ({'; '.join(one.evidence[:2])})", flush=True)
        return self.image.on(scratch.tree, applied)

    @property
    def applied(self) -> tuple[AppliedWorkaround, ...]:
        """Every workaround in use so far."""
        return tuple({a.name: a for image in self._trees.values() for a in image.applied}.values())

    def context(
        self,
        family: Family,
        options: Options,
        limits: Limits | None = None,
        *,
        keys: Iterable[Mapping[str, object]] = (),
        alive: Callable[[], None] = lambda: None,
    ) -> TuningContext:
        """The context for shapes of these keys. `limits` None: those of gemmfleet's own tiny shapes. Raises OSError,
        LookupError where the tree has no script of the family, TunerFault where the script does not even answer."""
        image = self.adapted(family, keys)
        script = image.script(family)
        if script is None:
            raise LookupError(f"{image.tree.root} has no tuner script for {family.name}")
        script = replace(script, flags=self._asked(script.path, image, family, alive))
        return TuningContext(
            image=image,
            slot=self.slot,
            family=family,
            script=script,
            options=options,
            limits=limits or Limits(family.aiter.err_ratio, BUILD_QUIET_S),
            strategy=strategy(family, script, options),
            names=self._names.setdefault(family.name, KernelNames()),
        )

    def _asked(self, script: Path, image: AiterImage, family: Family, alive: Callable[[], None]) -> Mapping[str, str]:
        """The script's flags by its own --help, which is asked once for each image and chip. Raises TunerFault."""
        if family.name not in self._flags:
            known = self.store.root / f"{family.name}.flags.json"
            if not known.is_file():
                with self.store.building(alive):
                    if not known.is_file():
                        print(f"gemmfleet: {script.name} is asked for its options (--help)", flush=True)
                        found = ask_help(script, self.env(), image.cwd, self.slot / f"help-{family.name}.log", alive)
                        aside = known.with_suffix(f".{os.getpid()}")
                        aside.write_text(json.dumps(found))
                        os.replace(aside, known)
            self._flags[family.name] = json.loads(known.read_text())
        return self._flags[family.name]

    def env(self) -> dict[str, str]:
        """The environment of a process that tunes nothing."""
        return slot_environment(self.image, self.slot)


def slot_environment(image: AiterImage, slot: Path, files: ProcessFiles | None = None) -> dict[str, str]:
    """The environment of a process of AITER on a slot."""
    return environment(
        os.environ,
        paths=[image.tree.root],
        jit=slot / "jit",
        tmp=slot / "tmp",
        shim=SHIM if files else None,
        journal=files.journal if files else None,
        blocked=files.blocked if files else None,
        worker_code=PACKAGE_PARENT,
        chip=image.chip,
    )


def flags_of(text: str) -> dict[str, str]:
    """The long options of an argparse help, each `flag` or `value`."""
    out: dict[str, str] = {}
    for m in _OPTION.finditer(text):
        found = _LONG.findall(m[1])
        value = any(v.strip() for _, v in found) or bool(re.search(r"-\w [A-Z{\[]", m[1]))
        for name, _ in found:
            out[name.rstrip(",")] = "value" if value else "flag"
    return out


def ask_help(
    script: Path, env: Mapping[str, str], cwd: Path, log: Path, alive: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """Run the script with --help; its flags. Raises TunerFault with its last words where it does not answer."""
    with open(log, "wb") as out:
        words = [sys.executable, str(script), "--help"]
        process = Child(words, env={**env, "COLUMNS": "200"}, cwd=cwd, out=out.fileno())
    until = time.monotonic() + HELP_TIMEOUT_S
    try:
        while process.returncode is None and time.monotonic() < until:
            alive()
            time.sleep(0.05)
    finally:
        process.kill()
    text = log.read_text(errors="replace")
    found = flags_of(text) if process.returncode == 0 else {}
    if not any(flag in found for flag in ("--untune_file", "--input_file")):
        known = diagnose(text, process.returncode)
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")
        why = known.detail() if known else clean(last, 300)
        raise TunerFault("error", f"{script.name} --help ended with status {process.returncode}: {why}")
    return found
