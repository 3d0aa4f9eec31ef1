"""The search at one problem: compile processes ahead, the measuring process behind, a ranker between.

    order of the ranker -> compile (many processes) -> ready -> check and time (one process, the GPU) -> ranker again
    ... until the ranker stops -> the leaders interleaved -> the fastest, checked once more

Nothing is measured or decided here: `ranker` decides, `pool` compiles, `measurer` measures; this module passes the
results of one to the others, and writes rows. The tuner settles its shapes by `Search.found` and `Search.ranked`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from worker.protocol import Row, SpecShape, is_wrong
from worker.text import plural
from worker.tuners.base import Emit, TunerFault
from worker.tuners.common.measure import SETTLE_S, SUSTAINED_S, Measurement, SamplingPolicy, leaders
from worker.tuners.common.problem import Problem, row_of, why_no_winner
from worker.tuners.search.compiling import CompilePool, CompileResult, now
from worker.tuners.search.measuring import (
    MeasuringProcess,
    NoDeviceError,
    Prepare,
    Prepared,
    ProcessDied,
    Rank,
    Ranked,
    Tried,
    Try,
)
from worker.tuners.search.model import CandidateRanker, StopRules
from worker.tuners.search.source import EXHAUSTIVE, Candidate, KernelSource, SearchOptions, Target

if TYPE_CHECKING:
    from worker.tuners.search.tuner import KernelStore

AHEAD = 3  # candidates sent to the measuring process: one is measured, the next are loaded meanwhile
TICK_S = 0.1
LEADERS, WITHIN = 6, 0.06
SUSTAINED_LEADERS, SUSTAINED_WITHIN = 8, 0.08
RANK_S = 1.0
FAULTS_TO_BLOCK = 2  # a candidate that took its process down so often is not run again on this device
DEATHS = 6  # of the measuring process over one shape; after that the slot has to be checked


@dataclass(slots=True)
class ShapeTask:
    """A problem that is to be searched: its candidates with their estimates, and how they are compiled.

    `shape`: the one in whose name rows are emitted. `always`: candidates that are measured though others are the same
    machine code. `quiet`: no rows are emitted.
    """

    shape: SpecShape
    problem: Problem
    candidates: Sequence[Candidate]
    jobs: Sequence[tuple[str, Any]]  # compile jobs by the names of their kernels
    ranker: CandidateRanker
    always: frozenset[int] = frozenset()
    quiet: bool = False


@dataclass(slots=True)
class SearchContext:
    """Source, processes, store and options of a search, shared by the shapes of a spec.

    `spent`: seconds by kind: inputs, check, measure, and compile, in which the GPU's process had nothing to do.
    `compiled`: the result of each compiled kernel by its name. All shapes of the tuner share it, as they share kernels.
    """

    source: KernelSource
    target: Target
    pool: CompilePool
    measurer: MeasuringProcess
    store: KernelStore
    options: SearchOptions
    emit: Emit
    err_limit: float
    spent: dict[str, float]
    compiled: dict[str, CompileResult]

    def task(
        self, shape: SpecShape, problem: Problem, candidates: Sequence[Candidate], always: frozenset[int] = frozenset(),
        us: Sequence[float] | None = None, *, quiet: bool = False,
    ) -> ShapeTask:  # fmt: skip
        """The task of a problem. `us`: estimated microseconds, which only decide the order, and which measurements
        correct. Without them these few candidates are all measured, in their order."""
        rules = StopRules(all=us is None or self.options.search == EXHAUSTIVE)
        ranker = CandidateRanker(us or [1.0] * len(candidates), [c.features for c in candidates], rules)
        jobs = [(repr(job), job) for job in (self.source.job(problem, c) for c in candidates)]
        return ShapeTask(shape, problem, candidates, jobs, ranker, always, quiet)

    def jobs(self, tasks: Sequence[ShapeTask]) -> list[tuple[str, Any]]:
        """The compile jobs of shapes whose turn has not come, one a kernel."""
        jobs: dict[str, Any] = {}
        for t in tasks:
            rules = t.ranker.rules
            first = t.ranker.order()[: None if rules.all else rules.at_least + rules.patience]
            jobs |= {name: job for name, job in (t.jobs[i] for i in first) if name not in self.compiled}
        return list(jobs.items())


class Search:
    """One problem's search: `measure`, then `ranked` as often as wanted. Both raise TunerFault."""

    def __init__(self, context: SearchContext, task: ShapeTask, following: Sequence[ShapeTask]) -> None:
        """`following`: tasks whose candidates are compiled when this one has no more to compile."""
        self._context, self._task, self._following = context, task, following
        self._p, self._ranker = task.problem, task.ranker
        self.found: dict[int, Measurement] = {}  # right candidates by their index
        self.errs: dict[int, float] = {}  # errRatio of those that were checked
        self._ready: set[int] = set()  # candidates compiled and not yet sent
        self._sent: set[int] = set()
        self._waiting = set(range(len(task.candidates)))  # candidates whose kernel is not compiled
        self._same: dict[Hashable, int] = {}  # the candidate that stands for all of the same machine code
        self._rankable: set[int] = set()  # candidates whose timers the present measuring process has
        self._rows: list[Row] = []
        self._prepared = False
        self._refused = ""
        self._ranked: Ranked | None = None
        self._deaths = 0
        self._order: list[int] = []
        self._started = now()

    @property
    def failures(self) -> list[str]:
        """Candidates without a time, each with the reason."""
        return [f"{r['kernelName']}: {r['detail']}" for r in self._rows if r["status"] != "ok"]

    def why_none(self) -> tuple[str, str]:
        """Reason and detail of a shape none of whose candidates may win."""
        if self._refused:
            return "unsupported", self._refused
        return why_no_winner(self._rows, self._context.err_limit)

    def measure(self) -> None:
        """Check and time candidates until the ranker stops. Then `found` has the results, or `refused` the reason."""
        self._skip_blocked()
        self._order = self._ranker.order()
        self._take_compiled()
        self._prepare()
        while not self._refused and (self._sent or not self._closing()):
            self._feed(self._next_ready)
            self._compile_ahead()
            self._turn()
        self._context.pool.want(self._context.jobs(self._following))

    # --- the loop's parts

    def _closing(self) -> bool:
        """True where no further candidate is to be begun. A budget never ends a search without a result."""
        used, budget = now() - self._started, self._context.options.budget_s_per_shape
        return self._ranker.is_done() or bool(budget and used > budget and self.found)

    def _compile_ahead(self) -> None:
        """Have the pool compile the ranker's next candidates, then the first ones of the shapes after this one."""
        mine = [] if self._closing() else [i for i in self._order if i in self._waiting]
        if not self._ranker.rules.all:
            mine = mine[
                : max(0, self._ranker.rules.at_most - len(self._ranker.us) - len(self._ready) - len(self._sent))
            ]
        jobs = [self._task.jobs[i] for i in mine]
        self._context.pool.want(list(dict([*jobs, *self._context.jobs(self._following)]).items()))

    def _next_ready(self) -> int | None:
        if self._closing():
            return None
        return next((i for i in self._order if i in self._ready), None)

    def _feed(self, choose: Callable[[], int | None]) -> None:
        while self._prepared and len(self._sent) < AHEAD and self._context.measurer.alive:
            i = choose()
            if i is None:
                return
            self._ready.discard(i)
            self._sent.add(i)
            self._context.measurer.send(Try(i, self._task.candidates[i]))

    def _turn(self) -> None:
        """Wait for something to happen, and take it in."""
        context, start, idle = self._context, now(), not self._context.measurer.owed
        wait([*context.pool.connections, *context.measurer.connections], TICK_S)
        context.spent["compile"] += now() - start if idle else 0.0
        context.emit.alive()
        for done in context.pool.collect():
            context.compiled[done.name] = done
            self._take_compiled()
        for message in context.measurer.receive():
            self._handle(message)

    def _take_compiled(self) -> None:
        """Candidates whose kernel was compiled since, or before for another one, are ready or have failed."""
        for i in sorted(self._waiting):
            done = self._context.compiled.get(self._task.jobs[i][0])
            if done is None:
                continue
            self._waiting.discard(i)
            if done.status != "ok":
                self._fail(i, done.status, done.detail)
            elif not self._is_double(i, done):
                self._ready.add(i)

    def _is_double(self, i: int, done: CompileResult) -> bool:
        """True, and no row, where another candidate is the same machine code; one that spills goes to the end."""
        if done.facts is None:
            return False
        if self._same.setdefault(done.facts.same_as, i) != i and i not in self._task.always:
            self._drop(i)
            return True
        if done.facts.spills:
            self._ranker.last(i)
            self._order = self._ranker.order()
        return False

    def _handle(self, message: Any) -> None:
        if isinstance(message, Prepared):
            self._prepared, self._refused = not message.refused, message.refused
            self._context.spent["inputs"] += message.seconds
        elif isinstance(message, Tried):
            self._tried(message)
        elif isinstance(message, Ranked):
            self._ranked = message
            self._context.spent["measure"] += message.seconds
        elif isinstance(message, ProcessDied):
            self._died(message)

    def _tried(self, t: Tried) -> None:
        self._sent.discard(t.index)
        for kind, seconds in t.spent.items():
            self._context.spent[kind] += seconds
        again = t.index in self.found
        if t.status != "ok":
            if again:
                self.found.pop(t.index)
            self._fail(t.index, t.status, t.detail, t.err)
            return
        self._rankable.add(t.index)
        if again:
            return
        assert t.m is not None
        self.found[t.index], self.errs[t.index] = t.m, t.err
        self._ranker.measured(t.index, t.m.us)
        self._order = self._ranker.order()
        c = self._task.candidates[t.index]
        self._emit_row(row(c, self._p, "ok", t.m.us, t.err, t.m.spread, t.m.samples, t.detail))

    # --- failures

    def _fail(self, i: int, status: str, detail: str, err: float = 1.0) -> None:
        self._drop(i)
        self._emit_row(row(self._task.candidates[i], self._p, status, -1.0, err, detail=detail))

    def _drop(self, i: int) -> None:
        self._ranker.failed(i)
        self._order = [j for j in self._order if j != i]
        self._waiting.discard(i)
        self._ready.discard(i)

    def _skip_blocked(self) -> None:
        blocked = self._context.store.blocked(self._p.family)
        for i, c in enumerate(self._task.candidates):
            if c.name in blocked:
                self._fail(i, "error", f"blocked: it took its process down {FAULTS_TO_BLOCK} times on this device")

    def _died(self, died: ProcessDied) -> None:
        """Replace the process; candidates sent go back among the ready, the one that had begun is charged."""
        self._deaths += 1
        self._ready |= self._sent - {died.index} - set(self.found)
        self._sent.clear()
        self._rankable.clear()
        self._prepared = False
        if died.index is not None:
            self._charge(died.index, died)
        if self._deaths >= DEATHS:
            raise TunerFault(
                died.kind, f"the measuring process died {plural(self._deaths, 'time')} over this shape: {died.detail}"
            )
        print(f"gemmfleet: the measuring process is replaced: {died.detail}", flush=True)
        try:
            self._context.measurer.restart(self._context.emit.alive)
        except NoDeviceError as e:
            raise TunerFault(died.kind, f"after {died.detail}: the GPU cannot be opened again: {e}") from e
        self._prepare()

    def _charge(self, i: int, died: ProcessDied) -> None:
        name = self._task.candidates[i].name
        count = self._context.store.faulted(self._p.family, name, died.detail)
        if count < FAULTS_TO_BLOCK and i not in self.found:
            self._ready.add(i)  # once more
            return
        self.found.pop(i, None)
        times = (
            f"{plural(count, 'time')}, and is blocked from now on"
            if count >= FAULTS_TO_BLOCK
            else "when measured again"
        )
        status = "timeout" if died.kind == "hang" else "error"
        self._fail(i, status, f"it took its process down {times}: {died.detail}")

    # --- beginning and end

    def _prepare(self) -> None:
        o = self._context.options
        policy = SamplingPolicy(
            min_sample_s=SUSTAINED_S, min_samples=o.min_samples, max_samples=o.max_samples, target=0.004, hopeless=1.2,
            hopeless_after=3, far=1.6, settle_s=SETTLE_S if self._p.is_sustained else 0.0,
        )  # fmt: skip
        self._context.measurer.send(Prepare(self._p, o.seed, o.rotate_mb << 20, policy, self._context.err_limit))

    def leaders(self) -> list[int]:
        """Candidates that may be the fastest, by their index."""
        indexes = sorted(self.found)
        within, most = (SUSTAINED_WITHIN, SUSTAINED_LEADERS) if self._p.is_sustained else (WITHIN, LEADERS)
        return [indexes[k] for k in leaders([self.found[i] for i in indexes], within, most)]

    def ranked(self, indexes: Sequence[int], today: int | None = None) -> Ranked | None:
        """These measured again, interleaved, and the fastest checked once more; None where none of them is right.
        `today`: one of them to whom the ratios of all are wanted."""
        while left := [i for i in indexes if i in self.found]:
            ranked = self._rank(left, today)
            if ranked is None:  # the process died
                continue
            if not is_wrong(ranked.err, self._context.err_limit):
                return ranked
            i = ranked.indexes[ranked.ranking.winner]
            self.found.pop(i)
            self._fail(i, "wrong", f"wrong after being measured: {ranked.err:.4f} of the elements are off", ranked.err)
        return None

    def _rank(self, indexes: list[int], today: int | None) -> Ranked | None:
        missing = [i for i in indexes if i not in self._rankable]
        while missing or self._sent or not self._prepared:  # candidates measured by a process that died since
            self._feed(lambda: missing.pop() if missing else None)
            self._turn()
            if self._refused:
                raise TunerFault("error", f"the operands could not be made again: {self._refused}")
        indexes = [i for i in indexes if i in self._rankable and i in self.found]
        if not indexes:
            return None
        seed = f"{self._context.options.seed}:{self._task.shape.key}"
        cap = RANK_S * (2 if self._context.options.search == EXHAUSTIVE else 1)
        deaths, self._ranked = self._deaths, None
        self._context.measurer.send(Rank(tuple(indexes), cap, seed, self._context.options.again, today))
        while self._ranked is None and deaths == self._deaths:
            self._turn()
        return self._ranked

    def _emit_row(self, r: Row) -> None:
        self._rows.append(r)
        if not self._task.quiet:
            self._context.emit.row(self._task.shape.id, r)


def row(
    c: Candidate, p: Problem, status: str, us: float, err: float = 1.0, spread: float = 0.0, samples: int = 0,
    detail: str = "",
) -> Row:  # fmt: skip
    """A candidate's row; `us` is -1 where it has no time. kernelId is a hash of the name, which holds every knob."""
    kernel_id = zlib.crc32(c.name.encode()) & 0x7FFFFFFF
    split = c.split_k if c.split_k > 1 else 0
    return row_of(p, "triton", c.name, kernel_id, split, status, us, err, spread, samples, detail)
