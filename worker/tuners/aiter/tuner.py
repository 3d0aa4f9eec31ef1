"""The tuner `aiter` as the worker sees it: AITER's own scripts, one group a process, on the slot's one GPU."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from worker import PACKAGE_PARENT
from worker.families import FAMILIES, Family, legal_cells
from worker.protocol import Spec, SpecShape
from worker.tuners.aiter.drive.attempts import Attempts
from worker.tuners.aiter.drive.command import Facts, strategy
from worker.tuners.aiter.drive.session import Limits, Session
from worker.tuners.aiter.drive.warmup import CANARY_TIMEOUT_S, Ready
from worker.tuners.aiter.drive.workarounds import Applied
from worker.tuners.aiter.inspect.device_query import ask
from worker.tuners.aiter.inspect.image import Image, look
from worker.tuners.aiter.options import Options
from worker.tuners.base import Emit, Place

QUIET_SHARE = 0.8
"""Of the agent's watchdog: what hangs is ended by us first, for we know at which candidate."""


class AiterTuner:
    """Drives the AITER of the image that the worker runs in."""

    def __init__(self) -> None:
        self._raw: Mapping[str, Any] = {}
        self._place = Place()
        self._session: Session | None = None
        self._ready: Ready | None = None

    def configure(self, options: Mapping[str, Any], place: Place) -> None:
        self._raw = options.get("aiter", options) if isinstance(options.get("aiter", {}), dict) else options
        self._place = place
        Options.parse(self._raw)

    def open(self) -> dict[str, Any]:
        """Find AITER, ask the chip, build the modules of the family where it is known.

        Returns gfx, cu_num, device, versions, and `aiter`: tree, commit, what is ignored, what was applied.
        """
        options = Options.parse(self._raw)
        image = look(options, lambda: None, PACKAGE_PARENT)
        for note in image.notes:
            _say(note)
        self._session = Session.make(image, self._place)
        self._ready = Ready(self._session)
        family = FAMILIES.get(options.family)
        if family is not None and not self._refusal(family, image):
            if family.name == "a4w4_blockscale":  # what shapes of an odd K will need is told now, and used for them
                self._session.adapt(family.name, [{"K": 384}])
            self._session.adapt(family.name)
            facts = self._session.facts(family)
            assert facts is not None
            for note in strategy(family, facts, options).notes:
                _say(note)
            self._ready.warm(family, facts, options, lambda: None)
        return {**image.device, "aiter": {**image.as_json(), "applied": [_brief(a) for a in self._session.applied]}}

    def canary(self) -> tuple[bool, float, str]:
        """As the torch tuner's, in a process of its own; by AITER on a tiny shape where torch cannot multiply."""
        session, ready = self._opened()
        said = ask("canary", session.env(), CANARY_TIMEOUT_S, lambda: None, PACKAGE_PARENT)
        if "error" in said:
            return False, -1.0, str(said["error"])
        if "absent" not in said:
            return bool(said["ok"]), float(said["us"]), str(said["detail"])
        family = FAMILIES.get(Options.parse(self._raw).family)
        if family is None or self._refusal(family, session.image):
            return True, 0.0, f"unproven: {said['absent']}, and no family is known to try"
        facts = session.facts(family)
        assert facts is not None
        ok, us, detail = ready.prove(family, facts, Options.parse(self._raw))
        return ok, us, f"{said['absent']}; {detail}"

    def tune(self, spec: Spec, emit: Emit) -> dict[str, float]:
        """Tune the shapes; seconds by kind (build, measure). ValueError for bad options; TunerFault."""
        session, ready = self._opened()
        own = {k: v for k, v in spec.options.items() if k != "aiter"}
        options = Options.parse({**self._raw, **own, **spec.options.get("aiter", {})})
        family = FAMILIES.get(spec.family)
        if family is None:
            return _refuse(spec.shapes, emit, f"AITER has no family {spec.family}")
        if why := self._refusal(family, session.image):
            return _refuse(spec.shapes, emit, why)
        session.adapt(family.name, [s.key for s in spec.shapes])
        facts = session.facts(family, emit.alive)
        assert facts is not None
        plan = strategy(family, facts, options)
        for note in plan.notes:
            _say(note)
        ready.blocklist.judge(spec.refuted, spec.confirmed)
        shapes = _legal(family, spec.shapes, emit)
        if not shapes:
            return {}
        limits = Limits(spec.err_ratio, spec.watchdog_s * QUIET_SHARE, spec.grace_s)
        began = time.monotonic()
        ready.warm(family, facts, options, emit.alive, limits)
        built = time.monotonic() - began
        shapes = self._through_gate(family, facts, options, shapes, emit, limits)
        folder = self._folder(spec)
        attempts = Attempts(session, ready, family, facts, options, limits, emit, folder, self.canary)
        alone = plan.one_process_a_shape or (_odd(family, shapes) and not facts.k256_sound)
        some = [s for s in shapes if spec.only_of(s.id) is not None]
        if some and not (options.watch and session.image.watch.fits):
            _say("candidates cannot be told apart here: all are measured, though some were asked for only")
        for shape in some:
            attempts.tune([shape], batch=plan.batch, salvage=True, only=spec.only_of(shape.id))
        rest = [s for s in shapes if s not in some]
        for part in [[s] for s in rest] if alone else [rest]:
            attempts.tune(part, batch=plan.batch, salvage=len(spec.shapes) == 1)
        return {"build": round(built, 6), "measure": round(time.monotonic() - began - built, 6)}

    def _through_gate(
        self,
        family: Family,
        facts: Facts,
        options: Options,
        shapes: list[SpecShape],
        emit: Emit,
        limits: Limits,
    ) -> list[SpecShape]:
        """Shapes without those of a K that this image gets wrong, which fail with the evidence."""
        if facts.k256_sound or not _odd(family, shapes):
            return shapes
        assert self._ready is not None
        odd = [s for s in shapes if int(s.key["K"]) % 256]
        emit.started(odd[0].id)  # what happens to the tiny shape of their kind is evidence about them
        gate = self._ready.gate(family, facts, options, emit.alive, limits)
        emit.parked(odd[0].id)
        if gate.opens:
            _say(f"K % 256: {gate.right} of {gate.tried} candidates are right on this image; such shapes run alone")
            return shapes
        for shape in odd:
            emit.started(shape.id)
            emit.failed(shape.id, "wrong_result" if gate.ran else "unsupported", gate.words())
        return [s for s in shapes if s not in odd]

    def judge(self, spec: Spec) -> None:
        """What became elsewhere of candidates that the blocklist has."""
        _, ready = self._opened()
        ready.blocklist.judge(spec.refuted, spec.confirmed)

    def _refusal(self, family: Family, image: Image) -> str:
        """Why no shape of the family can be tuned here, "" where nothing speaks against it."""
        if family.aiter.gfx and image.gfx not in family.aiter.gfx:
            chips, here = " or ".join(family.aiter.gfx), image.gfx or "no GPU that is known"
            return f"{family.name} needs {chips}, and this is {here}"
        facts = image.facts(family)
        named = f"AITER {image.tree.version or image.tree.commit[:10]} in {image.tree.root}"
        if facts is None:
            return f"{named} has no tuner script for {family.name}"
        return f"{facts.script.name} of {named} cannot run: {facts.broken}" if facts.broken else ""

    def _folder(self, spec: Spec) -> Path:
        root = self._place.node_dir or Path.cwd()
        return root.absolute() / "attempts" / spec.attempt

    def _opened(self) -> tuple[Session, Ready]:
        if self._session is None or self._ready is None:
            raise RuntimeError("the tuner aiter was not opened")
        return self._session, self._ready


def _odd(family: Family, shapes: Sequence[SpecShape]) -> bool:
    return family.name == "a4w4_blockscale" and any(int(s.key["K"]) % 256 for s in shapes)


def _legal(family: Family, shapes: Sequence[SpecShape], emit: Emit) -> list[SpecShape]:
    """Shapes whose cells may be written; the others fail."""
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
    raw = applied.as_json()
    return {**raw, "files": raw["files"][:8], "evidence": [e[:300] for e in raw["evidence"][:3]]}


def _say(text: str) -> None:
    print(f"gemmfleet: {text}", flush=True)
