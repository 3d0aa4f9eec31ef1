"""The AITER of a slot as one process of the tuner has it (`Session`), and what its shapes of a family need (`Job`).

tuner.py makes the session when it opens, then a job for the tiny shape that builds the modules, and one for each group.
run.py starts AITER's processes by a job. image.py reads the image, modules.py keeps its built modules, workarounds.py
mends a scratch copy of its tree.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from worker.aiter_tree.kernel_lists import KernelLists
from worker.families import Family
from worker.protocol.paths import CACHE_ENV
from worker.tuners.aiter.blocked import BlockedCandidates, slot_identity
from worker.tuners.aiter.environment import environment
from worker.tuners.aiter.image import AiterImage
from worker.tuners.aiter.launch import argv, batch_size, ignored_options
from worker.tuners.aiter.modules import ModuleStore, clear_stale_locks, link_shipped_modules
from worker.tuners.aiter.rows import KernelNames
from worker.tuners.aiter.script import TunerScript
from worker.tuners.aiter.spec import AiterOptions
from worker.tuners.aiter.workarounds import Applied, WorkaroundRefusedError, apply_workarounds, needed_workarounds
from worker.tuners.base import Place

BUILD_QUIET_S = 600.0
"""Seconds of silence without a compiler at work that are a hang while modules are built."""


def say(text: str) -> None:
    """Print a line of ours into the slot's log."""
    print(f"gemmfleet: {text}", flush=True)


@dataclass(frozen=True, slots=True)
class Job:
    """The parts of AITER, the options and the limits with which the shapes of one family are tuned."""

    image: AiterImage
    """With a scratch copy of the tree, if these shapes need a workaround (`Session.image_for`)."""
    slot: Path
    """The slot's own folder (`Session.slot`)."""
    family: Family
    script: TunerScript
    options: AiterOptions
    batch: int
    """Shapes that AITER takes at once."""
    names: KernelNames
    """Kernel names of the family as far as they are known. The session's, which all its jobs of the family fill."""
    err_ratio: float
    """The largest share of wrong elements of a winner."""
    quiet_s: float = BUILD_QUIET_S
    """Seconds of silence that are a hang."""
    grace_s: float = 5.0
    """Seconds from SIGINT to SIGKILL."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the untuned CSV, by our names."""
        return self.family.from_aiter(self.script.columns)

    def command(self, folder: Path) -> list[str]:
        """The command line of a process that has its files in a folder. Raises ValueError."""
        words = argv(self.family, self.script, self.options, folder, batch=self.batch, err_ratio=self.err_ratio)
        return [sys.executable, *words]

    def env(self, watched: Path | None = None) -> dict[str, str]:
        """The environment of a process of AITER; `watched`: its folder, if the shim is to report its candidates."""
        return environment(os.environ, self.image.tree.root, self.slot, self.image.device, watched)


@dataclass(slots=True)
class Session:
    """The slot's AITER, for as long as the tuner's process lives. After a fault the agent starts another process, and
    that makes a session of its own."""

    image: AiterImage
    """With its own tree, which is never changed."""
    slot: Path
    """The slot's own folder, `aiter/<slot>` below the node folder: AITER builds in its `jit`, and `tmp` is its TMPDIR.
    It outlives the session."""
    store: ModuleStore
    """Modules and blocked candidates that the node keeps for this image and chip, beyond the run."""
    blocked: BlockedCandidates
    """The store's list of blocked candidates, as this slot uses it."""
    kernels: KernelLists
    """AITER's own lists of kernels in the tree."""
    _names: dict[str, KernelNames] = field(default_factory=dict)
    """By family."""
    _with_workarounds: dict[tuple[str, ...], AiterImage] = field(default_factory=dict)
    """The image with a scratch copy of its tree, by the names of the workarounds in it."""

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
        blocked = BlockedCandidates(store.blocked_file, slot_identity(place, image.digest or image.key))
        return cls(image, slot, store, blocked, KernelLists(image.tree))

    def job(self, family: Family, options: AiterOptions, keys: Iterable[Mapping[str, object]] = ()) -> Job:
        """The job for shapes of these keys. Its limits of time are those of the small shapes that gemmfleet runs for
        itself; for a user's group tuner.py replaces them. Raises OSError."""
        image = self.image_for(family, keys)
        script = image.script(family)
        assert script is not None, "else AiterImage.refusal says so, and tuner.py asks for no job"
        for note in ignored_options(script, options):
            say(note)
        return Job(
            image=image,
            slot=self.slot,
            family=family,
            script=script,
            options=options,
            batch=batch_size(family, script, options),
            names=self._names.setdefault(family.name, KernelNames()),
            err_ratio=family.aiter.err_ratio,
        )

    def image_for(self, family: Family, keys: Iterable[Mapping[str, object]] = ()) -> AiterImage:
        """The image with a scratch copy of its tree that has the workarounds which these shapes need; the image itself
        if they need none. Raises OSError."""
        names = tuple(needed_workarounds(self.image.findings, family, keys))
        if names and names not in self._with_workarounds:
            self._with_workarounds[names] = self._apply(names)
        return self._with_workarounds.get(names, self.image)

    def _apply(self, names: tuple[str, ...]) -> AiterImage:
        """The image with these workarounds; the image itself if one mends nothing."""
        folder = self.slot / "-".join(("tree", *names))
        try:
            scratch, applied = apply_workarounds(self.image.findings, names, folder)
        except WorkaroundRefusedError as e:
            say(f"a workaround is not applied: {e}")
            return self.image
        for workaround in applied:
            evidence = "; ".join(workaround["evidence"][:2])
            say(f"{workaround['name']} is applied to a scratch copy ({evidence})")
        return replace(self.image, tree=scratch.tree, applied=applied)

    @property
    def applied(self) -> tuple[Applied, ...]:
        """Every workaround in use so far."""
        by_name: dict[str, Applied] = {}
        for image in self._with_workarounds.values():
            for workaround in image.applied:
                by_name[workaround["name"]] = workaround
        return tuple(by_name.values())

    def env(self) -> dict[str, str]:
        """The environment of a process that tunes nothing."""
        return environment(os.environ, self.image.tree.root, self.slot, self.image.device)
