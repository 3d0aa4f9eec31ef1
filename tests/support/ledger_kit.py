"""A small run in a ledger, for the tests of ledger, planning and results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from orchestrator import events as ev
from orchestrator.families import get_family
from orchestrator.ledger.ingest import Ingest
from orchestrator.ledger.reader import LedgerReader
from orchestrator.ledger.writer import Ledger
from orchestrator.policy import PolicySettings
from orchestrator.policy.apply import apply
from orchestrator.policy.model import State
from orchestrator.shapes.model import Shape
from orchestrator.view.status import RunStatus
from worker.families import Family
from worker.protocol import record

A8W8 = get_family("a8w8_blockscale")
DEVICE = {"gfx": "gfx950", "cu_num": 256, "device": "a GPU"}
ROW: dict[str, Any] = {
    "kernelId": 7, "splitK": 0, "us": 10.0, "kernelName": "kernel_a", "libtype": "ck", "tflops": 0.5, "bw": 12.25,
    "errRatio": 0.0, "status": "ok", "spread": 0.01, "samples": 11, "detail": "",
}  # fmt: skip


def shapes(n: int) -> list[Shape]:
    """n shapes that differ in M alone: 1..n, 64, 128."""
    return [Shape(i, (i, 64, 128)) for i in range(1, n + 1)]


class BadNotes:
    """A watcher of a run that keeps the bad notes."""

    def __init__(self) -> None:
        self.bad: list[str] = []

    def update(self, status: RunStatus) -> None: ...

    def note(self, text: str, *, bad: bool = False) -> None:
        self.bad += [text] if bad else []


def per_node(ledger: LedgerReader) -> dict[str, int]:
    """Shapes tuned by node."""
    return Counter(s.node for s in ledger.shapes("tuned"))


class Run:
    """A ledger with groups, and a worker on node n1 (or another) that says what a test wants.

    An attempt is named by its group: g0001-1 has the shapes of the first group, g0002-1 those of the second.
    """

    def __init__(
        self,
        folder: Path,
        groups: Sequence[Sequence[int]] = ((1, 2), (3,)),
        family: Family = A8W8,
        asked: Sequence[Shape] = (),
    ) -> None:
        self.ledger = Ledger.create(folder / "ledger.db")
        self.state = State(PolicySettings())
        self.ledger.drive(self.state)
        self.ingest = Ingest(self.ledger, self.state)
        self.now = 1000.0
        self.groups = {f"g{n:04d}": tuple(ids) for n, ids in enumerate(groups, 1)}
        with self.ledger.transaction():
            self.ledger.set_meta("tuner", "replay")
            self.ledger.add_shapes(asked or shapes(max(i for ids in groups for i in ids)), family)
        units = tuple((i,) for ids in groups for i in ids)
        self.journal(ev.WorkAdded("all", units, tuple((2.5,) for _ in units)))

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.ledger.close()

    def journal(self, *records: ev.Record) -> None:
        """Keep records and apply them, as a controller does."""
        self.now += 1.0
        with self.ledger.transaction():
            self._keep(records)

    def _keep(self, records: Iterable[ev.Record]) -> None:
        for r in records:
            self.ledger.journal(r, self.now)
            apply(self.state, r, self.now)

    def send(self, attempt: str, node: str = "n1", slot: str = "0") -> None:
        known = self.state.nodes.get(node)
        if known is None or slot not in known.slots:
            self.journal(ev.NodeExpected(node, (slot,)), ev.NodeJoined(node, (*(known.slots if known else ()), slot)))
        self.journal(ev.Send(attempt, node, slot, int(self.now), self.groups[attempt.rsplit("-", 1)[0]]))

    def says(self, *lines: bytes | dict[str, Any], node: str = "n1", slot: str = "0") -> list[ev.Event]:
        """Feed lines of a slot's events file and journal the events that come of them."""
        data = b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines)
        self.now += 1.0
        with self.ledger.transaction():
            events, consumed = self.ingest.feed(node, slot, data)
            self._keep(events)
        assert consumed == len(data)
        return events

    def tune(self, attempt: str, *ids: int, node: str = "n1", slot: str = "0", us: float = 10.0) -> None:
        """The attempt starts and tunes shapes: two candidates and the winner of each."""
        self.says(started(attempt), node=node, slot=slot)
        for i in ids:
            self.says(
                record("shape_started", 1.0, attempt=attempt, shape=i),
                row("row", attempt, i, us=us * 3, kernelName="kernel_b"), row("row", attempt, i, us=us * 1.1),
                row("shape_tuned", attempt, i, us=us), node=node, slot=slot,
            )  # fmt: skip

    def bad(self) -> int:
        """Lines that were no records, or impossible ones."""
        return int(self.ledger.query("SELECT coalesce(sum(bad), 0) FROM offsets")[0][0])


def started(attempt: str) -> dict[str, Any]:
    return record("attempt_started", 1.0, attempt=attempt, group="", device=DEVICE)


def row(kind: str, attempt: str, shape: int, **fields: Any) -> dict[str, Any]:
    """A `row` or `shape_tuned` record; `fields` change ROW, None takes a field out."""
    values = {k: v for k, v in {**ROW, **fields}.items() if v is not None}
    return record(kind, 1.5, attempt=attempt, shape=shape, row=values)


def ended(attempt: str, outcome: str = "done", **fields: Any) -> dict[str, Any]:
    rest = {"in_flight": None, "exit": 0, "detail": "", "seconds": 4.0, "spent": {"import": 1.0, "measure": 3.0}}
    return record("attempt_ended", 2.0, attempt=attempt, outcome=outcome, **{**rest, **fields})


def blocked(candidate: list[str], **fields: Any) -> dict[str, Any]:
    """An entry of `withheld`: a blocked candidate, which faulted."""
    made = {"key": ["gfx950", "3"], "candidate": candidate, "name": "asm kernel\x1b[31m", "outcome": "fault"}
    return {**made, "detail": "SIGSEGV", "t": 5.0, "slot": "gpu-1", "image": "sha", "driver": "6", **fields}


def tuned(attempt: str, *blocked_records: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A result of shape 3 with blocked candidates."""
    return {**row("shape_tuned", attempt, 3), "candidate": ["ck", "3"], "withheld": list(blocked_records), **fields}
