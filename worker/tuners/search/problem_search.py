"""The search at one problem: compile processes ahead, the measuring process behind, a ranker between.

    order of the ranker -> compile (many processes) -> ready -> check and time (one process, the GPU) -> ranker again
    ... until the ranker stops -> the leaders interleaved -> the fastest, checked once more

Nothing is measured or decided here: `ranker` decides, `pool` compiles, `measurer` measures; this module passes the
results of one to the others, and writes rows. A candidate goes

    waiting (for its kernel) -> ready -> sent -> measured
       |                          ^       |
       +-> dropped (failed, or the same code as another) <- the process died: back to ready, or charged

A tuner makes a `ShapeTask` by the `SearchContext`, searches it with `ProblemSearch.measure`, and settles its shapes by
`measured` and `rank`. A candidate is an index into `ShapeTask.candidates` throughout.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from worker.protocol import Row, SpecShape, is_wrong
from worker.text import plural
from worker.tuners.base import Emit, TunerFault
from worker.tuners.common.helper_process import HelperError, HelperTimedOut
from worker.tuners.common.measure import SETTLE_S, SUSTAINED_S, Measurement, SamplingPolicy, leaders
from worker.tuners.common.problem import Problem, row_of, why_no_winner
from worker.tuners.search.compile_pool import CompilePool, CompileResult
from worker.tuners.search.forked_process import now
from worker.tuners.search.kernel_store import FAULTS_TO_BLOCK, KernelStore
from worker.tuners.search.measuring_process import MeasuringProcess, NoDeviceError
from worker.tuners.search.messages import (
    CandidateBegan,
    CandidateMeasured,
    CandidatesRanked,
    MeasureCandidate,
    PrepareProblem,
    ProblemPrepared,
    RankCandidates,
)
from worker.tuners.search.options import EXHAUSTIVE, SearchOptions
from worker.tuners.search.ranker import CandidateRanker, StopRules
from worker.tuners.search.source import Candidate, KernelSource
from worker.tuners.search.target import Target

AHEAD = 3
"""Candidates sent to the measuring process: one is measured, the next are loaded meanwhile."""
TICK_S = 0.1
LEADERS = 6
WITHIN = 0.06
"""Leaders take at most this share longer than the fastest."""
SUSTAINED_LEADERS = 8
SUSTAINED_WITHIN = 0.08
MOST_DEATHS = 6
"""Deaths of the measuring process over one shape; after that the slot has to be checked."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The exactness to which times are to be known."""

    max_samples: int = 0
    """Samples of a candidate at most; 0: as the options say."""
    target: float = 0.004
    """No further samples once the median is known to this share."""
    leaders: int = LEADERS
    within: float = WITHIN
    """At most `leaders` candidates within this share of the fastest are ranked."""
    sustained_leaders: int = SUSTAINED_LEADERS
    """The same of a large problem, where each takes seconds, within SUSTAINED_WITHIN."""
    rank_s: float = 1.0
    """Seconds of a ranking; twice as many in an exhaustive search."""


FULL = Effort()
QUICK = Effort(max_samples=7, target=0.01, leaders=4, within=0.03, sustained_leaders=3, rank_s=0.25)
"""For one of many M of a file, of which neighbours tell the same."""


@dataclass(slots=True)
class ShapeTask:
    """A problem that is to be searched: its candidates with their estimates, and how they are compiled."""

    shape: SpecShape
    """The shape in whose name rows are emitted."""
    problem: Problem
    candidates: Sequence[Candidate]
    jobs: Sequence[tuple[str, Any]]
    """The compile job of each candidate, with the name of its kernel."""
    ranker: CandidateRanker
    always: frozenset[int] = frozenset()
    """Candidates, by index, that are measured though others are the same machine code."""
    quiet: bool = False
    """No rows are emitted."""


