"""A slot's AITER: the image's tree, findings and chip, the slot's folders, and what a family's shapes are tuned with.

Files and chip are read once, when the tuner opens.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from worker.aiter_tree.kernel_lists import KernelLists
from worker.aiter_tree.locate import Tree, choose
from worker.device import identify
from worker.families import Family
from worker.protocol.paths import AITER_ROOT_ENV, CACHE_ENV, IMAGE_ENV
from worker.tuners.aiter.blocklist import Blocklist, slot_identity
from worker.tuners.aiter.device_query import query_device
from worker.tuners.aiter.findings import WINDOWS, Findings, ShimFit, TunerScript, inspect, shim_fit
from worker.tuners.aiter.launch import (
    Chip,
    batch_size,
    chip_of,
    cleared_names,
    environment,
    ignored_options,
    inventory_switches,
    switch_record,
    switch_warnings,
)
from worker.tuners.aiter.modules import ModuleStore, clear_stale_locks, link_shipped_modules
from worker.tuners.aiter.rows import KernelNames
from worker.tuners.aiter.spec import Options
from worker.tuners.aiter.workarounds import Applied, WorkaroundRefusedError, needed, prepare
from worker.tuners.base import Place

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
    watch: ShimFit
    notes: tuple[str, ...] = ()
    seen_by_torch: bool = False
    applied: tuple[Applied, ...] = ()

    @property
    def gfx(self) -> str:
        return str(self.device.get("gfx") or "")

    @property
    def chip(self) -> Chip:
        return chip_of(self.device)

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
        if not self.watch.fits:
            return f"{self.warning or self.named}; its candidates cannot be watched: {self.watch.why}"
        return ""

    def as_json(self) -> dict[str, Any]:
        """Data for the record of the tuner's start, and so for provenance."""
        return {
            "root": str(self.tree.root), "version": self.tree.version, "commit": self.tree.commit, "image": self.digest,
            "key": self.key, "cleared_env": cleared_names(), "shim": self.watch.as_json(), "warning": self.warning,
            "notes": list(self.notes)[:20], "env": switch_record(self.chip),
        }  # fmt: skip


def inspect_image(options: Options) -> AiterImage:
    """Find AITER, read its files, query the chip. Raises NotATreeError with the ways out, RuntimeError if the chip
    gives no answer."""
    here = identify()
    tree, notes = tree_here(str(here["gfx"] or ""), options.family, options.root)
    answer = query_device("facts", environment(os.environ, tree.root, None))
    if "error" in answer:
        raise RuntimeError(f"the GPU cannot be queried: {answer['error']}")
    device = {k: answer.get(k) or here.get(k) for k in ("gfx", "cu_num", "device")}
    versions = {k: answer[k] for k in ("torch", "hip") if answer.get(k)}
    gfx, digest = str(device["gfx"] or ""), os.environ.get(IMAGE_ENV, "")
    findings = inspect(tree, gfx) if gfx.startswith("gfx") else inspect(tree)
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
        watch=shim_fit(tree.package),
        notes=(*notes, *more, *(f"warning: {w}" for w in switch_warnings(chip_of(device)))),
        seen_by_torch="absent" not in answer,
    )


def tree_here(gfx: str, family: str, root: str = "") -> tuple[Tree, tuple[str, ...]]:
    """The tree of this machine that serves a family, with notes on the choice. Raises NotATreeError."""
    wanted = root or os.environ.get(AITER_ROOT_ENV, "")
    return choose(wanted, family=family, gfx=gfx if gfx.startswith("gfx") else "")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an attempt: the largest error, seconds of silence that are a hang, seconds from SIGINT to SIGKILL."""

    err_ratio: float
    quiet_s: float = BUILD_QUIET_S
    grace_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that shapes of a family are tuned with.

    `slot`: the slot's own folder, with `jit` and `tmp`. `batch`: shapes that AITER takes at once. `names`: kernel names
    of the family as far as they are known, filled as rows come.
    """

    image: AiterImage
    slot: Path
    family: Family
    script: TunerScript
    options: Options
    limits: Limits
    batch: int
    names: KernelNames

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the untuned CSV, by our names."""
        return self.family.from_aiter(self.script.columns)

    def env(self, watched: Path | None = None) -> dict[str, str]:
        """The environment of a process of AITER; `watched`: its folder, if the shim is to report its candidates."""
        return environment(os.environ, self.image.tree.root, self.slot, chip=self.image.chip, watched=watched)


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
    _noted: set[str] = field(default_factory=set)

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
        keys = list(keys)
        names = tuple(needed(self.image.findings, family, keys))
        if names and names not in self._images:
            self._images[names] = self._with_workarounds(names, family, keys)
        return self._images.get(names, self.image)

    def _with_workarounds(self, names: tuple[str, ...], family: Family, keys: list[Mapping[str, object]]) -> AiterImage:
        try:
            scratch, applied = prepare(self.image.findings, family, keys, self.slot / "-".join(("tree", *names)))
        except WorkaroundRefusedError as e:
            say(f"a workaround is not applied: {e}")
            return self.image
        for one in applied:
            say(f"{one['name']} is applied to a scratch copy ({'; '.join(one['evidence'][:2])})")
        return replace(self.image, tree=scratch.tree, applied=applied) if scratch else self.image

    @property
    def applied(self) -> tuple[Applied, ...]:
        """Every workaround in use so far."""
        return tuple({a["name"]: a for image in self._images.values() for a in image.applied}.values())

    def job(
        self, family: Family, options: Options, keys: Iterable[Mapping[str, object]] = (), limits: Limits | None = None
    ) -> Job:
        """The job for shapes of these keys; by default with the limits of gemmfleet's own tiny shapes. Raises OSError,
        LookupError if the tree has no script of the family."""
        image = self.adapted(family, keys)
        script = image.script(family)
        if script is None:
            raise LookupError(f"{image.tree.root} has no tuner script for {family.name}")
        for note in (n for n in ignored_options(script, options) if n not in self._noted):
            self._noted.add(note)
            say(note)
        names = self._names.setdefault(family.name, KernelNames())
        limits = limits or Limits(family.aiter.err_ratio)
        return Job(image, self.slot, family, script, options, limits, batch_size(family, script, options), names)

    def env(self) -> dict[str, str]:
        """The environment of a process that tunes nothing."""
        return environment(os.environ, self.image.tree.root, self.slot, chip=self.image.chip)
