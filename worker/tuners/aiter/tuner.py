"""The tuner `aiter`: runs AITER's own scripts on the slot's GPU, one process for each group.

A group that faults goes back to the scheduler, which then runs the shape in flight alone. If a shape that runs alone
loses a candidate, and the slot proves healthy, the candidate is blocked and the shape goes on in a new process: the
other candidates are measured, and the faulty one is recorded with a reproduction. Before the first measurement we tune
a tiny shape of our own, which builds the modules; its rows are thrown away.

The order for a group: `AiterTuner.tune` checks the shapes and makes a job (session.py), `_build` has the modules built,
`Measuring.tune` starts the processes (run.py). Success is judged by the rows alone, never by AITER's exit status: it
was 0 in all cases before 2026-01-27, and since then it is 1 if any shape of the group failed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from worker.families import FAMILIES, TINY_SIZES, Family, legal_cells
from worker.protocol import Spec, SpecShape
from worker.text import plural
from worker.tuners.aiter.blocked import BlockedEntry
from worker.tuners.aiter.choice import CandidateChoice, chosen_candidates
from worker.tuners.aiter.device_query import query_device
from worker.tuners.aiter.image import inspect_image
from worker.tuners.aiter.repro import REPRO, write_repro
from worker.tuners.aiter.run import ProcessEnd, run_shapes
from worker.tuners.aiter.session import Job, Session, say
from worker.tuners.aiter.spec import AiterOptions
from worker.tuners.aiter.workarounds import Applied
from worker.tuners.base import Emit, Place, TunerFault
from worker.tuners.common.problem import fp8_of

QUIET_SHARE = 0.8
"""We end a hang after this share of the agent's watchdog, because here we know the candidate."""
MAX_FAULTS = 40
"""Candidates of one shape that may end their process in one attempt. Each costs a start of AITER; the slot proves
itself after each."""
MAX_TINY_FAULTS = 5
"""If this many candidates of a tiny shape end their process and none is measured, the candidates are not the cause."""
ON_TINY_SHAPE = "before the first shape, on a tiny one"

Canary = tuple[bool, float, str]


def tiny_key(family: Family, gfx: str) -> dict[str, int | str]:
    """Key of a shape that the kernels of every date take: TINY_SIZES, and the defaults of the other columns."""
    key: dict[str, int | str] = {}
    for column in family.columns:
        cell = TINY_SIZES.get(column.name, column.default or "")
        if "float8" in str(cell):
            cell = f"torch.{fp8_of(gfx)}"
        key[column.name] = int(cell) if column.kind == "int" else cell
    return key