@dataclass(slots=True)
class SearchContext:
    """Source, processes, store and options of a search, shared by the shapes of a spec."""

    source: KernelSource
    target: Target
    pool: CompilePool
    measurer: MeasuringProcess
    store: KernelStore
    options: SearchOptions
    emit: Emit
    err_limit: float
    spent: dict[str, float]
    """Seconds by kind: inputs, check, measure, and compile, in which the GPU's process had nothing to do."""
    compiled: dict[str, CompileResult]
    """The result of each compiled kernel by its name. All shapes of the tuner share it, as they share kernels."""

    def make_task(
        self,
        shape: SpecShape,
        problem: Problem,
        candidates: Sequence[Candidate],
        always: frozenset[int] = frozenset(),
        us: Sequence[float] | None = None,
        *,
        quiet: bool = False,
    ) -> ShapeTask:
        """The task of a problem. `us`: estimated microseconds, which only decide the order, and which measurements
        correct. Without them these few candidates are all measured, in their order."""
        rules = StopRules(all=us is None or self.options.search == EXHAUSTIVE)
        ranker = CandidateRanker(us or [1.0] * len(candidates), [c.features for c in candidates], rules)
        jobs = [self.source.job(problem, candidate) for candidate in candidates]
        named_jobs = [(repr(job), job) for job in jobs]
        return ShapeTask(shape, problem, candidates, named_jobs, ranker, always, quiet)

    def jobs_of(self, tasks: Sequence[ShapeTask]) -> list[tuple[str, Any]]:
        """The compile jobs of shapes whose turn has not come, one a kernel: of the candidates that come first."""
        jobs: dict[str, Any] = {}
        for task in tasks:
            rules = task.ranker.rules
            order = task.ranker.order()
            if not rules.all:
                order = order[: rules.at_least + rules.patience]
            for i in order:
                name, job = task.jobs[i]
                if name not in self.compiled:
                    jobs[name] = job
        return list(jobs.items())


