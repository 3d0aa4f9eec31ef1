"""What a search is given: the shape with its candidates, and what all shapes of a spec share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from worker.protocol import SpecShape
from worker.tuners.base import Emit
from worker.tuners.common.problem import Problem
from worker.tuners.triton.candidate import Candidate
from worker.tuners.triton.candidate_ranker import Race
from worker.tuners.triton.measurer import Measurer
from worker.tuners.triton.options import Options
from worker.tuners.triton.pool import Done, Pool
from worker.tuners.triton.store import Store
from worker.tuners.triton.time_accounting import Account

if TYPE_CHECKING:
    from worker.tuners.triton.launch import Plan as Launch
    from worker.tuners.triton.target import Target


@dataclass(slots=True)
class Entry:
    """A shape that is to be searched: its problem, its candidates with the model's times, and how they are compiled."""

    shape: SpecShape
    problem: Problem
    candidates: list[Candidate]
    launches: list[Launch]
    race: Race
    keys: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = [made.compile_key for made in self.launches]


@dataclass(slots=True)
class Bound:
    """What a search works with; shared by the shapes of a spec, and `compiled` by all of the tuner's."""

    pool: Pool
    measurer: Measurer
    store: Store
    target: Target
    options: Options
    emit: Emit
    err_limit: float
    account: Account
    compiled: dict[str, Done] = field(default_factory=dict)
    """What became of each compiled kernel, by its key: candidates and shapes share kernels."""

    def jobs(self, entries: Sequence[Entry]) -> list[tuple[str, Any]]:
        """The compile jobs of shapes whose turn has not come, one a kernel."""
        jobs: dict[str, Any] = {}
        for e in entries:
            first = e.race.order()[: None if e.race.rules.all else e.race.rules.at_least + e.race.rules.patience]
            jobs |= {e.keys[i]: (e.launches[i], self.target) for i in first if e.keys[i] not in self.compiled}
        return list(jobs.items())
