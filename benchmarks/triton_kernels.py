"""Our Triton kernels on this machine's GPU: right everywhere, and how fast beside torch's library GEMM.

`python -m benchmarks.triton_kernels [--out ROWS.jsonl] [--seconds N] [--candidates N] [--only check,time]` writes each
measured candidate as a row. Both sides are timed through a graph, all that a call needs included, on inputs that are
rotated so that none sits in cache; the leaders and torch are measured again in turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figure import Figure, show
from benchmarks.gpu import Gpu, Row
from worker.families.triton_config import KernelConfig
from worker.tuners.common.problem import Problem

if TYPE_CHECKING:
    from worker.tuners.search.target import Target
    from worker.tuners.triton.operands import Operands

BF16, FP8, INT8, FP4 = "bfloat16", "float8_e4m3fn", "int8", "float4_e2m1fn_x2"
SHAPES = (
    (16, 1536, 7168), (64, 7168, 2048), (128, 1536, 7168), (1, 4096, 4096), (32, 8192, 8192), (512, 4096, 4096),
    (1024, 2112, 7168), (4096, 4096, 4096), (8192, 8192, 8192),
)  # fmt: skip
"""(M, N, K): decode, middle and large ones of real models."""
RAGGED = (
    Problem("a16w16", 1, 37, 777, 1000, BF16, bias=True),
    Problem("a16w16", 1, 1, 129, 77, "float16", "float32"),
    Problem("a16w16", 1, 700, 1111, 520, BF16),
    Problem("a16w16", 1, 2050, 4100, 1032, BF16, bias=True),
    Problem("a8w8", 1, 37, 777, 1040, FP8, scale="row"),
    Problem("a8w8", 1, 2050, 4100, 1040, FP8, scale="tensor"),
    Problem("a8w8", 1, 333, 1000, 1040, INT8, scale="row"),
    Problem("a8w8_blockscale", 1, 37, 777, 1040, FP8, scale="block"),
    Problem("a8w8_blockscale", 1, 1030, 2048, 2048, FP8, scale="block"),
    Problem("a4w4_blockscale", 1, 37, 777, 1056, FP4, scale="mx"),
    Problem("a4w4_blockscale", 1, 700, 1111, 1056, FP4, scale="mx"),
    Problem("batched_bf16", 5, 37, 777, 520, BF16),
    Problem("batched_a8w8", 5, 333, 777, 1040, INT8, scale="row"),
)
SPAN = 256 << 20
"""Bytes that rotated inputs span: several times the second-level cache."""
LEADERS, ROUNDS = 4, 15


def library(o: Operands, out: Any) -> dict[str, Callable[[], Any]]:
    """torch's own ways to compute the problem."""
    import torch

    if o.problem.family == "a16w16":
        return {"torch_mm": lambda: torch.mm(o.x, o.w.t(), out=out)}
    assert o.x_scale is not None
    assert o.w_scale is not None
    scales = (o.x_scale[:, None], o.w_scale[None, :])

    def scaled(fast: bool) -> Callable[[], Any]:
        return lambda: torch._scaled_mm(
            o.x, o.w.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=fast, out=out
        )  # fmt: skip

    return {"torch_scaled_mm": scaled(False), "torch_scaled_mm_fast": scaled(True)}