class ProblemSearch:
    """One problem's search: `measure`, then `rank` as often as wanted. Both raise TunerFault."""

    def __init__(
        self, context: SearchContext, task: ShapeTask, following: Sequence[ShapeTask], effort: Effort = FULL
    ) -> None:
        """`following`: tasks whose candidates are compiled when this one has no more to compile."""
        self._context = context
        self._effort = effort
        self._task = task
        self._following = following
        self._problem = task.problem
        self._ranker = task.ranker
        self.measured: dict[int, Measurement] = {}  # right candidates by their index
        self.errs: dict[int, float] = {}  # errRatio of those that were checked
        self._waiting = set(range(len(task.candidates)))  # candidates whose kernel is not compiled
        self._ready: set[int] = set()  # candidates compiled and not yet sent
        self._sent: set[int] = set()
        self._begun: int | None = None  # the candidate that is being measured
        self._same_code: dict[Hashable, int] = {}  # the candidate that stands for all of the same machine code
        self._rankable: set[int] = set()  # candidates whose timers the present measuring process has
        self._rows: list[Row] = []  # all so far, also those of a quiet task, which are not emitted
        self._is_prepared = False  # the present measuring process has the operands
        self._refused = ""  # why no process can make the operands
        self._ranked: CandidatesRanked | None = None  # the answer to the last ranking
        self._deaths = 0  # of measuring processes over this shape
        self._order: list[int] = []  # the ranker's order of the candidates that are not measured and not dropped
        self._started = now()

    @property
    def failures(self) -> list[str]:
        """Candidates without a time, each with the reason."""
        return [f"{row['kernelName']}: {row['detail']}" for row in self._rows if row["status"] != "ok"]

    def why_none(self) -> tuple[str, str]:
        """Reason and detail of a shape none of whose candidates may win."""
        if self._refused:
            return "unsupported", self._refused
        return why_no_winner(self._rows, self._context.err_limit)

    def measure(self) -> None:
        """Check and time candidates until the ranker stops. Then `measured` has the results, or `why_none` the
        reason."""
        self._skip_blocked()
        self._order = self._ranker.order()
        self._take_compiled()
        self._prepare()
        while not self._refused and (self._sent or not self._is_closing()):
            self._send_ahead(self._next_ready)
            self._compile_ahead()
            self._wait_and_handle()
        self._context.pool.request(self._context.jobs_of(self._following))

    def leaders(self) -> list[int]:
        """Candidates that may be the fastest."""
        indexes = sorted(self.measured)
        measurements = [self.measured[i] for i in indexes]
        if self._problem.is_sustained:
            places = leaders(measurements, SUSTAINED_WITHIN, self._effort.sustained_leaders)
        else:
            places = leaders(measurements, self._effort.within, self._effort.leaders)
        return [indexes[place] for place in places]

    def rank(self, indexes: Sequence[int], today: int | None = None) -> CandidatesRanked | None:
        """These candidates measured again, interleaved, and the fastest checked once more; None where none of them is
        right. `today`: one of them, to which the ratios of all are wanted."""
        while True:
            right = [i for i in indexes if i in self.measured]
            if not right:
                return None
            ranked = self._rank_once(right, today)
            if ranked is None:  # the process died
                continue
            if not is_wrong(ranked.err, self._context.err_limit):
                return ranked
            i = ranked.indexes[ranked.ranking.winner]
            self.measured.pop(i)
            self._fail(i, "wrong", f"wrong after being measured: {ranked.err:.4f} of the elements are off", ranked.err)

    # --- the loop of `measure`

    def _is_closing(self) -> bool:
        """True where no further candidate is to be begun. A budget never ends a search without a result."""
        if self._ranker.is_done():
            return True
        budget = self._context.options.budget_s_per_shape
        is_over_budget = budget > 0 and now() - self._started > budget
        return is_over_budget and bool(self.measured)

    def _compile_ahead(self) -> None:
        """Have the pool compile the ranker's next candidates, then the first ones of the shapes after this one."""
        jobs: dict[str, Any] = {}
        if not self._is_closing():
            wanted = [i for i in self._order if i in self._waiting]
            rules = self._ranker.rules
            if not rules.all:
                in_progress = len(self._ranker.us) + len(self._ready) + len(self._sent)
                wanted = wanted[: max(0, rules.at_most - in_progress)]
            jobs = dict(self._task.jobs[i] for i in wanted)
        for name, job in self._context.jobs_of(self._following):
            jobs[name] = job
        self._context.pool.request(list(jobs.items()))

    def _next_ready(self) -> int | None:
        if self._is_closing():
            return None
        return next((i for i in self._order if i in self._ready), None)

    def _send_ahead(self, choose: Callable[[], int | None]) -> None:
        """Send the candidates that `choose` names, until AHEAD are on their way or it names none."""
        while self._is_prepared and len(self._sent) < AHEAD and self._context.measurer.is_alive:
            i = choose()
            if i is None:
                return
            self._ready.discard(i)
            self._sent.add(i)
            self._context.measurer.send(MeasureCandidate(i, self._task.candidates[i]))

    def _wait_and_handle(self) -> None:
        """Wait for something to happen, and take it in."""
        context = self._context
        start = now()
        is_gpu_idle = not context.measurer.answers_owed
        wait([*context.pool.connections, *context.measurer.connections], TICK_S)
        if is_gpu_idle:
            context.spent["compile"] += now() - start
        context.emit.alive()
        for result in context.pool.collect():
            context.compiled[result.name] = result
            self._take_compiled()
        try:
            for message in context.measurer.messages():
                self._handle(message)
        except HelperError as death:
            self._replace_process(death)

    def _take_compiled(self) -> None:
        """Candidates whose kernel was compiled since, or before for another one, are ready or have failed."""
        for i in sorted(self._waiting):
            result = self._context.compiled.get(self._task.jobs[i][0])
            if result is None:
                continue
            self._waiting.discard(i)
            if result.status != "ok":
                self._fail(i, result.status, result.detail)
            elif self._is_double(i, result):
                self._drop(i)
            else:
                self._ready.add(i)
                if result.facts is not None and result.facts.spills:
                    self._ranker.put_last(i)
                    self._order = self._ranker.order()

    def _is_double(self, i: int, result: CompileResult) -> bool:
        """True where another candidate has the same machine code: then this one is not measured and has no row."""
        if result.facts is None:
            return False
        return self._same_code.setdefault(result.facts.same_as, i) != i and i not in self._task.always

    def _handle(self, message: Any) -> None:
        if isinstance(message, ProblemPrepared):
            self._is_prepared = not message.refused
            self._refused = message.refused
            self._context.spent["inputs"] += message.seconds
        elif isinstance(message, CandidateBegan):
            self._begun = message.index
        elif isinstance(message, CandidateMeasured):
            self._take_measured(message)
        elif isinstance(message, CandidatesRanked):
            self._ranked = message
            self._context.spent["measure"] += message.seconds

    def _take_measured(self, message: CandidateMeasured) -> None:
        i = message.index
        self._begun = None
        self._sent.discard(i)
        for kind, seconds in message.spent.items():
            self._context.spent[kind] += seconds
        if message.status != "ok":
            self.measured.pop(i, None)
            self._fail(i, message.status, message.detail, message.err)
            return
        self._rankable.add(i)
        if i in self.measured:  # measured again by a new process, to be ranked
            return
        measurement = message.measurement
        assert measurement is not None
        self.measured[i] = measurement
        self.errs[i] = message.err
        self._ranker.add_time(i, measurement.us)
        self._order = self._ranker.order()
        self._emit_row(
            candidate_row(
                self._task.candidates[i],
                self._problem,
                "ok",
                measurement.us,
                message.err,
                measurement.spread,
                measurement.samples,
                message.detail,
            )
        )

    # --- failures

    def _fail(self, i: int, status: str, detail: str, err: float = 1.0) -> None:
        self._drop(i)
        self._emit_row(candidate_row(self._task.candidates[i], self._problem, status, -1.0, err, detail=detail))

    def _drop(self, i: int) -> None:
        self._ranker.drop(i)
        self._order = [j for j in self._order if j != i]
        self._waiting.discard(i)
        self._ready.discard(i)

    def _skip_blocked(self) -> None:
        blocked = self._context.store.blocked(self._problem.family)
        for i, candidate in enumerate(self._task.candidates):
            if candidate.name in blocked:
                self._fail(i, "error", f"blocked: it took its process down {FAULTS_TO_BLOCK} times on this device")

    def _replace_process(self, death: HelperError) -> None:
        """Replace the process; candidates sent go back among the ready, the one that had begun is charged."""
        outcome = "hang" if isinstance(death, HelperTimedOut) else "fault"
        charged = self._begun
        self._deaths += 1
        self._ready |= self._sent - {charged} - set(self.measured)
        self._sent.clear()
        self._begun = None
        self._rankable.clear()
        self._is_prepared = False
        if charged is not None:
            self._charge(charged, death)
        if self._deaths >= MOST_DEATHS:
            times = plural(self._deaths, "time")
            raise TunerFault(outcome, f"the measuring process died {times} over this shape: {death}")
        print(f"gemmfleet: the measuring process is replaced: {death}", flush=True)
        try:
            self._context.measurer.restart(self._context.emit.alive)
        except NoDeviceError as e:
            raise TunerFault(outcome, f"after {death}: the GPU cannot be opened again: {e}") from e
        self._prepare()

    def _charge(self, i: int, death: HelperError) -> None:
        """Record a fault of a candidate. It gets a second chance, unless it had been measured before."""
        name = self._task.candidates[i].name
        count = self._context.store.record_fault(self._problem.family, name, str(death))
        is_blocked = count >= FAULTS_TO_BLOCK
        if not is_blocked and i not in self.measured:
            self._ready.add(i)
            return
        self.measured.pop(i, None)
        times = "when measured again"
        if is_blocked:
            times = f"{plural(count, 'time')}, and is blocked from now on"
        status = "timeout" if isinstance(death, HelperTimedOut) else "error"
        self._fail(i, status, f"it took its process down {times}: {death}")

    # --- beginning and end

    def _prepare(self) -> None:
        options = self._context.options
        most_samples = min(options.max_samples, self._effort.max_samples or options.max_samples)
        policy = SamplingPolicy(
            min_sample_s=SUSTAINED_S,
            min_samples=min(options.min_samples, most_samples),
            max_samples=most_samples,
            target=self._effort.target,
            hopeless=1.2,
            hopeless_after=3,
            far=1.6,
            settle_s=SETTLE_S if self._problem.is_sustained else 0.0,
        )
        rotate_bytes = options.rotate_mb << 20
        self._context.measurer.send(
            PrepareProblem(self._problem, options.seed, rotate_bytes, policy, self._context.err_limit)
        )

    def _rank_once(self, indexes: list[int], today: int | None) -> CandidatesRanked | None:
        """One ranking; None if the process died, or none of the candidates is right any more."""
        self._measure_again([i for i in indexes if i not in self._rankable])
        indexes = [i for i in indexes if i in self._rankable and i in self.measured]
        if not indexes:
            return None
        seed = f"{self._context.options.seed}:{self._task.shape.key}"
        cap_s = self._effort.rank_s
        if self._context.options.search == EXHAUSTIVE:
            cap_s *= 2
        again = self._context.options.again
        deaths = self._deaths
        self._ranked = None
        self._context.measurer.send(RankCandidates(tuple(indexes), cap_s, seed, again, today))
        while self._ranked is None and deaths == self._deaths:
            self._wait_and_handle()
        return self._ranked

    def _measure_again(self, missing: list[int]) -> None:
        """Measure candidates whose timers died with a process, until nothing is on its way any more."""
        while missing or self._sent or not self._is_prepared:
            self._send_ahead(lambda: missing.pop() if missing else None)
            self._wait_and_handle()
            if self._refused:
                raise TunerFault("error", f"the operands could not be made again: {self._refused}")

    def _emit_row(self, row: Row) -> None:
        self._rows.append(row)
        if not self._task.quiet:
            self._context.emit.row(self._task.shape.id, row)


def candidate_row(
    candidate: Candidate,
    problem: Problem,
    status: str,
    us: float,
    err: float = 1.0,
    spread: float = 0.0,
    samples: int = 0,
    detail: str = "",
) -> Row:
    """A candidate's row; `us` is -1 where it has no time. kernelId is a hash of the name, which holds every knob."""
    kernel_id = zlib.crc32(candidate.name.encode()) & 0x7FFFFFFF
    split_k = candidate.split_k if candidate.split_k > 1 else 0
    return row_of(problem, "triton", candidate.name, kernel_id, split_k, status, us, err, spread, samples, detail)
