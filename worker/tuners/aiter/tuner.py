"""The tuner `aiter`: runs AITER's own scripts on the slot's GPU, one process for each group.

A group that faults goes back to the scheduler, which then runs the shape in flight alone. If a shape that runs alone
loses a candidate, and the slot proves healthy, the shape goes on without it: the other candidates are measured, and the
faulty one is recorded with a reproduction. Before the first measurement we tune a tiny shape of our own, which builds
the modules; its rows are thrown away.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from worker.families import FAMILIES, Family, legal_cells
from worker.protocol import Spec, SpecShape
from worker.text import plural
from worker.tuners.aiter.adapted_tree import Applied
from worker.tuners.aiter.blocked import MAX_FAULTS, BlockedEntry, CandidateChoice, chosen_candidates
from worker.tuners.aiter.device_query import query_device
from worker.tuners.aiter.image import inspect_image
from worker.tuners.aiter.repro import REPRO, write_repro
from worker.tuners.aiter.run import ProcessEnd, run_shapes
from worker.tuners.aiter.session import Job, Session, say
from worker.tuners.aiter.spec import Options
from worker.tuners.base import Emit, Place, TunerFault
from worker.tuners.common.problem import fp8_of

QUIET_SHARE = 0.8
"""We end a hang after this share of the agent's watchdog, because here we know the candidate."""
HOPELESS = 5
"""If this many candidates of a tiny shape end their process and none is measured, the candidates are not the cause."""
FIRST = "before the first shape, on a tiny one"
TINY = {
    "B": 2,
    "M": 64,
    "N": 512,
    "K": 512,
    "token": 16,
    "model_dim": 1024,
    "inter_dim": 512,
    "expert": 8,
    "topk": 2,
}
"""Sizes of the tiny shape."""

Canary = tuple[bool, float, str]


def tiny_key(family: Family, gfx: str) -> dict[str, int | str]:
    """Key of a shape that the kernels of every date take: TINY, and the defaults of the other columns."""
    key: dict[str, int | str] = {}
    for column in family.columns:
        cell = TINY.get(column.name, column.default or "")
        if "float8" in str(cell):
            cell = f"torch.{fp8_of(gfx)}"
        key[column.name] = int(cell) if column.kind == "int" else cell
    return key


