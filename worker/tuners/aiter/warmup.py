"""Steps before the first measurement: modules built, a slot proved without torch.

Each tunes a tiny shape like any other, and throws its rows away.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace

from worker.families import Family, fp8_cell
from worker.protocol import Row, SpecShape
from worker.protocol.blocklist import BlocklistEntry
from worker.text import plural
from worker.tuners.aiter.blocklist import MAX_FAULTS, Blocklist, LeftOut, slot_identity
from worker.tuners.aiter.device_query import query_device
from worker.tuners.aiter.known_issues.catalogue import diagnose
from worker.tuners.aiter.run import ProcessResult, leave_out, run_shapes
from worker.tuners.aiter.session import Session, TuningContext
from worker.tuners.base import Emit, Place, TunerFault

CANARY_TIMEOUT_S = 240.0
MAX_HANGS = 2
"""Candidates of a tiny shape that may hang: each costs BUILD_QUIET_S."""
HOPELESS = 5
"""Candidates of a tiny shape that ended their process with none measured before them: the fault is not theirs then."""
TINY = {
    "B": 2, "M": 64, "N": 512, "K": 512, "token": 16, "model_dim": 1024, "inter_dim": 512, "expert": 8, "topk": 2,
}  # fmt: skip
"""Sizes of the tiny shape."""


def tiny_key(family: Family, gfx: str) -> dict[str, int | str]:
    """Key of a shape that the kernels of every date take: TINY, and the defaults of the other columns."""
    key: dict[str, int | str] = {}
    for column in family.columns:
        cell = TINY.get(column.name, column.default or "")
        key[column.name] = fp8_cell(gfx) if "float8" in str(cell) else int(cell) if column.kind == "int" else cell
    return key


class CollectingEmit(Emit):
    """Emit for gemmfleet's own tiny shapes: nothing goes to the agent, all is kept."""

    def __init__(self, alive: Callable[[], None]) -> None:
        super().__init__(self._keep)
        self.rows: list[Row] = []
        self.winner: Row | None = None
        self.failed_with = ""
        self._alive = alive

    def alive(self) -> None:
        self._alive()

    def _keep(self, message: dict[str, object]) -> None:
        if message["type"] == "row":
            self.rows.append(message["row"])  # type: ignore[arg-type]
        elif message["type"] == "shape_tuned":
            self.winner = message["row"]  # type: ignore[assignment]
        elif message["type"] == "shape_failed":
            self.failed_with = f"{message['reason']}: {message['detail']}"

    @property
    def measured(self) -> bool:
        """True if any candidate has a time."""
        return self.winner is not None or any(r["us"] > 0 for r in self.rows)


