"""Whole runs for the tests of the page: the simulator's journal with faults, and rows as a fleet would measure them."""

from __future__ import annotations

import math
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

BEGAN = 1_790_000_000.0
FAMILY = get_family("a8w8_bpreshuffle")
FP8 = "torch.float8_e4m3fn"
DEVICE = {"gfx": "gfx950", "cu_num": 256, "device": "AMD Instinct MI355X"}
WIDTHS = ((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584), (57344, 8192), (8192, 28672), (4096, 4096))
"""N and K of layers of open models."""
KERNELS = {"asm": ("_ZN5aiter_gemm_bf16_pertokenFp8", 0.75), "ck": ("a8w8_bpreshuffle", 0.6)}
"""Kernel of each backend, and its usual share of the roof."""


def shapes(n: int) -> list[Shape]:
    """n shapes of decode and prefill sizes over the widths, those of one width beside each other."""
    each = -(-n // len(WIDTHS))
    keys = [(8 * (i + 1) if i else 1, width, depth, FP8) for width, depth in WIDTHS for i in range(each)]
    return [Shape(i, key) for i, key in enumerate(keys[:n], 1)]


def plan(n: int, nodes: int = 3, slots: int = 4) -> SimPlan:
    """A plan that tunes n shapes, twelve a group, with some of all that a page shows; always the same."""
    rng, ids = random.Random(n), [s.id for s in shapes(n)]
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


def fill(
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
                        winner=row is rows[-1], device=DEVICE,
                    )
                    for row in rows
                ])  # fmt: skip
            if isinstance(record, ev.NodeJoined):
                for slot in record.slots:
                    ledger.slot_info(record.node, slot, info={"code": "c0de", "host": record.node}, device=DEVICE)
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
    paths, asked = create_run_folder(folder, "20260921-140640-5a5a"), shapes(n)
    given: dict[str, Any] = {
        "run": paths.run, "created": BEGAN - 4.0, "argv": ["tune", "llm.csv", "-i", "mi355x.yaml", "--tuner", "aiter"],
        "version": "0.1.0", "family": FAMILY.name, "tuner": "aiter", "shapes": "llm.csv", "shapes_sha256": "5a" * 32,
        "inventory": "mi355x.yaml",
    }  # fmt: skip
    RunConfig(**(given | config)).write(paths.config)
    paths.inventory.write_text("nodes: {n1: {transport: ssh, host: n1}}\n")
    with Ledger.create(paths.ledger) as ledger, ledger.transaction():
        for key in ("run", "family", "tuner", "created"):
            ledger.set_meta(key, (given | config)[key])
        ledger.add_shapes(asked, FAMILY)
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
    simulator = Simulator(plan(n, nodes, slots))
    simulator.run()
    with Ledger.open(paths.ledger) as ledger:
        fill(ledger, [(t, r) for t, r in simulator.journal if t <= until], asked, name)
        with ledger.transaction():
            ledger.set_meta("state", "finished" if until == math.inf else "interrupted")
            ledger.set_meta("ended", BEGAN + min(until, simulator.now))
    return paths
