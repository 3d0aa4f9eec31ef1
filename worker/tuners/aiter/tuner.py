"""The tuner `aiter`: AITER's own scripts, one group a process, on the slot's one GPU.

A group that faults goes back to the scheduler, which lets the shape in flight run alone. A shape that runs alone and
loses a candidate goes on without it if the slot proves healthy: the others are measured, and the faulty one is
recorded with a reproduction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker.families import FAMILIES, Family, legal_cells
from worker.protocol import SHAPE_VERDICTS, Spec, SpecShape
from worker.text import plural
from worker.tuners.aiter.blocklist import MAX_FAULTS, LeftOut, chosen_candidates
from worker.tuners.aiter.device_query import query_device
from worker.tuners.aiter.known_issues.catalogue import diagnose
from worker.tuners.aiter.run import REPRO, ProcessResult, leave_out, run_shapes
from worker.tuners.aiter.session import AiterImage, Limits, Session, TuningContext, inspect_image
from worker.tuners.aiter.spec import Options
from worker.tuners.aiter.warmup import CANARY_TIMEOUT_S, Warmup, failure
from worker.tuners.aiter.workarounds import AppliedWorkaround
from worker.tuners.base import Emit, Place, TunerFault

QUIET_SHARE = 0.8
"""Share of the agent's watchdog after which a hang is ended here, where the candidate is known."""


