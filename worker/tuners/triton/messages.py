"""Messages between the tuner and its measuring process; pickled, over one pipe, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from worker.families.triton_config import KernelConfig
from worker.tuners.common.measure import Ranking
from worker.tuners.common.problem import Problem
from worker.tuners.triton.target import Target


@dataclass(frozen=True, slots=True)
class Settle:
    """Environment from now on; answered when all is done that is paid once."""

    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class Canary:
    """Prove the device."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make operands, copies and the reference of a problem; those of the last one are freed."""

    problem: Problem
    seed: int
    rotate_bytes: int
    min_samples: int
    max_samples: int
    err_limit: float


@dataclass(frozen=True, slots=True)
class Try:
    """Check a compiled candidate and time it. Several may be sent ahead."""

    index: int
    candidate: KernelConfig


@dataclass(frozen=True, slots=True)
class Rank:
    """Measure these candidates again, interleaved, for at most `cap_s` seconds, and check the winner once more."""

    indexes: tuple[int, ...]
    cap_s: float
    seed: str


@dataclass(frozen=True, slots=True)
class Opened:
    """The device is there."""

    info: dict[str, Any]
    target: Target


@dataclass(frozen=True, slots=True)
class Settled:
    """The environment is in force, and the one-time work of the process is done."""


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """The canary's answer: every element right, microseconds, detail."""

    ok: bool
    us: float
    detail: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """The problem is ready, or `refused` has the reason why it cannot be."""

    refused: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Began:
    """A candidate is being measured from now on: the death of the process is charged to it."""

    index: int
    start: float


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate's end: `status` as in a row."""

    index: int
    status: str
    us: float
    spread: float
    samples: int
    err: float
    detail: str
    start: float
    end: float
    spent: dict[str, float] = field(default_factory=dict)
    dropped: int = 0
    """Samples that were dropped because the clock was throttled."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """Second measurement of the leaders `indexes`; `err` is the winner's errRatio after all of it."""

    indexes: tuple[int, ...]
    ranking: Ranking
    err: float
    start: float
    end: float
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Alive:
    """Something moved."""


@dataclass(frozen=True, slots=True)
class Fatal:
    """The device or the process is no longer to be trusted; the process ends itself after this."""

    detail: str