class Warmup:
    """Steps before the first measurement, each done once for the node's image and chip where its result can be kept."""

    def __init__(self, session: Session, place: Place) -> None:
        image = session.image
        self.store = session.store
        self.blocklist = Blocklist(self.store.blocklist, slot_identity(place, image.digest or image.key))
        self._count = itertools.count()

    def build_modules(self, context: TuningContext, alive: Callable[[], None]) -> None:
        """Have the family's modules in the slot's folder: copied, or built once for the node with a tiny shape.

        Raises TunerFault (error, fault, hang) where the tiny shape's process breaks off: no shape is to blame.
        """
        family = context.family.name
        if not self.store.is_warm(family):
            with self.store.building(alive):
                if not self.store.is_warm(family):
                    print(f"gemmfleet: building the modules of {family}, once for this image and chip", flush=True)
                    self.store.copy_to(context.jit)
                    collected, result = self._tune_tiny(context, self._tiny(context), alive)
                    if result.end.how != "done":
                        raise TunerFault(*failure(result, "before the first shape, on a tiny one"))
                    self.store.publish(context.jit, family)
                    shown = f"{collected.winner['us']:g} us" if collected.winner else collected.failed_with
                    print(f"gemmfleet: modules are built; the tiny shape: {shown or 'no result'}", flush=True)
        self.store.copy_to(context.jit)

    def prove_slot(self, context: TuningContext) -> tuple[bool, float, str]:
        """(ok, us, detail): AITER itself on a tiny shape, whose result it compares with a reference."""
        shape = self._tiny(context)
        collected, result = self._tune_tiny(context, shape, lambda: None)
        size = "x".join(str(shape.key[c]) for c in ("M", "N", "K") if c in shape.key) or "a tiny shape"
        if collected.winner is None:
            return False, -1.0, collected.failed_with or result.end.detail or f"AITER gave no result for {size}"
        return True, collected.winner["us"], f"AITER's own {size} is right"

    def entry(self, context: TuningContext, result: ProcessResult, *, canary: bool) -> BlocklistEntry:
        """The blocklist's entry for the candidate at work where a process broke off."""
        assert result.end.step is not None
        outcome, text = failure(result, "")
        return BlocklistEntry(
            self.blocklist.where, context.family.name, result.end.step.candidate, outcome, text, canary, time.time(),
            context.image.gfx,
        )  # fmt: skip

    def _tiny(self, context: TuningContext) -> SpecShape:
        return SpecShape(0, tiny_key(context.family, context.image.gfx))

    def _tune_tiny(
        self, context: TuningContext, shape: SpecShape, alive: Callable[[], None]
    ) -> tuple[CollectingEmit, ProcessResult]:
        """Result of a tiny shape, and its last process.

        A candidate that ends its process is left out, as of any shape that runs alone; the last process did not end
        well where that is of no use (no candidate was at work, the slot is sick).
        """
        left_out = LeftOut()  # faults of gemmfleet's own shapes are not held against candidates later
        hangs = 0
        while True:
            folder = context.slot / f"tiny-{os.getpid()}-{next(self._count)}"
            collected = CollectingEmit(alive)
            result = run_shapes(context, [shape], folder, collected, left_out)
            end = result.end
            if end.how == "done":
                shutil.rmtree(folder, ignore_errors=True)
                lost = left_out.entries and not collected.measured
                return collected, _all_lost(result, left_out) if lost else result
            hangs += end.how == "hang"
            known = end.step is None or end.step.candidate in left_out.entries
            if end.how not in ("fault", "hang") or known or hangs > MAX_HANGS:
                return collected, result
            if len(left_out.entries) >= MAX_FAULTS or not _is_healthy(context, alive):
                return collected, result
            entry = self.entry(context, result, canary=True)
            left_out = leave_out(left_out, result, entry, self.store.repro, of=" of a tiny shape")
            if len(left_out.entries) >= HOPELESS and not any(r["us"] > 0 for r in result.partial):
                return collected, _all_lost(result, left_out)


def _is_healthy(context: TuningContext, alive: Callable[[], None]) -> bool:
    """Result of the canary; where torch cannot multiply, the other candidates have to show it."""
    answer = query_device("canary", context.env(), CANARY_TIMEOUT_S, alive)
    return "error" not in answer and ("absent" in answer or bool(answer["ok"]))


def _all_lost(result: ProcessResult, left_out: LeftOut) -> ProcessResult:
    """Every candidate of the tiny shape ended its process: that is no single candidate's fault."""
    last = list(left_out.entries.values())[-1]
    text = f"{plural(len(left_out.entries), 'candidate')} ended the process and none ran; the last: {last.detail}"
    return replace(result, end=replace(result.end, how=last.outcome, detail=text))


def failure(result: ProcessResult, when: str) -> tuple[str, str]:
    """(outcome, detail) of a process that did not end well. `when`: on which tiny shape, "" for a user's."""
    found = diagnose(f"{result.end.output}\n{result.end.detail}", result.end.status)
    outcome = result.end.how
    if found is not None and found.issue.reason == "oom":
        outcome = "oom"
    text = f"{result.end.detail} ({when})" if when else result.end.detail
    last = next((line.strip() for line in reversed(result.end.output.splitlines()) if line.strip()), "")
    if found is not None:
        more = found.detail(text, own_shape=bool(when))
    else:
        more = f"last line of its output: {last[:300]}" if last else ""
    return outcome, f"{text}: {more}" if more else text