class AiterTuner:
    """Tuner that drives the AITER of the image that the worker runs in."""

    def __init__(self) -> None:
        self._raw: Mapping[str, Any] = {}
        self._place = Place()
        self._session: Session | None = None
        self._warmup: Warmup | None = None

    def configure(self, options: Mapping[str, Any], place: Place) -> None:
        """Take the node's options. Raises ValueError."""
        self._raw = options.get("aiter", options) if isinstance(options.get("aiter", {}), dict) else options
        self._place = place
        Options.parse(self._raw)

    def open(self) -> dict[str, Any]:
        """Find AITER, query the chip, build the modules of the family where it is known.

        Returns gfx, cu_num, device, versions, and `aiter`: tree, commit, what is ignored, what was applied.
        """
        options = Options.parse(self._raw)
        image = inspect_image(options)
        for note in filter(None, (image.warning, *image.notes)):
            _say(note)
        session = self._session = Session.make(image, self._place)
        self._warmup = Warmup(session, self._place)
        family = FAMILIES.get(options.family)
        if family is not None and not _refusal(family, image):
            if family.aiter.pads_k_to:  # workarounds that shapes of padded K will need are reported now
                session.adapted(family, [{"K": family.aiter.pads_k_to + 1}])
            context = session.context(family, options)
            for note in context.strategy.notes:
                _say(note)
            self._warmup.build_modules(context, lambda: None)
        return {**image.device, "aiter": {**image.as_json(), "applied": [_brief(a) for a in session.applied]}}

    def canary(self) -> tuple[bool, float, str]:
        """The torch tuner's canary in a process of its own; AITER on a tiny shape where torch cannot multiply."""
        session, warmup = self._opened()
        answer = query_device("canary", session.env(), CANARY_TIMEOUT_S, lambda: None)
        if "error" in answer:
            return False, -1.0, str(answer["error"])
        if "absent" not in answer:
            return bool(answer["ok"]), float(answer["us"]), str(answer["detail"])
        options = Options.parse(self._raw)
        family = FAMILIES.get(options.family)
        if family is None or _refusal(family, session.image):
            return True, 0.0, f"unproven: {answer['absent']}, and no family is known to try"
        ok, us, detail = warmup.prove_slot(session.context(family, options))
        return ok, us, f"{answer['absent']}; {detail}"

    timed_canary_s = 15.0
    """A process that imports torch."""

    def time_canary(self) -> tuple[float, float]:
        """Times of torch's product and copy in a process of its own. Raises TunerFault where torch has none."""
        answer = query_device("times", self._opened()[0].env(), CANARY_TIMEOUT_S, lambda: None)
        if "error" in answer:
            raise TunerFault("error", str(answer["error"]))
        return float(answer["compute_us"]), float(answer["memory_us"])

    def tune(self, spec: Spec, emit: Emit) -> dict[str, float]:
        """Tune the shapes; seconds by kind (build, measure). Raises ValueError for bad options, TunerFault."""
        session, warmup = self._opened()
        own = {k: v for k, v in spec.options.items() if k != "aiter"}
        options = Options.parse({**self._raw, **own, **spec.options.get("aiter", {})})
        family = FAMILIES.get(spec.family)
        if family is None:
            return _refuse(spec.shapes, emit, f"AITER has no family {spec.family}")
        if why := _refusal(family, session.image):
            return _refuse(spec.shapes, emit, why)
        limits = Limits(spec.err_ratio, spec.watchdog_s * QUIET_SHARE, spec.grace_s)
        context = session.context(family, options, limits, keys=[s.key for s in spec.shapes], alive=emit.alive)
        for note in context.strategy.notes:
            _say(note)
        warmup.blocklist.judge(spec.refuted, spec.confirmed)
        shapes = _legal(context, spec.shapes, emit)
        if not shapes:
            return {}
        began = time.monotonic()
        warmup.build_modules(context, emit.alive)
        built = time.monotonic() - began
        attempts = Attempts(context, warmup, emit, self._folder(spec), self.canary)
        chosen = chosen_candidates(session.kernels, session.image.gfx, spec) if spec.only else {}
        named = [s for s in shapes if (only := spec.only_of(s.id)) is not None and only.identities]
        for shape in named:
            attempts.tune([shape], isolate=True, only=[chosen[shape.id]], blocked_too=True)
        rest = [s for s in shapes if s not in named]
        attempts.tune(rest, isolate=len(spec.shapes) == 1, only=[chosen[s.id] for s in rest if s.id in chosen])
        return {"build": round(built, 6), "measure": round(time.monotonic() - began - built, 6)}

    def judge(self, spec: Spec) -> None:
        """Take in what became of the blocklist's candidates on other slots."""
        _, warmup = self._opened()
        warmup.blocklist.judge(spec.refuted, spec.confirmed)

    def _folder(self, spec: Spec) -> Path:
        root = self._place.node_dir or Path.cwd()
        return root.absolute() / "attempts" / spec.attempt

    def _opened(self) -> tuple[Session, Warmup]:
        if self._session is None or self._warmup is None:
            raise RuntimeError("the tuner aiter was not opened")
        return self._session, self._warmup


