"""Whole runs for the tests of the page: the simulator's journal with faults, and rows as a fleet would measure them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator import events as ev
from orchestrator.families import get_family
from orchestrator.ledger.writer import Ledger, row_values
from orchestrator.paths import RunConfig, RunPaths, create_run_folder
from orchestrator.reasons import Reason
from orchestrator.shapes.model import Shape
from tests.simulator.plan import Faults, Outage, Poison, Sickness, SimGroup, SimPlan
from tests.simulator.simulator import Simulator
from worker.families import Family

BEGAN = 1_790_000_000.0
FAMILY = get_family("a8w8_bpreshuffle")
FP8 = "torch.float8_e4m3fn"
DEVICE = {"gfx": "gfx950", "cu_num": 256, "device": "AMD Instinct MI355X"}
WIDTHS = (
    (1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584), (57344, 8192), (8192, 28672), (6144, 4096), (4096, 4096),
)  # fmt: skip
"""N and K of layers of open models."""
KERNELS = {
    "asm": "_ZN5aiter{m}gemm_bf16_pertokenFp8_{n}x{k}E",
    "ck": "a8w8_bpreshuffle_256x{m}x{n}x{k}_16x16_8x32x1",
    "cktile": "a8w8_bpreshuffle_cktile_{m}x{n}x{k}_intrawave",
    "flydsl": "flydsl_preshuffle_{m}x{n}x{k}",
}


def shapes(n: int) -> list[Shape]:
    """n shapes of decode and prefill sizes over the widths, those of one width beside each other."""
    each = -(-n // len(WIDTHS))
    keys = [(8 * (i + 1) if i else 1, width, depth, FP8) for width, depth in WIDTHS for i in range(each)]
    return [Shape(i, key) for i, key in enumerate(keys[:n], 1)]


def faults(groups: Sequence[SimGroup], span: float) -> Faults:
    """Some of everything that a page shows."""
    ids = [s for g in groups for s in g.shapes]
    pick = ids[:: max(1, len(ids) // 12)]
    return Faults(
        poison={pick[1]: Poison(Reason.FAULT), pick[2]: Poison(Reason.HANG), pick[3]: Poison(Reason.OOM, 0.5)},
        refused={pick[4]: Reason.NO_CANDIDATE, pick[5]: Reason.WRONG_RESULT},
        worker_killers=frozenset({pick[6]}),
        sick={("n2", "3"): Sickness(canary=False, since=0.3 * span, until=0.6 * span)},
        outages=(Outage("n3", 0.4 * span, 0.2 * span + 100.0), Outage("n1", 0.7 * span, 20.0, "link")),
    )


def plan(n: int, nodes: int = 3, slots: int = 4, per_group: int = 12) -> SimPlan:
    """A plan that tunes n shapes with faults; the same every time."""
    rng = random.Random(n)
    ids = [s.id for s in shapes(n)]
    groups: list[SimGroup] = []
    for i in range(0, n, per_group):
        part = tuple(ids[i : i + per_group])
        took = tuple(rng.uniform(4.0, 20.0) for _ in part)
        groups.append(SimGroup(f"g{len(groups) + 1:04d}", part, took, sum(took)))
    span = sum(sum(g.seconds) for g in groups) / (nodes * slots)
    return SimPlan(
        {f"n{i + 1}": slots for i in range(nodes)}, tuple(groups), faults(groups, span) if n >= 12 else Faults(), n
    )


def fill(
    ledger: Ledger, journal: Sequence[tuple[float, ev.Record]], asked: Sequence[Shape], names: dict[int, str]
) -> None:
    """Journal and rows; `names` gives some shapes' winners another kernel name."""
    rng = random.Random(7)
    by_id, places = {s.id: s for s in asked}, {a.id: (a.node, a.slot) for a in ledger.replayed.attempts.values()}
    with ledger.transaction():
        for t, record in journal:
            if isinstance(record, ev.Send):
                places[record.attempt] = (record.node, record.slot)
            if isinstance(record, ev.ShapeTuned):
                node, slot = places[record.attempt]
                for row, wins in candidates(by_id[record.shape], rng, names.get(record.shape, "")):
                    made = row_values(
                        attempt=record.attempt, shape=record.shape, node=node, slot=slot, t=BEGAN + t, row=row,
                        winner=wins, device=DEVICE,
                    )  # fmt: skip
                    ledger.put_rows([made])
            if isinstance(record, ev.NodeJoined):
                for slot in record.slots:
                    ledger.slot_info(record.node, slot, info={"code": "c0de", "host": record.node}, device=DEVICE)
            if isinstance(record, ev.Quarantine):
                record = replace(record, until=record.until + BEGAN)
            ledger.journal(record, BEGAN + t)