class AiterTuner:
    """Tuner that drives the AITER of the image that the worker runs in."""

    timed_canary_s = 15.0
    """A process that imports torch."""

    def __init__(self) -> None:
        self._raw: Mapping[str, Any] = {}
        self._place = Place()
        self._session: Session  # since `open`

    def configure(self, options: Mapping[str, Any], place: Place) -> None:
        """Take the node's options. Raises ValueError."""
        self._raw = options.get("aiter", options) if isinstance(options.get("aiter", {}), dict) else options
        self._place = place
        Options.parse(self._raw)

    def open(self) -> dict[str, Any]:
        """Find AITER, query the chip, build the modules of the family if it is known.

        Returns gfx, cu_num, device, versions, and `aiter`: tree, commit, ignored variables, applied workarounds.
        """
        options = Options.parse(self._raw)
        image = inspect_image(options)
        for note in filter(None, (image.warning, *image.notes)):
            say(note)
        session = self._session = Session.make(image, self._place)
        family = FAMILIES.get(options.family)
        if family is not None and not image.refusal(family):
            if family.aiter.pads_k_to:  # report now the workarounds that shapes with a padded K will need
                session.adapted(family, [{"K": family.aiter.pads_k_to + 1}])
            self._build(session.job(family, options), lambda: None)
        return {**image.device, "aiter": {**image.as_json(), "applied": [_brief(a) for a in session.applied]}}

    def canary(self) -> Canary:
        """The torch tuner's canary in a process of its own. AITER's torch can always multiply; one that cannot proves
        nothing."""
        answer = query_device("canary", self._session.env())
        if "error" in answer:
            return False, -1.0, str(answer["error"])
        if "absent" in answer:
            return True, 0.0, f"unproven: {answer['absent']}"
        return bool(answer["ok"]), float(answer["us"]), str(answer["detail"])

    def time_canary(self) -> tuple[float, float]:
        """Times of torch's product and copy in a process of its own. Raises TunerFault if torch has none."""
        answer = query_device("times", self._session.env())
        if "error" in answer:
            raise TunerFault("error", str(answer["error"]))
        return float(answer["compute_us"]), float(answer["memory_us"])

    def tune(self, spec: Spec, emit: Emit) -> dict[str, float]:
        """Tune the shapes; seconds by kind (build, measure). Raises ValueError for bad options, TunerFault."""
        session = self._session
        own = {k: v for k, v in spec.options.items() if k != "aiter"}
        options = Options.parse({**self._raw, **own, **spec.options.get("aiter", {})})
        family = FAMILIES.get(spec.family)
        if why := session.image.refusal(family) if family else f"AITER has no family {spec.family}":
            return _refuse(spec.shapes, emit, why)
        assert family is not None
        self.judge(spec)
        shapes = _legal(family, spec.shapes, emit)
        if not shapes:
            return {}
        job = replace(
            session.job(family, options, [s.key for s in spec.shapes]),
            err_ratio=spec.err_ratio,
            quiet_s=spec.watchdog_s * QUIET_SHARE,
            grace_s=spec.grace_s,
        )
        began = time.monotonic()
        self._build(job, emit.alive)
        built = time.monotonic() - began
        folder = (self._place.node_dir or Path.cwd()).absolute() / "attempts" / spec.attempt
        measuring = Measuring(session, job, emit, folder, self.canary, f"attempts/{folder.name}/{REPRO}/")
        only = chosen_candidates(session.kernels, session.image.gfx, spec)
        measuring.tune(shapes, isolate=len(spec.shapes) == 1, only=only)
        return {"build": round(built, 6), "measure": round(time.monotonic() - began - built, 6)}

    def judge(self, spec: Spec) -> None:
        """Take in what became of the blocked candidates on other slots."""
        self._session.blocked.judge(spec.refuted, spec.confirmed)

    def _build(self, job: Job, alive: Callable[[], None]) -> None:
        """Have the family's modules in the slot's folder: copied, or built once for the node with a tiny shape.

        Raises TunerFault (error, fault, hang) if the tiny shape's process breaks off: no shape is to blame.
        """
        store, family, modules = self._session.store, job.family.name, job.slot / "jit"
        if not store.is_warm(family):
            with store.building(alive):
                if not store.is_warm(family):
                    say(f"building the modules of {family}, once for this image and chip")
                    store.copy_to(modules)
                    shown = self._tune_tiny(job, alive)
                    store.publish(modules, family)
                    say(f"modules are built; the tiny shape: {shown}")
        store.copy_to(modules)

    def _tune_tiny(self, job: Job, alive: Callable[[], None]) -> str:
        """Time of a tiny shape, or the reason that it has none. A candidate that ends its process is left out, as of
        any shape that runs alone, but is not held against it later. Raises TunerFault."""
        folder = job.slot / f"tiny-{os.getpid()}-{job.family.name}"
        said: list[dict[str, Any]] = []
        emit = Emit(lambda message: alive() if message["type"] == "alive" else said.append(message))

        repro = self._session.store.repro
        measuring = Measuring(self._session, job, emit, folder, self.canary, f"{repro}/", repro, FIRST)
        measuring.tune([SpecShape(0, tiny_key(job.family, job.image.gfx))], isolate=True)
        measuring.check_tiny(measured=any(m["row"]["us"] > 0 for m in said if "row" in m))
        shutil.rmtree(folder, ignore_errors=True)
        end = said[-1] if said else {}
        return f"{end['row']['us']:g} us" if "row" in end else str(end.get("detail") or "no result")


