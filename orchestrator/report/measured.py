"""The measurements of each shape, updated from the ledger's new rows (rows are only ever added)."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median
from typing import NamedTuple

from orchestrator.backend_names import backend_name
from orchestrator.ledger.reader import LedgerReader
from orchestrator.shapes.model import Key
from worker.families import Family

MOST_BACKENDS = 12
"""Most backends that are shown separately, whatever names nodes send. The rest are `other`."""

_CHUNK = 20_000
_NEW = """SELECT id, shape, us, status, kernel_id, kernel_name, libtype, extra
    FROM rows WHERE id>? ORDER BY id LIMIT ?"""
_WINNERS = """SELECT id, shape, attempt, node, slot, us, bw, spread, kernel_id, kernel_name, libtype, gfx, cu_num, extra
    FROM rows WHERE winner=1 AND id>? ORDER BY id"""
_BESIDE = """SELECT us, kernel_name, libtype FROM rows
    WHERE attempt=? AND shape=? AND us>0 AND status='ok' AND winner=0 ORDER BY id"""


class _CandidateRow(NamedTuple):
    """A row of _NEW."""

    id: int
    shape: int
    us: float
    status: str
    kernel_id: int | None
    kernel_name: str
    libtype: str
    extra: str | None


class _WinnerRow(NamedTuple):
    """A row of _WINNERS."""

    id: int
    shape: int
    attempt: str
    node: str
    slot: str
    us: float
    bw: float | None
    spread: float | None
    kernel_id: int | None
    kernel_name: str
    libtype: str
    gfx: str
    cu_num: int | None
    extra: str | None


@dataclass(slots=True)
class Tried:
    """The candidates of one shape. `best`: backend -> the lowest us of its correct candidates."""

    candidates: int = 0
    best: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Winner:
    """The row that settled a shape.

    `median_us`: of the attempt's correct candidates. `runner_up_us`: the best of them with another kernel. `first_us`:
    the winner's first time, before it was measured again. Each is None if there is no such time. `noisy`: see
    LedgerReader.noise.
    """

    node: str
    slot: str
    us: float
    tflops: float
    bw: float | None
    spread: float | None
    kernel: str
    backend: str
    gfx: str
    cu_num: int | None
    median_us: float | None
    runner_up_us: float | None
    first_us: float | None
    noisy: bool


class Measurements:
    """The measurements of a run. `update` reads the new rows; call it inside a snapshot of the ledger."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.keys: dict[int, Key] = {}
        self.tried: dict[int, Tried] = defaultdict(Tried)
        self.winners: dict[int, Winner] = {}
        self.backends: set[str] = set()
        self._settled_by: dict[int, str] = {}
        self._last_row = 0
        self._last_winner = 0
        self._unsettled: list[_WinnerRow] = []
        """Winners from attempts that have not settled their shape (yet)."""

    def update(self, ledger: LedgerReader) -> None:
        """Read the rows that are new. Call it inside a snapshot of the ledger."""
        if not self.keys:
            self.keys = ledger.keys
        while chunk := ledger.query(_NEW, (self._last_row, _CHUNK)):
            for values in chunk:
                self._count_candidate(_CandidateRow(*values))
            self._last_row = chunk[-1][0]
        new_winners = [_WinnerRow(*values) for values in ledger.query(_WINNERS, (self._last_winner,))]
        if new_winners:
            self._last_winner = new_winners[-1].id
        shapes = ledger.replayed.shapes
        rows = self._unsettled + new_winners
        self._unsettled = [row for row in rows if shapes[row.shape].state != "tuned"]  # their attempts may settle them
        for row in rows:
            shape = shapes[row.shape]
            is_known = self._settled_by.get(row.shape) == row.attempt
            if shape.state == "tuned" and shape.attempt == row.attempt and not is_known:
                self._settled_by[row.shape] = row.attempt
                self.winners[row.shape] = self._winner_of(ledger, row)

    def flops(self, shape: int) -> float:
        """Floating-point operations of the shape."""
        return self.family.flops(dict(zip(self.family.key_names, self.keys[shape], strict=True)))

    def _count_candidate(self, row: _CandidateRow) -> None:
        tried = self.tried[row.shape]
        tried.candidates += 1
        if row.us > 0 and row.status == "ok":
            kernel = row.kernel_name or _first_stage(row.extra)
            backend = self._backend(row.libtype, kernel, row.kernel_id)
            tried.best[backend] = min(row.us, tried.best.get(backend, row.us))

    def _winner_of(self, ledger: LedgerReader, row: _WinnerRow) -> Winner:
        candidates = ledger.query(_BESIDE, (row.attempt, row.shape))
        own = [us for us, kernel, libtype in candidates if (kernel, libtype) == (row.kernel_name, row.libtype)]
        rivals = [us for us, kernel, libtype in candidates if (kernel, libtype) != (row.kernel_name, row.libtype)]
        kernel = row.kernel_name or _first_stage(row.extra)
        return Winner(
            node=row.node,
            slot=row.slot,
            us=row.us,
            # we do not trust the tuner's column, and compute the value from shape and time
            tflops=self.flops(row.shape) / row.us / 1e6,
            bw=row.bw,
            spread=row.spread,
            kernel=kernel,
            backend=self._backend(row.libtype, kernel, row.kernel_id),
            gfx=row.gfx,
            cu_num=row.cu_num,
            median_us=median(own + rivals) if candidates else None,
            runner_up_us=min(rivals, default=None),
            first_us=own[0] if own else None,
            noisy=ledger.noise(row.attempt, row.shape) > 0,
        )

    def _backend(self, libtype: str, kernel: str, number: int | None) -> str:
        backend = _name_of(self.family.name, kernel, "" if number is None else str(number), libtype)
        if backend not in self.backends and len(self.backends) >= MOST_BACKENDS:
            backend = "other"
        self.backends.add(backend)
        return backend


_name_of = lru_cache(_CHUNK)(backend_name)


def _first_stage(extra: str | None) -> str:
    """The kernel of fmoe's first stage, whose rows have no kernelName."""
    return str(json.loads(extra).get("kernelName1", "")) if extra else ""