def candidates(shape: Shape, rng: random.Random, name: str = "") -> list[tuple[dict[str, Any], bool]]:
    """Measurements of a shape: a few candidates of each backend, and the best of them once more."""
    key = shape.key_dict(FAMILY)
    m, n, k = (int(key[c]) for c in ("M", "N", "K"))
    flops, moved = FAMILY.flops(key), float(m * k + n * k + 2 * m * n)
    bound = max(flops / 5033.2e6, moved / 8.0e6) + 3.0
    rows = []
    for backend, pattern in KERNELS.items():
        skill = {"asm": 0.75, "ck": 0.6, "cktile": 0.55, "flydsl": 0.5}[backend] * rng.uniform(0.75, 1.25)
        for i in range(2):
            us = bound / min(skill, 0.92) * (1.0 + 0.25 * i)
            rows.append(_row(backend, pattern.format(m=16 << i, n=128, k=128), us, flops, moved, rng))
    best = min(rows, key=lambda r: r["us"])
    again = best | {"us": best["us"] * rng.uniform(0.985, 1.015), "kernelName": name or best["kernelName"]}
    wrong = _row("ck", "a8w8_bpreshuffle_wrong", bound, flops, moved, rng) | {"status": "wrong", "errRatio": 0.7}
    return [(r, False) for r in (*rows, wrong)] + [(again, True)]


def _row(backend: str, kernel: str, us: float, flops: float, moved: float, rng: random.Random) -> dict[str, Any]:
    return {
        "kernelId": 1, "splitK": 0, "us": us, "kernelName": kernel, "libtype": backend, "tflops": flops / us / 1e6,
        "bw": moved / us / 1e3, "errRatio": 0.0, "status": "ok", "spread": rng.lognormvariate(-5.0, 0.8), "samples": 21,
        "detail": "",
    }  # fmt: skip


def empty_run(folder: Path, n: int = 24, of: Family = FAMILY, **config: Any) -> tuple[RunPaths, list[Shape]]:
    """A run that was planned and has not begun. `of`: its family, with the first columns of FAMILY's key."""
    paths = create_run_folder(folder, "20260921-140640-5a5a")
    asked = [Shape(s.id, s.key[: len(of.key_names)]) for s in shapes(n)]
    given: dict[str, Any] = {
        "run": paths.run, "created": BEGAN - 4.0, "argv": ["tune", "llm.csv", "-i", "mi355x.yaml", "--tuner", "aiter"],
        "version": "0.1.0", "family": of.name, "tuner": "aiter", "shapes": "llm.csv", "shapes_sha256": "5a" * 32,
        "inventory": "mi355x.yaml",
    }  # fmt: skip
    RunConfig(**(given | config)).write(paths.config)
    paths.inventory.write_text("nodes: {n1: {transport: ssh, host: n1}}\n")
    with Ledger.create(paths.ledger) as ledger, ledger.transaction():
        for key in ("run", "family", "tuner"):
            ledger.set_meta(key, (given | config)[key])
        ledger.set_meta("created", BEGAN - 4.0)
        ledger.set_meta("state", "planned")
        ledger.add_shapes(asked, of)
    return paths, asked


def simulated_run(
    folder: Path, n: int = 240, *, state: str = "finished", until: float | None = None, nodes: int = 3, slots: int = 4,
    names: dict[int, str] | None = None, **config: Any,
) -> RunPaths:  # fmt: skip
    """A run of n shapes with faults, kept up to `until` (virtual seconds), its first shapes skipped."""
    paths, asked = empty_run(folder, n, **config)
    simulator = Simulator(plan(n, nodes, slots))
    simulator.run()
    journal = [(t, r) for t, r in simulator.journal if until is None or t <= until]
    with Ledger.open(paths.ledger) as ledger:
        fill(ledger, journal, asked, names or {})
        with ledger.transaction():
            ledger.set_meta("state", state)
            if state != "running":
                ledger.set_meta("ended", BEGAN + (until if until is not None else simulator.now))
    return paths