@dataclass(slots=True)
class Attempts:
    """The processes of one attempt; each has a folder of its own below `folder`."""

    context: TuningContext
    warmup: Warmup
    emit: Emit
    folder: Path
    canary: Callable[[], tuple[bool, float, str]]
    _processes: int = field(default=0, init=False)

    def tune(
        self,
        shapes: Sequence[SpecShape],
        *,
        isolate: bool,
        only: Sequence[Mapping[str, Any]] = (),
        blocked_too: bool = False,
    ) -> None:
        """Tune every shape to its end. Raises TunerFault with the shape to blame in flight, where that is known.

        `isolate`: a candidate that ends the process of a single shape is left out, and the shape goes on. `only`: see
        LeftOut. `blocked_too`: these are tried whatever the blocklist has of them, and each may fault.
        """
        blocked = {} if blocked_too else self.warmup.blocklist.in_force(self.context.family.name)
        left_out = LeftOut(blocked, only=only)
        most = sum(len(chosen["only"]) for chosen in only) if blocked_too else MAX_FAULTS
        left = list(shapes)
        faults = 0
        while left:
            self._processes += 1
            result = run_shapes(self.context, left, self.folder / f"aiter-{self._processes}", self.emit, left_out)
            left = [s for s in left if s.id in result.left]
            if not left:
                return
            if result.end.how == "done":
                raise TunerFault(
                    "error", _explained(result, f"AITER ended without a word on {plural(len(left), 'shape')}")
                )
            if result.end.how == "error" and self._is_verdict(result):
                left = [s for s in left if s.id != result.current]
                continue
            faults += 1
            more = self._isolated(result, left_out) if isolate and len(shapes) == 1 and faults <= most else None
            if more is None:
                if result.current is not None:
                    for row in result.partial:  # measured is measured
                        self.emit.row(result.current, row)
                raise TunerFault(*self._fault(result, faults))
            left_out = more

    def _isolated(self, result: ProcessResult, left_out: LeftOut) -> LeftOut | None:
        """Candidates to leave out next, the one at work among them and recorded; None where that is unknown. Raises
        TunerFault if the slot fails its canary."""
        step = result.end.step
        if step is None or step.candidate in left_out.entries or result.current is None:
            return None
        ok, _, text = self.canary()
        entry = self.warmup.entry(self.context, result, canary=ok)
        self.warmup.blocklist.note(entry)
        if not ok:
            raise TunerFault(result.end.how, f"{result.end.detail}; after it the canary failed: {text}")
        shown = f"attempts/{self.folder.name}/{REPRO}/"
        made = leave_out(left_out, result, entry, self.folder / REPRO, shown)
        self.emit.parked(result.current)
        return made

    def _is_verdict(self, result: ProcessResult) -> bool:
        """Settle the shape in flight if AITER's error is a verdict on it; True if so."""
        found = diagnose(result.end.output, result.end.status)
        if found is None or result.current is None or self.context.strategy.batch > 1:
            return False
        if found.issue.blames != "shape" or found.issue.reason not in SHAPE_VERDICTS:
            return False
        self.emit.failed(result.current, str(found.issue.reason), found.detail())
        return True

    def _fault(self, result: ProcessResult, faults: int) -> tuple[str, str]:
        outcome, text = failure(result, "")
        if result.end.step is not None:
            self.warmup.blocklist.note(self.warmup.entry(self.context, result, canary=False))
        if faults > 1:
            text = f"{text}; the {faults}. candidate of this shape that ended its process"
        return outcome, text


def _explained(result: ProcessResult, text: str) -> str:
    found = diagnose(result.end.output, result.end.status)
    return f"{text}: {found.detail()}" if found is not None else text


def _refusal(family: Family, image: AiterImage) -> str:
    """Reason that no shape of the family can be tuned here, "" where nothing prevents it."""
    if family.aiter.gfx and image.gfx not in family.aiter.gfx:
        chips, here = " or ".join(family.aiter.gfx), image.gfx or "no GPU that is known"
        return f"{family.name} needs {chips}, and this is {here}"
    if image.script(family) is None:
        return f"{image.named} has no tuner script for {family.name}"
    if not image.watch.fits:
        return f"{image.warning or image.named}; its candidates cannot be watched: {image.watch.why}"
    return ""


def _legal(context: TuningContext, shapes: Sequence[SpecShape], emit: Emit) -> list[SpecShape]:
    """Shapes whose cells are legal; the others fail."""
    good = []
    for shape in shapes:
        try:
            legal_cells(context.family, shape.key)
        except ValueError as e:
            _refuse([shape], emit, str(e))
            continue
        good.append(shape)
    return good


def _refuse(shapes: Sequence[SpecShape], emit: Emit, why: str) -> dict[str, float]:
    for shape in shapes:
        emit.started(shape.id)
        emit.failed(shape.id, "unsupported", why)
    return {}


def _brief(applied: AppliedWorkaround) -> dict[str, Any]:
    """A workaround for the record of the tuner's start, which has a limit: hashes of the first files."""
    raw = applied.as_json()
    return {**raw, "files": raw["files"][:8], "evidence": [e[:300] for e in raw["evidence"][:3]]}


def _say(text: str) -> None:
    print(f"gemmfleet: {text}", flush=True)
