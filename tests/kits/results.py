"""Kit of a run's results: a ledger that is made without nodes.

Two ways, by what a test is about. `Run` is fed record by record, as a worker would send them:

with Run(tmp_path) as run:
    run.send("g0001-1")
    run.tune("g0001-1", 1, 2, us=10.0)
    run.says(ended("g0001-1"))

`simulated_run` is the folder of a whole run with faults: the simulator's journal, and rows as a fleet would measure
them.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator import events as ev
from orchestrator.families import get_family
from orchestrator.ledger.ingest import Ingest
from orchestrator.ledger.writer import Ledger, row_values
from orchestrator.paths import RunConfig, RunPaths, create_run_folder
from orchestrator.policy import PolicySettings
from orchestrator.policy.apply import apply
from orchestrator.policy.model import State
from orchestrator.reasons import Reason
from orchestrator.shapes.model import Shape
from orchestrator.view.status import RunStatus
from tests.simulator.plan import Faults, Outage, Poison, Sickness, SimGroup, SimPlan
from tests.simulator.simulator import Simulator
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


BEGAN = 1_790_000_000.0
MODEL_FAMILY = get_family("a8w8_bpreshuffle")
FP8 = "torch.float8_e4m3fn"
MI355X = {"gfx": "gfx950", "cu_num": 256, "device": "AMD Instinct MI355X"}
WIDTHS = ((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584), (57344, 8192), (8192, 28672), (4096, 4096))
"""N and K of layers of open models."""
KERNELS = {"asm": ("_ZN5aiter_gemm_bf16_pertokenFp8", 0.75), "ck": ("a8w8_bpreshuffle", 0.6)}
"""Kernel of each backend, and its usual share of the roof."""


def model_shapes(n: int) -> list[Shape]:
    """n shapes of decode and prefill sizes over the widths, those of one width beside each other."""
    each = -(-n // len(WIDTHS))
    keys = [(8 * (i + 1) if i else 1, width, depth, FP8) for width, depth in WIDTHS for i in range(each)]
    return [Shape(i, key) for i, key in enumerate(keys[:n], 1)]


def plan_with_faults(n: int, nodes: int = 3, slots: int = 4) -> SimPlan:
    """A plan that tunes n shapes, twelve a group, with some of all that a page shows; always the same."""
    rng, ids = random.Random(n), [s.id for s in model_shapes(n)]
    groups: list[SimGroup] = []
    for i in range(0, n, 12):
        took = tuple(rng.uniform(4.0, 20.0) for _ in ids[i : i + 12])
        groups.append(SimGroup(f"g{len(groups) + 1:04d}", tuple(ids[i : i + 12]), took, sum(took)))
    span = sum(sum(g.seconds) for g in groups) / (nodes * slots)
    pick = ids[:: max(1, n // 12)]
    faults = n >= 12 and Faults(
        poison={pick[1]: Poison(Reason.FAULT), pick[2]: Poison(Reason.HANG), pick[3]: Poison(Reason.OOM, 0.5)},
        refused={pick[4]: Reason.NO_CANDIDATE, pick[5]: Reason.WRONG_RESULT},
        worker_killers=frozenset({pick[6]}),
        sick={("n2", "3"): Sickness(canary=False, since=0.3 * span, until=0.6 * span)},
        outages=(Outage("n3", 0.4 * span, 0.2 * span + 100.0), Outage("n1", 0.7 * span, 20.0, "link")),
    )
    return SimPlan({f"n{i + 1}": slots for i in range(nodes)}, tuple(groups), faults or Faults(), n)


def fill_ledger(
    ledger: Ledger, journal: Sequence[tuple[float, ev.Record]], asked: Sequence[Shape], name: str = ""
) -> None:  # fmt: skip
    """Journal and rows; `name`: of the kernel that wins shape 2."""
    rng, by_id = random.Random(7), {s.id: s for s in asked}
    places = {a.id: (a.node, a.slot) for a in ledger.replayed.attempts.values()}
    with ledger.transaction():
        for t, record in journal:
            if isinstance(record, ev.Send):
                places[record.attempt] = (record.node, record.slot)
            if isinstance(record, ev.ShapeTuned):
                node, slot = places[record.attempt]
                rows = candidates(by_id[record.shape], rng, name if record.shape == 2 else "")
                ledger.put_rows([
                    row_values(
                        attempt=record.attempt, shape=record.shape, node=node, slot=slot, t=BEGAN + t, row=row,
                        winner=row is rows[-1], device=MI355X,
                    )
                    for row in rows
                ])  # fmt: skip
            if isinstance(record, ev.NodeJoined):
                for slot in record.slots:
                    ledger.keep_slot_info(record.node, slot, info={"code": "c0de", "host": record.node}, device=MI355X)
            if isinstance(record, ev.Quarantine):
                record = replace(record, until=record.until + BEGAN)
            ledger.journal(record, BEGAN + t)


def candidates(shape: Shape, rng: random.Random, name: str) -> list[dict[str, Any]]:
    """Rows of a shape: two candidates of each backend, a wrong one, and the best of them once more, which wins."""
    m, n, k, *_ = (int(v) for v in shape.key[:3])
    flops, moved = 2.0 * m * n * k, float(m * k + n * k + 2 * m * n)
    bound = max(flops / 5033.2e6, moved / 8.0e6) + 3.0

    def row(backend: str, kernel: str, us: float, **fields: Any) -> dict[str, Any]:
        return {
            "kernelId": 1, "splitK": 0, "us": us, "kernelName": kernel, "libtype": backend, "tflops": flops / us / 1e6,
            "bw": moved / us / 1e3, "errRatio": 0.0, "status": "ok", "spread": rng.lognormvariate(-5.0, 0.8),
            "samples": 21, "detail": "", **fields,
        }  # fmt: skip

    rows = [
        row(backend, f"{kernel}_{16 << i}x128x128", bound / (skill * rng.uniform(0.75, 1.2)) * (1.0 + 0.25 * i))
        for backend, (kernel, skill) in KERNELS.items()
        for i in range(2)
    ]
    best = min(rows, key=lambda r: float(r["us"]))
    again = best | {"us": best["us"] * rng.uniform(0.985, 1.015), "kernelName": name or best["kernelName"]}
    return [*rows, row("ck", "a8w8_bpreshuffle_wrong", bound, status="wrong", errRatio=0.7), again]


def empty_run(folder: Path, n: int = 24, **config: Any) -> tuple[RunPaths, list[Shape]]:
    """A run that was planned and has not begun."""
    paths, asked = create_run_folder(folder, "20260921-140640-5a5a"), model_shapes(n)
    given: dict[str, Any] = {
        "run": paths.run, "created": BEGAN - 4.0, "argv": ["tune", "llm.csv", "-i", "mi355x.yaml", "--tuner", "aiter"],
        "version": "0.1.0", "family": MODEL_FAMILY.name, "tuner": "aiter", "shapes": "llm.csv",
        "shapes_sha256": "5a" * 32,
        "inventory": "mi355x.yaml",
    }  # fmt: skip
    RunConfig(**(given | config)).write(paths.config)
    paths.inventory.write_text("nodes: {n1: {transport: ssh, host: n1}}\n")
    with Ledger.create(paths.ledger) as ledger, ledger.transaction():
        for key in ("run", "family", "tuner", "created"):
            ledger.set_meta(key, (given | config)[key])
        ledger.add_shapes(asked, MODEL_FAMILY)
    return paths, asked


def simulated_run(
    folder: Path,
    n: int = 240,
    *,
    name: str = "",
    nodes: int = 3,
    slots: int = 4,
    until: float = math.inf,
    **config: Any,
) -> RunPaths:
    """A finished run of n shapes with faults, or one that was interrupted after `until` virtual seconds."""
    paths, asked = empty_run(folder, n, **config)
    simulator = Simulator(plan_with_faults(n, nodes, slots))
    simulator.run()
    with Ledger.open(paths.ledger) as ledger:
        fill_ledger(ledger, [(t, r) for t, r in simulator.journal if t <= until], asked, name)
        with ledger.transaction():
            ledger.set_meta("state", "finished" if until == math.inf else "interrupted")
            ledger.set_meta("ended", BEGAN + min(until, simulator.now))
    return paths
