"""The AITER of a slot from the tuner's start to its end, and the settings that shapes of a family are tuned with.

The image is read by `image.py`, its built modules are kept by `modules.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from worker.aiter_tree.kernel_lists import KernelLists
from worker.families import Family
from worker.protocol.paths import CACHE_ENV
from worker.tuners.aiter.adapted_tree import Applied, needed, prepare
from worker.tuners.aiter.blocklist import Blocklist, slot_identity
from worker.tuners.aiter.environment import (
    environment,
)
from worker.tuners.aiter.image import AiterImage
from worker.tuners.aiter.launch import batch_size, ignored_options
from worker.tuners.aiter.modules import ModuleStore, clear_stale_locks, link_shipped_modules
from worker.tuners.aiter.rows import KernelNames
from worker.tuners.aiter.script import TunerScript
from worker.tuners.aiter.spec import Options
from worker.tuners.aiter.workarounds import WorkaroundRefusedError
from worker.tuners.base import Place

BUILD_QUIET_S = 600.0
"""Seconds of silence without a compiler at work that are a hang while modules are built."""


def say(text: str) -> None:
    """Print a line of ours into the slot's log."""
    print(f"gemmfleet: {text}", flush=True)


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
