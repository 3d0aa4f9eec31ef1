"""What comes before the first measurement: modules built, K % 256 tried, a slot proved without torch."""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from worker.protocol import SpecShape
from worker.tuners.aiter.catalogue import diagnose
from worker.tuners.aiter.command import Facts, strategy
from worker.tuners.aiter.families import AiterFamily
from worker.tuners.aiter.jit import CACHE_ENV, Store
from worker.tuners.aiter.options import Options
from worker.tuners.aiter.session import Collected, Limits, Process, Session
from worker.tuners.aiter.tiny import ODD_K, Gate, tiny_shape
from worker.tuners.base import TunerFault

BUILD_QUIET_S = 600.0
"""Of silence without a compiler at work, while modules are built."""
DEFAULT_LIMIT = 0.05


class Ready:
    """Keeps what was built and found on the node, by image and chip."""

    def __init__(self, session: Session) -> None:
        self._session = session
        cache = os.environ.get(CACHE_ENV, "")
        root = Path(cache) if cache else (session.place.node_dir or Path.cwd()).absolute() / "cache"
        self.store = Store(root, session.image.key)
        self._count = itertools.count()

    def warm(
        self,
        family: AiterFamily,
        facts: Facts,
        options: Options,
        alive: Callable[[], None],
        limits: Limits | None = None,
    ) -> None:
        """Have the family's modules in the slot's folder: copied, or built once for the node with a tiny shape.

        Raises TunerFault (error, fault, hang) where the tiny shape's process breaks off: no shape is to blame.
        """
        if not options.warm:
            return
        if not self.store.is_warm(family.name):
            with self.store.building(alive):
                if not self.store.is_warm(family.name):
                    print(f"gemmfleet: building the modules of {family.name}, once for this image and chip", flush=True)
                    self.store.copy_to(self._session.jit)
                    limits = limits or Limits(family.defaults.get("err_ratio", DEFAULT_LIMIT), BUILD_QUIET_S)
                    shape = tiny_shape(family, self._session.image.gfx)
                    collected, done = self._run(family, facts, options, shape, alive, limits)
                    if done.ended.how != "done":
                        raise TunerFault(*broke_off(done, "before the first shape, on a tiny one"))
                    self.store.publish(self._session.jit, family.name)
                    said = f"{collected.winner['us']:g} us" if collected.winner else collected.verdict
                    print(f"gemmfleet: modules are built; the tiny shape: {said or 'no result'}", flush=True)
        self.store.copy_to(self._session.jit)

    def prove(self, family: AiterFamily, facts: Facts, options: Options) -> tuple[bool, float, str]:
        """(ok, us, detail): AITER itself on a tiny shape, whose result it compares with a reference."""
        limits = Limits(family.defaults.get("err_ratio", DEFAULT_LIMIT), BUILD_QUIET_S)
        shape = tiny_shape(family, self._session.image.gfx)
        collected, done = self._run(family, facts, options, shape, lambda: None, limits)
        size = "x".join(str(shape.key[c]) for c in ("M", "N", "K") if c in shape.key) or "a tiny shape"
        if collected.winner is None:
            return False, -1.0, collected.verdict or done.ended.detail or f"AITER gave no result for {size}"
        return True, collected.winner["us"], f"AITER's own {size} is right"

    def gate(
        self, family: AiterFamily, facts: Facts, options: Options, alive: Callable[[], None], limits: Limits
    ) -> Gate:
        """Whether any candidate is right on ODD_K, found once for image and chip. Raises TunerFault."""
        path = self.store.root / "k256.json"
        known = Gate.load(path, limits.err_ratio)
        if known is not None:
            return known
        print("gemmfleet: trying 64x256x384 first: this AITER is unsound for K % 256 != 0", flush=True)
        collected, done = self._run(family, facts, options, SpecShape(0, dict(ODD_K)), alive, limits)
        if done.ended.how in ("fault", "hang"):
            raise TunerFault(*broke_off(done, "on 64x256x384, which is tried first for K % 256 != 0"))
        rows = [r for r in collected.rows if r["us"] > 0]
        right = [r for r in rows if r.get("status") == "ok"] or ([collected.winner] if collected.winner else [])
        least = min((r.get("errRatio", math.inf) for r in [*rows, *right]), default=math.inf)
        gate = Gate(len(collected.rows) or len(right), len(rows) or len(right), len(right), least, limits.err_ratio)
        gate.save(path)
        return gate

    def _run(
        self,
        family: AiterFamily,
        facts: Facts,
        options: Options,
        shape: SpecShape,
        alive: Callable[[], None],
        limits: Limits,
    ) -> tuple[Collected, Process]:
        folder = self._session.root / f"tiny-{os.getpid()}-{next(self._count)}"
        collected = Collected(alive)
        batch = strategy(family, facts, options).batch
        done = self._session.run(family, facts, [shape], folder, collected, limits, options, batch=batch)
        if done.ended.how == "done":
            shutil.rmtree(folder, ignore_errors=True)
        return collected, done


def broke_off(done: Process, when: str) -> tuple[str, str]:
    """(outcome, words) of a process that did not end as it should."""
    found = diagnose(f"{done.ended.text}\n{done.ended.detail}", done.ended.status)
    outcome = done.ended.how
    if found is not None and found.reason == "oom":
        outcome = "oom"
    words = f"{done.ended.detail} ({when})" if when else done.ended.detail
    last = next((line.strip() for line in reversed(done.ended.text.splitlines()) if line.strip()), "")
    more = found.detail(words) if found is not None else f"it said last: {last[:300]}" if last else ""
    return outcome, f"{words}: {more}" if more else words
