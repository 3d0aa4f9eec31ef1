"""Steps before the first measurement: modules built, K % 256 checked, a slot proved without torch.

Each tunes a tiny shape like any other, and throws its rows away.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from worker import PACKAGE_PARENT
from worker.families import Family
from worker.protocol import SpecShape
from worker.tuners.aiter.drive.blocklist import MAX_FAULTS, Blocklist, Entry, LeftOut, here, write_repro
from worker.tuners.aiter.drive.command import Facts, strategy
from worker.tuners.aiter.drive.environment import CACHE_ENV, Store
from worker.tuners.aiter.drive.session import Collected, Limits, Process, Session
from worker.tuners.aiter.inspect.device_query import ask
from worker.tuners.aiter.known_issues.catalogue import diagnose
from worker.tuners.aiter.options import Options
from worker.tuners.base import TunerFault

ODD_K = {"M": 64, "N": 256, "K": 384}
"""The smallest shape whose scales are padded: 12 groups of 32 in K, 16 with padding."""


def tiny_key(family: Family, gfx: str) -> dict[str, int | str]:
    """A shape of the family that every date's kernels take."""
    fp8 = "torch.float8_e4m3fnuz" if gfx.startswith("gfx94") else "torch.float8_e4m3fn"
    half = "torch.bfloat16"
    known: dict[str, int | str] = {
        "B": 2, "M": 64, "N": 512, "K": 512, "bias": "False", "dtype": half, "outdtype": half, "scaleAB": "False",
        "bpreshuffle": "False", "q_dtype_w": "torch.int8" if family.name == "a8w8" else fp8, "q_dtype_a": fp8,
        "token": 16, "model_dim": 1024, "inter_dim": 512, "expert": 8, "topk": 2, "act_type": "ActivationType.Silu",
        "q_type": "QuantType.per_Token", "use_g1u1": 1, "doweight_stage1": 0,
    }  # fmt: skip
    return {column: known[column] for column in family.key_names}


def tiny_shape(family: Family, gfx: str) -> SpecShape:
    return SpecShape(0, tiny_key(family, gfx))