class AiterTuner:
    """Tuner that drives the AITER of the image that the worker runs in."""

    timed_canary_s = 15.0
    """A process that imports torch."""

    def __init__(self) -> None:
        self._node_options: Mapping[str, Any] = {}
        self._place = Place()
        self._session: Session  # since `open`

    def configure(self, options: Mapping[str, Any], place: Place) -> None:
        """Take the node's options. Raises ValueError."""
        section = options.get("aiter", options)
        self._node_options = section if isinstance(section, dict) else options
        self._place = place
        AiterOptions.parse(self._node_options)

    def open(self) -> dict[str, Any]:
        """Find AITER, query the chip, build the modules of the family if it is known.

        Returns gfx, cu_num, device, versions, and `aiter`: tree, commit, ignored variables, applied workarounds.
        """
        options = AiterOptions.parse(self._node_options)
        image = inspect_image(options)
        for note in filter(None, (image.warning, *image.notes)):
            say(note)
        session = self._session = Session.make(image, self._place)
        family = FAMILIES.get(options.family)
        if family is not None and not image.refusal(family):
            if family.aiter.pads_k_to:  # report now the workarounds that shapes with a padded K will need
                session.image_for(family, [{"K": family.aiter.pads_k_to + 1}])
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
        family = FAMILIES.get(spec.family)
        why = session.image.refusal(family) if family else f"AITER has no family {spec.family}"
        if why or family is None:
            return _refuse(spec.shapes, emit, why)
        self.judge(spec)
        shapes = _legal_shapes(family, spec.shapes, emit)
        if not shapes:
            return {}
        job = replace(
            session.job(family, self._options_of(spec), [shape.key for shape in spec.shapes]),
            err_ratio=spec.err_ratio,
            quiet_s=spec.watchdog_s * QUIET_SHARE,
            grace_s=spec.grace_s,
        )
        began = time.monotonic()
        self._build(job, emit.alive)
        built = time.monotonic()
        folder = (self._place.node_dir or Path.cwd()).absolute() / "attempts" / spec.attempt
        measuring = Measuring(session, job, emit, folder, self.canary, f"attempts/{folder.name}/{REPRO}/")
        only = chosen_candidates(session.kernels, session.image.gfx, spec)
        measuring.tune(shapes, isolates=len(spec.shapes) == 1, only=only)
        return {"build": round(built - began, 6), "measure": round(time.monotonic() - built, 6)}

    def _options_of(self, spec: Spec) -> AiterOptions:
        """The node's options, the spec's on top; the spec's section `aiter` counts most. Raises ValueError."""
        of_run = {name: value for name, value in spec.options.items() if name != "aiter"}
        return AiterOptions.parse({**self._node_options, **of_run, **spec.options.get("aiter", {})})

    def judge(self, spec: Spec) -> None:
        """Take in what became of the blocked candidates on other slots."""
        self._session.blocked.take_verdicts(spec.refuted, spec.confirmed)

    def _build(self, job: Job, alive: Callable[[], None]) -> None:
        """Have the family's modules in the slot's folder: copied, or built once for the node with a tiny shape.

        Raises TunerFault (error, fault, hang) if the tiny shape's process breaks off: no shape is to blame.
        """
        store = self._session.store
        family = job.family.name
        modules = job.slot / "jit"
        if not store.is_warm(family):
            with store.building(alive):
                if not store.is_warm(family):  # another slot may have built them while we waited
                    say(f"building the modules of {family}, once for this image and chip")
                    store.copy_to(modules)
                    result = self._tune_tiny(job, alive)
                    store.publish(modules, family)
                    say(f"modules are built; the tiny shape: {result}")
        store.copy_to(modules)

    def _tune_tiny(self, job: Job, alive: Callable[[], None]) -> str:
        """Time of a tiny shape, or the reason that it has none. A candidate that ends its process is blocked, as of
        any shape that runs alone, but is not held against it later. Raises TunerFault."""
        folder = job.slot / f"tiny-{os.getpid()}-{job.family.name}"
        messages: list[dict[str, Any]] = []
        emit = Emit(lambda message: alive() if message["type"] == "alive" else messages.append(message))

        repro = self._session.store.repro
        measuring = Measuring(self._session, job, emit, folder, self.canary, f"{repro}/", repro, ON_TINY_SHAPE)
        measuring.tune([SpecShape(0, tiny_key(job.family, job.image.gfx))], isolates=True)
        measuring.check_tiny(is_measured=any(message["row"]["us"] > 0 for message in messages if "row" in message))
        shutil.rmtree(folder, ignore_errors=True)
        end = messages[-1] if messages else {}
        return f"{end['row']['us']:g} us" if "row" in end else str(end.get("detail") or "no result")


