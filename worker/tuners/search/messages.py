"""Messages between the tuner and the measuring process, pickled over its pipe.

Commands go to the process (`MeasuringServer` obeys them in order); each is answered by one message:

    SetEnvironment, CallBench -> Answer        PrepareProblem -> ProblemPrepared
    MeasureCandidate -> CandidateMeasured      RankCandidates -> CandidatesRanked

`DeviceOpened` comes once, first. `CandidateBegan` and `Alive` come in between; `Fatal` is the last message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from worker.tuners.common.measure import Measurement, Ranking, SamplingPolicy
from worker.tuners.common.problem import Problem
from worker.tuners.search.source import Candidate
from worker.tuners.search.target import Target


@dataclass(frozen=True, slots=True)
class SetEnvironment:
    """Environment from now on; answered when all is done that is paid once."""

    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class CallBench:
    """Call a method of the bench without arguments: `canary` or `time_canary`."""

    method: str


@dataclass(frozen=True, slots=True)
class PrepareProblem:
    """Make operands, copies and the reference of a problem; those of the last one are freed."""

    problem: Problem
    seed: int
    rotate_bytes: int
    policy: SamplingPolicy
    err_limit: float


@dataclass(frozen=True, slots=True)
class MeasureCandidate:
    """Check a compiled candidate and time it. Several may be sent ahead."""

    index: int
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class RankCandidates:
    """Measure these candidates again, interleaved, for at most `cap_s` seconds, and check the winner once more."""

    indexes: tuple[int, ...]
    cap_s: float
    seed: str
    again: int = 0  # repeats while the margin is small
    today: int | None = None  # one to whom the ratios of all are wanted


Command = CallBench | PrepareProblem | MeasureCandidate | RankCandidates


@dataclass(frozen=True, slots=True)
class DeviceOpened:
    """The device is there."""

    info: dict[str, Any]
    target: Target


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to `CallBench`, and to `SetEnvironment`: the environment is in force."""

    value: Any = None


@dataclass(frozen=True, slots=True)
class ProblemPrepared:
    """The problem is ready, or `refused` has the reason why it cannot be."""

    refused: str
    seconds: float


@dataclass(frozen=True, slots=True)
class CandidateBegan:
    """A candidate is being measured from now on: the death of the process is charged to it."""

    index: int


@dataclass(frozen=True, slots=True)
class CandidateMeasured:
    """A candidate's end: `status` as in a row, `measurement` its time if it is right. `spent`: seconds by kind."""

    index: int
    status: str
    detail: str
    err: float = 1.0
    spent: dict[str, float] = field(default_factory=dict)
    measurement: Measurement | None = None


@dataclass(frozen=True, slots=True)
class CandidatesRanked:
    """Second measurement of the leaders `indexes`; `err` is the winner's errRatio after all of it."""

    indexes: tuple[int, ...]
    ranking: Ranking
    err: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Alive:
    """Something moved."""


@dataclass(frozen=True, slots=True)
class Fatal:
    """The device or the process is no longer to be trusted; the process ends itself after this."""

    detail: str