@dataclass(slots=True)
class Measuring:
    """The processes that measure shapes; each has a folder of its own below `folder`.

    `shown`: what stands before a reproduction's name in texts. `repro`: the folder of reproductions. `when`: on which
    shape of gemmfleet's own, "" for a user's.
    """

    session: Session
    job: Job
    emit: Emit
    folder: Path
    canary: Callable[[], Canary]
    shown: str
    repro: Path | None = None
    when: str = ""
    _processes: int = field(default=0, init=False)
    _lost: list[BlockedEntry] = field(default_factory=list, init=False)

    def tune(self, shapes: Sequence[SpecShape], *, isolate: bool, only: Sequence[Mapping[str, Any]] = ()) -> None:
        """Tune every shape to its end. Raises TunerFault with the shape to blame in flight, if that is known.

        `isolate`: a candidate that ends the process of a single shape is blocked, and the shape goes on. `only`: see
        CandidateChoice.
        """
        blocked = {} if self.when else self.session.blocked.in_force(self.job.family.name)
        choice = CandidateChoice(blocked, only=only)
        may_isolate = isolate and len(shapes) == 1
        left = list(shapes)
        faults = 0
        while left:
            self._processes += 1
            folder = self.folder / f"aiter-{self._processes}"
            end = run_shapes(self.job, left, folder, self.emit, choice)
            left = [shape for shape in left if shape.id in end.left]
            if not left:
                return
            if end.how == "done":
                if self.when:
                    return
                raise _fault_without_result(end, len(left))
            faults += 1
            next_choice = None
            if may_isolate and faults <= MAX_FAULTS:
                next_choice = self._isolated(end, folder, choice)
            if next_choice is None:
                self._keep_rows(end)
                text = end.told(self.when)
                if faults > 1:
                    text += f"; the {faults}. candidate of this shape that ended its process"
                raise TunerFault(_outcome(end), text)
            choice = next_choice

    def _keep_rows(self, end: ProcessEnd) -> None:
        """Report what was measured of the shape in flight when the process broke off."""
        if end.current is not None:
            for row in end.partial:
                self.emit.row(end.current, row)

    def check_tiny(self, *, measured: bool) -> None:
        """Raises TunerFault if candidates ended their process and none was measured: that is no single one's fault."""
        if self._lost and not measured:
            last = self._lost[-1]
            text = f"{plural(len(self._lost), 'candidate')} ended the process and none ran; the last: {last.detail}"
            raise TunerFault(last.outcome, f"{text} ({self.when})")

    def _isolated(self, end: ProcessEnd, folder: Path, choice: CandidateChoice) -> CandidateChoice | None:
        """The choice with the candidate at work blocked and recorded; None if that one is unknown. Raises
        TunerFault if the slot fails its canary."""
        if end.step is None or end.step.candidate in choice.blocked or end.current is None:
            return None
        ok, _, text = self.canary()
        if not ok:
            raise TunerFault(end.how, f"{end.told(self.when)}; after it the canary failed: {text}")
        entry = BlockedEntry(
            self.session.blocked.where,
            self.job.family.name,
            end.step.candidate,
            _outcome(end),
            end.told(),
            time.time(),
        )
        if not self.when:  # a shape of our own proves nothing for a user's
            self.session.blocked.append(entry.as_json())
        self._lost.append(entry)
        if self.when and len(self._lost) >= HOPELESS:
            self.check_tiny(measured=any(r["us"] > 0 for r in end.partial))
        repro = write_repro(self.job, folder, entry, self.repro or self.folder / REPRO)
        next_choice = choice.with_blocked(entry, self.shown + repro.name)
        of = " of a tiny shape" if self.when else ""
        say(f"candidate {entry.candidate.describe()}{of} is left out ({next_choice.why_blocked(entry.candidate)})")
        self.emit.parked(end.current)
        return next_choice


def _fault_without_result(end: ProcessEnd, shapes: int) -> TunerFault:
    """AITER ended well, and has no result for some shapes."""
    text = f"AITER exited without a result for {plural(shapes, 'shape')}"
    return TunerFault("error", f"{text}: {end.known.detail()}" if end.known else text)


def _outcome(end: ProcessEnd) -> str:
    """The outcome of the attempt: that of the known issue where it is no fault of a kernel, else how AITER ended."""
    known = end.known
    if known is not None and (known.issue.reason == "oom" or known.blames_image):
        return known.issue.reason
    return end.how


def _legal(family: Family, shapes: Sequence[SpecShape], emit: Emit) -> list[SpecShape]:
    """Shapes whose cells are legal; the others fail."""
    good = []
    for shape in shapes:
        try:
            legal_cells(family, shape.key)
            good.append(shape)
        except ValueError as e:
            _refuse([shape], emit, str(e))
    return good


def _refuse(shapes: Sequence[SpecShape], emit: Emit, why: str) -> dict[str, float]:
    for shape in shapes:
        emit.started(shape.id)
        emit.failed(shape.id, "unsupported", why)
    return {}


def _brief(applied: Applied) -> dict[str, Any]:
    """A workaround for the record of the tuner's start, which has a limit: hashes of the first files."""
    return {**applied, "files": applied["files"][:8], "evidence": [e[:300] for e in applied["evidence"][:3]]}