def picked(p: Problem, target: Target, count: int) -> list[KernelConfig]:
    """The model's first candidates, and as many others drawn from the rest, so that the model itself can be judged."""
    from worker.tuners.triton import model, space

    listed = model.order(p, target, space.candidates(p, target))
    rest = listed[count:]
    random.Random(1).shuffle(rest)
    return listed[:count] + rest[: count // 2]


def check(gpu: Gpu, each: int) -> list[Row]:
    """Every family at ragged sizes, with candidates drawn from its list."""
    from worker.tuners.triton import operands, space

    plans = []
    for p in RAGGED:
        listed = space.candidates(p, gpu.target)
        random.Random(2).shuffle(listed)
        plans.append(
            (p, sorted(listed[: 4 * each], key=lambda c: not (c.persistent or c.split_k > 1 or c.swap))[:each])
        )
        gpu.ahead(*plans[-1])
    rows = []
    for p, candidates in plans:
        o = operands.make(p, gpu.device, 3)
        right = operands.reference(o)
        for c in candidates:
            rows.append({"part": "check"} | gpu.checked(o, right, c, 20))
            gpu.write(rows[-1])
    return rows


def measure(gpu: Gpu, p: Problem, candidates: list[KernelConfig]) -> list[Row]:
    """Rows of the candidates and of torch; the leaders and torch have `final` numbers taken in turns."""
    from worker.tuners.triton import model, operands

    o = operands.make(p, gpu.device, 3)
    right = operands.reference(o)
    sets = operands.rotation(operands.make(p, gpu.device, 3, draw=1, weights=o), SPAN, 32 << 30)
    out = operands.out_like(p, gpu.device)
    rows: list[Row] = []
    graphs: dict[str, tuple[Any, int]] = {}
    for c in candidates:
        if time.monotonic() > gpu.end:
            break
        row: Row = {"part": "time", "estimate": model.estimate_us(p, c, gpu.target)} | gpu.checked(o, right, c, 2)
        rows.append(row)
        if "error" not in row:
            calls = [gpu.call(s, c, out) for s in sets]
            made = graphs[c.name] = gpu.graph(calls, row["estimate"])
            row["us"] = min(gpu.sample(made) for _ in range(4))
            if row["wrong"] > 0.05:
                del graphs[c.name]
        if len(graphs) > 2 * LEADERS:
            slowest = max(graphs, key=lambda name: next(r["us"] for r in rows if r["candidate"] == name))
            del graphs[slowest]
    leaders = sorted((r for r in rows if r["candidate"] in graphs), key=lambda r: float(r["us"]))[:LEADERS]
    us = leaders[0]["us"] if leaders else 10.0
    for name in library(o, out):
        row = {"part": "time", "problem": asdict(p), "candidate": name}
        out.fill_(float("nan"))
        library(o, out)[name]()
        row["wrong"] = operands.check(out, right)
        graphs[name] = gpu.graph([library(s, out)[name] for s in sets], us)
        rows.append(row)
        leaders.append(row)
    samples: dict[str, list[float]] = {r["candidate"]: [] for r in leaders}
    for _ in range(ROUNDS):
        for name, taken in samples.items():
            taken.append(gpu.sample(graphs[name]))
    for row in leaders:
        taken = samples[row["candidate"]]
        q = statistics.quantiles(taken, n=4)
        row |= {"final": statistics.median(taken), "spread": (q[2] - q[0]) / 2 / q[1]}
    for row in rows:
        gpu.write(row)
    return rows


def problems() -> list[Problem]:
    """Timed calls."""
    sixteen = [Problem("a16w16", 1, m, n, k, BF16) for m, n, k in SHAPES]
    return [q for p in sixteen for q in (p, replace(p, family="a8w8", dtype=FP8, scale="row"))]


def figures(rows: list[Row]) -> list[Figure]:
    """Ours beside torch's faster one, by family, and wrong elements (benchmarks/results/triton-kernels.md)."""
    found = []
    for family in ("a16w16", "a8w8"):
        ratios: dict[str, dict[str, list[float]]] = {}
        for r in (r for r in rows if r["problem"]["family"] == family and "final" in r):
            shape = "x".join(str(r["problem"][d]) for d in "mnk")
            side = ratios.setdefault(shape, {"ours": [], "torch": []})
            side["torch" if r["candidate"].startswith("torch_") else "ours"].append(r["final"])
        shares = {s: min(v["torch"]) / min(v["ours"]) for s, v in ratios.items() if v["ours"]}
        if shares:
            how = "torch's time over ours, in graphs, rotated inputs: " + ", ".join(
                f"{s} {x:.2f}" for s, x in shares.items()
            )
            mean = statistics.geometric_mean(shares.values())
            found.append(Figure(f"{family} beside torch, geometric mean", mean, 1.0, "", how, at_least=True))
            found.append(Figure(f"{family} beside torch, worst", min(shares.values()), 0.85, "", "", at_least=True))
    ours = [r for r in rows if r["candidate"].startswith("triton_")]
    for name, bound, how in (
        ("fp8", 1e-5, "Hopper adds fp8 with fewer bits, as torch does with use_fast_accum"),
        ("other", 0.0, ""),
    ):
        seen = [r["wrong"] for r in ours if "wrong" in r and (r["problem"]["dtype"] == FP8) == (name == "fp8")]
        found.append(Figure(f"largest share of wrong elements, {name} formats", max(seen, default=0.0), bound, "", how))
    bad = sum("error" in r or "counters" in r or not r.get("same", True) for r in ours)
    return [*found, Figure("candidates that failed or varied", float(bad), 0.0, "", f"of {len(ours)}")]


def run(
    folder: Path, out: Path | None = None, seconds: float = 400.0, count: int = 24, only: str = "check,time"
) -> list[Figure]:
    """All parts on one GPU. Raises LeftOutError where there is none."""
    end = time.monotonic() + seconds
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, len(os.sched_getaffinity(0)) - 1), spawn) as pool:
        gpu = Gpu(pool, out, end)
        gpu.write({"part": "device", "target": asdict(gpu.target)})
        rows = check(gpu, 8) if "check" in only else []
        plans = [(p, picked(p, gpu.target, count)) for p in problems()] if "time" in only else []
        for p, candidates in plans:
            gpu.ahead(p, candidates)
        for p, candidates in plans:
            rows += measure(gpu, p, candidates)
        gpu.write({"part": "compiled", "seconds": gpu.compile_seconds})
        pool.shutdown(wait=False, cancel_futures=True)
    return figures(rows)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 where a bound is broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.triton_kernels", description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--candidates", type=int, default=24)
    parser.add_argument("--only", default="check,time")
    given = parser.parse_args(argv)
    found = run(Path.home() / ".cache" / "gemmfleet", given.out, given.seconds, given.candidates, given.only)
    show(found)
    return 0 if all(f.holds for f in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
