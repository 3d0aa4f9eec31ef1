"""The search for one shape's fastest candidate: compile processes ahead, the measuring process behind, a race between.

    order of the race -> compile (many processes) -> ready -> check and time (one process, the GPU) -> the race again
    ... until the race is over -> the leaders interleaved -> winner, checked once more

Nothing is measured here and nothing is decided here: `race` decides, `pool` compiles, `measurer` measures; this
module carries what one says to the others, and writes rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from worker.protocol import Row
from worker.tuners.base import TunerFault
from worker.tuners.common.measure import Measurement, leaders
from worker.tuners.common.rows import why_no_winner
from worker.tuners.triton import messages as say
from worker.tuners.triton.measurer import Died, NoDeviceError
from worker.tuners.triton.options import EXHAUSTIVE
from worker.tuners.triton.pool import wait_for
from worker.tuners.triton.processes import now
from worker.tuners.triton.rows import row, story
from worker.tuners.triton.search_context import Bound, Entry
from worker.tuners.triton.store import FAULTS_TO_BLOCK

AHEAD = 3
"""Candidates sent to the measuring process at a time: one is measured, the next are loaded meanwhile."""
TICK_S = 0.1
LEADERS, WITHIN = 6, 0.06
RANK_S = 1.0
DEATHS = 6
"""So many deaths of the measuring process over one shape, and the slot is to be looked at."""


class Search:
    """One shape's search. `run` ends with exactly one `tuned` or `failed`, or raises TunerFault."""

    def __init__(self, bound: Bound, entry: Entry, following: Sequence[Entry]) -> None:
        """`following`: shapes whose candidates are compiled when this one has no more to compile."""
        self._b, self._entry, self._following, self._account = bound, entry, following, bound.account
        self._p, self._race = entry.problem, entry.race
        self._ready: dict[int, float] = {}
        """Who is compiled and not yet sent, and since when."""
        self._sent: dict[int, float] = {}
        self._waiting = set(range(len(entry.candidates)))
        """Whose kernel is not compiled."""
        self._found: dict[int, Measurement] = {}
        self._errs: dict[int, float] = {}
        self._held: set[int] = set()
        """Who can be ranked by the measuring process as it is now."""
        self._rows: list[Row] = []
        self._prepared = False
        self._refused = ""
        self._ranked: say.Ranked | None = None
        self._deaths = 0
        self._order: list[int] = []
        self._started = now()

    def run(self) -> None:
        self._skip_blocked()
        self._order = self._race.order()
        self._take_compiled()
        self._prepare()
        while not self._refused and not self._over():
            self._feed(self._next_ready)
            self._compile_ahead()
            self._turn()
        self._b.pool.want(self._b.jobs(self._following))
        if self._refused:
            self._b.emit.failed(self._entry.shape.id, "unsupported", self._refused)
        elif self._found:
            self._decide()
        else:
            self._b.emit.failed(self._entry.shape.id, *why_no_winner(self._rows, self._b.err_limit))

    # --- the loop's parts

    def _over(self) -> bool:
        """Whether nothing more is to be measured; what is at the GPU is waited for."""
        return not self._sent and self._closing()

    def _closing(self) -> bool:
        """Whether no further candidate is to be begun. A budget never ends a search that has nothing yet."""
        used, budget = now() - self._started, self._b.options.budget_s_per_shape
        return bool(self._race.over()) or bool(budget and used > budget and self._found)

    def _compile_ahead(self) -> None:
        """Have the pool compile what the race wants next, then what the shapes after this one will want first."""
        mine = [] if self._closing() else [i for i in self._order if i in self._waiting]
        if not self._race.rules.all:
            mine = mine[: max(0, self._race.rules.at_most - len(self._race.us) - len(self._ready) - len(self._sent))]
        jobs = [(self._entry.keys[i], (self._entry.launches[i], self._b.target)) for i in mine]
        self._b.pool.want(list(dict([*jobs, *self._b.jobs(self._following)]).items()))

    def _next_ready(self) -> int | None:
        if self._closing():
            return None
        return next((i for i in self._order if i in self._ready), None)

    def _feed(self, choose: Callable[[], int | None]) -> None:
        while self._prepared and len(self._sent) < AHEAD and self._b.measurer.alive:
            i = choose()
            if i is None:
                return
            self._sent[i] = self._ready.pop(i, now())
            self._b.measurer.send(say.Try(i, self._entry.candidates[i]))

    def _turn(self) -> None:
        """Wait for something to happen, and take it in."""
        wait_for([*self._b.pool.connections, *self._b.measurer.connections], TICK_S)
        self._b.emit.alive()
        for done in self._b.pool.collect():
            self._account.compiled.append((done.start, done.end))
            self._b.compiled[done.name] = done
            self._take_compiled()
        for message in self._b.measurer.receive():
            self._hear(message)

    def _take_compiled(self) -> None:
        """Candidates whose kernel was compiled since, or before for another one, are ready or have failed."""
        for i in sorted(self._waiting):
            done = self._b.compiled.get(self._entry.keys[i])
            if done is None:
                continue
            self._waiting.discard(i)
            if done.status == "ok":
                self._ready[i] = max(done.end, self._started)
            else:
                self._fail(i, done.status, done.detail)

    def _hear(self, message: Any) -> None:
        if isinstance(message, say.Prepared):
            self._prepared, self._refused = not message.refused, message.refused
            self._account.measuring.append((message.start, message.end))
            self._account.add("inputs", message.end - message.start)
        elif isinstance(message, say.Began):
            since = self._sent.get(message.index)
            if since is not None:
                self._account.ready.append((since, message.start))
        elif isinstance(message, say.Tried):
            self._tried(message)
        elif isinstance(message, say.Ranked):
            self._ranked = message
            self._account.measuring.append((message.start, message.end))
            self._account.add("measure", message.end - message.start)
        elif isinstance(message, Died):
            self._died(message)

    def _tried(self, t: say.Tried) -> None:
        self._sent.pop(t.index, None)
        self._account.measuring.append((t.start, t.end))
        for kind, seconds in t.spent.items():
            self._account.add(kind, seconds)
        again = t.index in self._found
        if t.status != "ok":
            if again:
                self._found.pop(t.index)
            self._fail(t.index, t.status, t.detail, t.err)
            return
        done = self._b.compiled[self._entry.keys[t.index]]
        self._account.needed_until = max(self._account.needed_until, done.end)
        self._held.add(t.index)
        if again:
            return
        self._found[t.index] = Measurement(t.us, t.spread, t.samples, 1, "", t.us * (1 - t.spread))
        self._errs[t.index] = t.err
        self._race.measured(t.index, t.us)
        self._order = self._race.order()
        c = self._entry.candidates[t.index]
        self._say(row(c, self._p, "ok", t.us, t.err, t.spread, t.samples, t.detail))

    # --- what goes wrong

    def _fail(self, i: int, status: str, detail: str, err: float = 1.0) -> None:
        self._race.failed(i)
        self._order = [j for j in self._order if j != i]
        self._waiting.discard(i)
        self._ready.pop(i, None)
        self._say(row(self._entry.candidates[i], self._p, status, -1.0, err, detail=detail))

    def _skip_blocked(self) -> None:
        blocked = self._b.store.blocked(self._p.family)
        for i, c in enumerate(self._entry.candidates):
            if c.name in blocked:
                self._fail(i, "error", f"blocked: it took its process down {FAULTS_TO_BLOCK} times on this device")

    def _died(self, died: Died) -> None:
        """A new process; who was sent goes back among the ready, who had begun is charged."""
        self._deaths += 1
        back, self._sent = dict(self._sent), {}
        self._held.clear()
        self._prepared = False
        for i, since in back.items():
            if i != died.index and i not in self._found:
                self._ready[i] = since
        if died.index is not None:
            self._charge(died.index, died)
        if self._deaths >= DEATHS:
            raise TunerFault(
                died.kind, f"the measuring process died {self._deaths} times over this shape: {died.detail}"
            )
        print(f"gemmfleet: the measuring process is replaced: {died.detail}", flush=True)
        try:
            self._b.measurer.restart(self._b.emit.alive)
        except NoDeviceError as e:
            raise TunerFault(died.kind, f"after {died.detail}: the GPU cannot be opened again: {e}") from e
        self._prepare()

    def _charge(self, i: int, died: Died) -> None:
        name = self._entry.candidates[i].name
        count = self._b.store.faulted(self._p.family, name, died.detail)
        if count < FAULTS_TO_BLOCK and i not in self._found:
            self._ready[i] = now()  # once more
            return
        self._found.pop(i, None)
        times = f"{count} times, and is blocked from now on" if count >= FAULTS_TO_BLOCK else "when measured again"
        status = "timeout" if died.kind == "hang" else "error"
        self._fail(i, status, f"it took its process down {times}: {died.detail}")

    # --- beginning and end

    def _prepare(self) -> None:
        o = self._b.options
        self._b.measurer.send(
            say.Prepare(self._p, o.seed, o.rotate_mb << 20, o.min_samples, o.max_samples, self._b.err_limit)
        )

    def _decide(self) -> None:
        """Rank the leaders until the winner is right also afterwards."""
        while self._found:
            indexes = sorted(self._found)
            best = leaders([self._found[i] for i in indexes], WITHIN, LEADERS)
            ranked = self._rank([indexes[k] for k in best])
            if ranked is None:
                continue
            v = ranked.verdict
            i = ranked.indexes[v.winner]
            c = self._entry.candidates[i]
            if ranked.err > self._b.err_limit:
                self._found.pop(i)
                detail = f"wrong after being measured: {ranked.err:.4f} of the elements are off"
                self._fail(i, "wrong", detail, ranked.err)
                continue
            told = story([self._entry.candidates[j] for j in ranked.indexes], ranked, len(self._found))
            won = row(c, self._p, "ok", v.us[v.winner], self._errs[i], v.spread[v.winner], v.rounds, told)
            self._b.store.won(self._p.family, self._p.group_name, self._p.m, c.name, v.us[v.winner])
            self._b.emit.tuned(self._entry.shape.id, won)
            return
        self._b.emit.failed(self._entry.shape.id, *why_no_winner(self._rows, self._b.err_limit))

    def _rank(self, indexes: list[int]) -> say.Ranked | None:
        """The leaders interleaved; None where it has to begin anew."""
        missing = [i for i in indexes if i not in self._held]
        while missing or self._sent or not self._prepared:  # who was measured by a process that died since
            self._feed(lambda: missing.pop() if missing else None)
            self._turn()
            if self._refused:
                raise TunerFault("error", f"the operands could not be made again: {self._refused}")
        indexes = [i for i in indexes if i in self._held and i in self._found]
        if not indexes:
            return None
        seed = f"{self._b.options.seed}:{self._entry.shape.key}"
        cap = RANK_S * (2 if self._b.options.search == EXHAUSTIVE else 1)
        deaths, self._ranked = self._deaths, None
        self._b.measurer.send(say.Rank(tuple(indexes), cap, seed))
        while self._ranked is None and deaths == self._deaths:
            self._turn()
        return self._ranked

    def _say(self, r: Row) -> None:
        self._rows.append(r)
        self._b.emit.row(self._entry.shape.id, r)