@dataclass(frozen=True, slots=True)
class Gate:
    """What became of the candidates of ODD_K on an image that is statically unsound for such K."""

    tried: int
    ran: int
    right: int
    least_error: float
    limit: float

    @property
    def opens(self) -> bool:
        """Whether shapes of such K are worth trying."""
        return self.right > 0

    def words(self) -> str:
        size = "x".join(str(v) for v in ODD_K.values())
        least = f"{self.least_error:.3g}" if math.isfinite(self.least_error) else "unknown"
        return (
            f"K is no multiple of 256, and this AITER pads and lays out the scales of such K wrongly: of {self.tried} "
            f"candidates for {size}, {self.ran} ran and {self.right} are right (least error {least}, limit "
            f"{self.limit:g}); its production kernels are wrong there too; v0.1.14 and newer have it right"
        )

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**asdict(self), "least_error": repr(self.least_error)}))

    @classmethod
    def load(cls, path: Path, limit: float) -> Gate | None:
        """What was found before with the same limit."""
        try:
            raw = json.loads(path.read_text())
            gate = cls(**{**raw, "least_error": float(raw["least_error"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return gate if gate.limit == limit else None


BUILD_QUIET_S = 600.0
"""Of silence without a compiler at work, while modules are built."""
CANARY_TIMEOUT_S = 240.0
MAX_HANGS = 2
"""Candidates of a tiny shape that may hang: each costs BUILD_QUIET_S."""
HOPELESS = 5
"""Candidates of a tiny shape that ended their process with none measured before them: then it is not theirs."""
DEFAULT_LIMIT = 0.05


class Ready:
    """Keeps what was built and found on the node, by image and chip."""

    def __init__(self, session: Session) -> None:
        self._session = session
        cache = os.environ.get(CACHE_ENV, "")
        root = Path(cache) if cache else (session.place.node_dir or Path.cwd()).absolute() / "cache"
        self.store = Store(root, session.image.key)
        self.blocklist = Blocklist(self.store.blocklist, here(session.place, session.image.digest or session.image.key))
        self._count = itertools.count()

    def warm(
        self,
        family: Family,
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
                    limits = limits or Limits(family.aiter.err_ratio, BUILD_QUIET_S)
                    shape = tiny_shape(family, self._session.image.gfx)
                    collected, done, _ = self._run(family, facts, options, shape, alive, limits)
                    if done.ended.how != "done":
                        raise TunerFault(*broke_off(done, "before the first shape, on a tiny one"))
                    self.store.publish(self._session.jit, family.name)
                    said = f"{collected.winner['us']:g} us" if collected.winner else collected.verdict
                    print(f"gemmfleet: modules are built; the tiny shape: {said or 'no result'}", flush=True)
        self.store.copy_to(self._session.jit)

    def prove(self, family: Family, facts: Facts, options: Options) -> tuple[bool, float, str]:
        """(ok, us, detail): AITER itself on a tiny shape, whose result it compares with a reference."""
        limits = Limits(family.aiter.err_ratio, BUILD_QUIET_S)
        shape = tiny_shape(family, self._session.image.gfx)
        collected, done, _ = self._run(family, facts, options, shape, lambda: None, limits)
        size = "x".join(str(shape.key[c]) for c in ("M", "N", "K") if c in shape.key) or "a tiny shape"
        if collected.winner is None:
            return False, -1.0, collected.verdict or done.ended.detail or f"AITER gave no result for {size}"
        return True, collected.winner["us"], f"AITER's own {size} is right"

    def gate(self, family: Family, facts: Facts, options: Options, alive: Callable[[], None], limits: Limits) -> Gate:
        """Whether any candidate is right on ODD_K, found once for image and chip. Raises TunerFault."""
        path = self.store.root / "k256.json"
        known = Gate.load(path, limits.err_ratio)
        if known is not None:
            return known
        print("gemmfleet: trying 64x256x384 first: this AITER is unsound for K % 256 != 0", flush=True)
        collected, done, whole = self._run(family, facts, options, SpecShape(0, dict(ODD_K)), alive, limits)
        if done.ended.how in ("fault", "hang"):
            raise TunerFault(*broke_off(done, "on 64x256x384, which is tried first for K % 256 != 0"))
        rows = [r for r in collected.rows if r["us"] > 0]
        right = [r for r in rows if r.get("status") == "ok"] or ([collected.winner] if collected.winner else [])
        least = min((r.get("errRatio", math.inf) for r in [*rows, *right]), default=math.inf)
        gate = Gate(len(collected.rows) or len(right), len(rows) or len(right), len(right), least, limits.err_ratio)
        if whole:  # what one slot left out is no verdict on the image
            gate.save(path)
        return gate

    def entry(self, family: Family, done: Process, *, canary: bool) -> Entry:
        """The candidate at work where a process broke off, as the blocklist keeps it."""
        assert done.ended.step is not None
        outcome, words = broke_off(done, "")
        gfx = self._session.image.gfx
        return Entry(
            self.blocklist.where, family.name, done.ended.step.candidate, outcome, words, canary, time.time(), gfx
        )

    def _run(
        self,
        family: Family,
        facts: Facts,
        options: Options,
        shape: SpecShape,
        alive: Callable[[], None],
        limits: Limits,
    ) -> tuple[Collected, Process, bool]:
        """What became of a tiny shape, by its last process, and whether all candidates were tried.

        A candidate that ends its process is left out, as of any shape that runs alone; the last process did not end
        well where that is of no use (no candidate was at work, the slot is sick).
        """
        left_out = LeftOut()  # what happens here is held against nobody later: it is no shape of the user's
        hangs = 0
        while True:
            folder = self._session.root / f"tiny-{os.getpid()}-{next(self._count)}"
            collected = Collected(alive)
            batch = strategy(family, facts, options).batch
            done = self._session.run(
                family, facts, [shape], folder, collected, limits, options, batch=batch, left_out=left_out
            )
            ended = done.ended
            if ended.how == "done":
                shutil.rmtree(folder, ignore_errors=True)
                lost = left_out.entries and not _ran(collected)
                return collected, _lost(done, left_out) if lost else done, not left_out.entries
            hangs += ended.how == "hang"
            known = ended.step is None or ended.step.candidate in left_out.entries
            if ended.how not in ("fault", "hang") or known or hangs > MAX_HANGS:
                return collected, done, False
            if len(left_out.entries) >= MAX_FAULTS or not self._is_healthy(alive):
                return collected, done, False
            entry = self.entry(family, done, canary=True)
            repro = write_repro(self.store.repro, done.files, done.argv, done.env, done.cwd, entry)
            left_out = left_out.and_(entry, repro.name)
            why = left_out.why(entry.candidate)
            print(f"gemmfleet: candidate {entry.candidate.describe()} of a tiny shape is left out ({why})", flush=True)
            if len(left_out.entries) >= HOPELESS and not any(r["us"] > 0 for r in done.partial):
                return collected, _lost(done, left_out), False

    def _is_healthy(self, alive: Callable[[], None]) -> bool:
        """The canary's word; where torch cannot multiply, the other candidates have to show it."""
        said = ask("canary", self._session.env(), CANARY_TIMEOUT_S, alive, PACKAGE_PARENT)
        return "error" not in said and ("absent" in said or bool(said["ok"]))


def _ran(collected: Collected) -> bool:
    return collected.winner is not None or any(r["us"] > 0 for r in collected.rows)


def _lost(done: Process, left_out: LeftOut) -> Process:
    """Every candidate of the tiny shape ended its process: that is no single candidate's fault."""
    last = list(left_out.entries.values())[-1]
    words = f"{len(left_out.entries)} candidates ended their process and none ran; the last: {last.detail}"
    return replace(done, ended=replace(done.ended, how=last.outcome, detail=words))


def broke_off(done: Process, when: str) -> tuple[str, str]:
    """(outcome, words) of a process that did not end as it should. `when`: on which tiny shape, "" for a user's."""
    found = diagnose(f"{done.ended.text}\n{done.ended.detail}", done.ended.status)
    outcome = done.ended.how
    if found is not None and found.issue.reason == "oom":
        outcome = "oom"
    words = f"{done.ended.detail} ({when})" if when else done.ended.detail
    last = next((line.strip() for line in reversed(done.ended.text.splitlines()) if line.strip()), "")
    if found is not None:
        more = found.detail(words, own_shape=bool(when))
    else:
        more = f"last line of its output: {last[:300]}" if last else ""
    return outcome, f"{words}: {more}" if more else words
