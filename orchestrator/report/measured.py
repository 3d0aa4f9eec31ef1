"""The measurements of each shape for the page of a run, updated from the ledger's new rows (rows are only ever added).

`results/run_results.py` reads the winners of a run that ended; here they may still change with every look.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median

from orchestrator.backend_names import backend_name
from orchestrator.ledger.reader import LedgerReader, ProfileRow
from orchestrator.shapes.model import Key
from worker.families import Family

MOST_BACKENDS = 12
"""Most backends that are shown separately, whatever names nodes send. The rest are `other`."""

_CHUNK = 20_000
"""Rows that are read at once."""
_NEW = """SELECT id, shape, us, status, kernel_id, kernel_name, libtype, extra
    FROM rows WHERE id>? ORDER BY id LIMIT ?"""
_CORRECT_CANDIDATES = """SELECT us, kernel_name, libtype FROM rows
    WHERE attempt=? AND shape=? AND us>0 AND status='ok' AND winner=0 ORDER BY id"""


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
        self._unsettled: list[ProfileRow] = []
        """Winners from attempts that have not settled their shape (yet)."""

    def update(self, ledger: LedgerReader) -> None:
        """Read the rows that are new. Call it inside a snapshot of the ledger."""
        if not self.keys:
            self.keys = ledger.keys
        self._read_candidates(ledger)
        self._read_winners(ledger)

    def _read_candidates(self, ledger: LedgerReader) -> None:
        """Count the new rows by shape, and keep the best time of each backend."""
        while chunk := ledger.query(_NEW, (self._last_row, _CHUNK)):
            for row_id, shape_id, us, status, number, name, libtype, extra in chunk:
                self._last_row = row_id
                tried = self.tried[shape_id]
                tried.candidates += 1
                if us > 0 and status == "ok":
                    backend = self._backend(libtype, name or _first_stage(extra), number)
                    tried.best[backend] = min(us, tried.best.get(backend, us))

    def _read_winners(self, ledger: LedgerReader) -> None:
        """Keep the winner of each shape that is tuned by now: the row of the attempt that settled it."""
        new_winners = list(ledger.winner_rows(self._last_winner))
        if new_winners:
            self._last_winner = new_winners[-1].id
        shapes = ledger.replayed.shapes
        rows = self._unsettled + new_winners
        self._unsettled = []
        for row in rows:
            shape = shapes[row.shape]
            if shape.state != "tuned":
                self._unsettled.append(row)
                continue
            is_known = self._settled_by.get(row.shape) == row.attempt
            if shape.attempt == row.attempt and not is_known:
                self._settled_by[row.shape] = row.attempt
                self.winners[row.shape] = self._winner_of(ledger, row)

    def flops(self, shape: int) -> float:
        """Floating-point operations of the shape."""
        return self.family.flops(self.family.named_key(self.keys[shape]))

    def _winner_of(self, ledger: LedgerReader, winner: ProfileRow) -> Winner:
        row = winner.row
        libtype = row["libtype"]
        kernel = winner.kernel_name or str(row.get("kernelName1", ""))
        own_times: list[float] = []
        rival_times: list[float] = []
        for us, *other in ledger.query(_CORRECT_CANDIDATES, (winner.attempt, winner.shape)):
            times = own_times if other == [winner.kernel_name, libtype] else rival_times
            times.append(us)
        all_times = own_times + rival_times
        return Winner(
            node=winner.node,
            slot=winner.slot,
            us=winner.us,
            # we do not trust the tuner's column, and compute the value from shape and time
            tflops=self.flops(winner.shape) / winner.us / 1e6,
            bw=row.get("bw"),
            spread=row.get("spread"),
            kernel=kernel,
            backend=self._backend(libtype, kernel, row.get("kernelId")),
            gfx=winner.gfx,
            cu_num=winner.cu_num,
            median_us=median(all_times) if all_times else None,
            runner_up_us=min(rival_times, default=None),
            first_us=own_times[0] if own_times else None,
            noisy=ledger.noise(winner.attempt, winner.shape) > 0,
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