@dataclass(slots=True)
class Measuring:
    """Starts the processes that measure shapes, one after the other; each has a folder of its own below `folder`."""

    session: Session
    job: Job
    emit: Emit
    folder: Path
    canary: Callable[[], Canary]
    shown: str
    """The beginning of a reproduction's path in texts for the user."""
    repro: Path | None = None
    """The folder of reproductions; None is the one below `folder`."""
    when: str = ""
    """Says on which shape of gemmfleet's own it measures; "" for a user's."""
    _processes: int = field(default=0, init=False)
    _lost: list[BlockedEntry] = field(default_factory=list, init=False)
    """The candidates that ended a process."""

    def tune(self, shapes: Sequence[SpecShape], *, isolates: bool, only: Sequence[Mapping[str, Any]] = ()) -> None:
        """Tune every shape to its end. Raises TunerFault with the shape to blame in flight, if that is known.

        `isolates`: a candidate that ends the process of a single shape is blocked, and the shape goes on. `only`: see
        CandidateChoice.
        """
        blocked = {} if self.when else self.session.blocked.in_force(self.job.family.name)
        choice = CandidateChoice(blocked, only=only)
        may_isolate = isolates and len(shapes) == 1
        remaining = list(shapes)
        faults = 0
        while remaining:
            self._processes += 1
            folder = self.folder / f"aiter-{self._processes}"
            end = run_shapes(self.job, remaining, folder, self.emit, choice)
            remaining = [shape for shape in remaining if shape.id in end.remaining]
            if not remaining:
                return
            if end.how == "done":
                if self.when:
                    return
                raise _fault_without_result(end, len(remaining))
            faults += 1
            next_choice = None
            if may_isolate and faults <= MAX_FAULTS:
                next_choice = self._block(end, folder, choice)
            if next_choice is None:
                self._keep_rows(end)
                text = end.describe(self.when)
                if faults > 1:
                    text += f"; the {faults}. candidate of this shape that ended its process"
                raise TunerFault(_outcome(end), text)
            choice = next_choice

    def _keep_rows(self, end: ProcessEnd) -> None:
        """Report what was measured of the shape in flight when the process broke off."""
        if end.current is not None:
            for row in end.partial:
                self.emit.row(end.current, row)

    def check_tiny(self, *, is_measured: bool) -> None:
        """Raises TunerFault if candidates ended their process and none was measured: that is no single one's fault."""
        if self._lost and not is_measured:
            last = self._lost[-1]
            text = f"{plural(len(self._lost), 'candidate')} ended the process and none ran; the last: {last.detail}"
            raise TunerFault(last.outcome, f"{text} ({self.when})")

    def _block(self, end: ProcessEnd, folder: Path, choice: CandidateChoice) -> CandidateChoice | None:
        """Block the candidate at work, record it, and return the next choice; None if the candidate is unknown.

        Raises TunerFault if the slot fails its canary: then the slot may be to blame, and not the candidate.
        """
        if end.step is None or end.step.candidate in choice.blocked or end.current is None:
            return None
        is_ok, _, text = self.canary()
        if not is_ok:
            raise TunerFault(end.how, f"{end.describe(self.when)}; after it the canary failed: {text}")
        entry = BlockedEntry(
            where=self.session.blocked.where,
            family=self.job.family.name,
            candidate=end.step.candidate,
            outcome=_outcome(end),
            detail=end.describe(),
            t=time.time(),
        )
        self._lost.append(entry)
        if not self.when:  # a shape of our own proves nothing for a user's
            self.session.blocked.append(entry.as_json())
        elif len(self._lost) >= MAX_TINY_FAULTS:
            self.check_tiny(is_measured=any(row["us"] > 0 for row in end.partial))
        repro = write_repro(self.job, folder, entry, self.repro or self.folder / REPRO)
        next_choice = choice.with_blocked(entry, self.shown + repro.name)
        whose = " of a tiny shape" if self.when else ""
        why = next_choice.why_blocked(entry.candidate)
        say(f"candidate {entry.candidate.describe()}{whose} is left out ({why})")
        self.emit.parked(end.current)
        return next_choice


def _fault_without_result(end: ProcessEnd, shapes: int) -> TunerFault:
    """AITER ended well, and has no result for some shapes."""
    text = f"AITER exited without a result for {plural(shapes, 'shape')}"
    return TunerFault("error", f"{text}: {end.known.detail()}" if end.known else text)


def _outcome(end: ProcessEnd) -> str:
    """The outcome of the attempt: that of the known issue if it is not a kernel's fault, else how AITER ended."""
    known = end.known
    if known is not None and (known.issue.reason == "oom" or known.blames_image):
        return known.issue.reason
    return end.how


def _legal_shapes(family: Family, shapes: Sequence[SpecShape], emit: Emit) -> list[SpecShape]:
    """Shapes whose cells are legal; the others fail."""
    legal = []
    for shape in shapes:
        try:
            legal_cells(family, shape.key)
        except ValueError as e:
            _refuse([shape], emit, str(e))
        else:
            legal.append(shape)
    return legal


def _refuse(shapes: Sequence[SpecShape], emit: Emit, why: str) -> dict[str, float]:
    for shape in shapes:
        emit.started(shape.id)
        emit.failed(shape.id, "unsupported", why)
    return {}


def _brief(applied: Applied) -> dict[str, Any]:
    """A workaround for the record of the tuner's start, which has a limit: hashes of the first files."""
    return {**applied, "files": applied["files"][:8], "evidence": [text[:300] for text in applied["evidence"][:3]]}
