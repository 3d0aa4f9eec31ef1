"""python -m benchmarks.stability [--match TEXT] [--cap S] [--out DIR]: three tunings of the same shapes on one GPU.

How far the winners' times are apart, and each winner's regret: its time over that of the best of the three, ranked side
by side at the end, less 1 (for large shapes sustained, as in the tuning). The shapes take part in nothing that was
fitted. They are tuned in batches, each batch three times over, so that a shape's tunings are some seconds apart; the
results of a batch are printed and kept as it ends.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, LeftOutError
from benchmarks.triton_tuning import Bench, kept, label

TUNINGS = 3
BATCH = 4
CAP_S = 450.0
"""Seconds after which no further batch is begun, so that all of it takes at most eight minutes."""

Shape = tuple[int, int, int]
MNK: tuple[Shape, ...] = (
    (8192, 8192, 8192),
    (1, 7168, 4096), (128, 4608, 3584), (2048, 5120, 5120),
    (8192, 5120, 8192),
    (8, 14336, 4096), (256, 3584, 18944), (1024, 6144, 6144),
    (16384, 4096, 2048),
    (16, 2880, 2880), (384, 10240, 5120), (3072, 3072, 3072),
    (4, 5120, 13824), (96, 3200, 8640), (768, 2560, 9728), (4096, 1024, 7168),
)  # fmt: skip
"""(M, N, K): projections of models of 4 to 70 thousand million parameters from decode to prefill, and two squares.

Those of 1e11 operations and more are ranked sustained.
"""
SHAPES = tuple((family, mnk) for mnk in MNK for family in ("a8w8", "a16w16"))
"""32: each in fp8 and in bfloat16."""


def stability(bench: Bench, shapes: Sequence[tuple[str, Shape]]) -> list[Figure]:
    """Three tunings of each shape, then their winners side by side. What the cap leaves out is printed."""
    apart: list[float] = []
    regrets: list[float] = []
    margins: list[float] = []
    done = 0
    for batch in [shapes[i : i + BATCH] for i in range(0, len(shapes), BATCH)]:
        if bench.late():
            print(f"left out for the time cap: {len(shapes) - done} shapes", file=sys.stderr)
            break
        winners: dict[tuple[str, Shape], list[dict[str, Any]]] = {s: [] for s in batch}
        walls: dict[tuple[str, Shape], list[float]] = {s: [] for s in batch}
        for number in range(TUNINGS):
            for family, mnk in batch:
                tuned = bench.tune(family, [mnk], hints=False, seed=number)
                winners[family, mnk].append(tuned.winners[mnk[0]])
                walls[family, mnk].append(tuned.wall_s)
        for (family, mnk), won in winners.items():
            names, us = [w["kernelName"] for w in won], [w["us"] for w in won]
            regret = regret_of(bench, family, mnk, names)
            apart += [abs(a / b - 1) for a, b in itertools.combinations(us, 2)]
            regrets.append(max(regret.values()))
            margins += [w["margin"] for w in won if "margin" in w]
            kept = {"us": us, "names": names, "regret": [regret[n] for n in names], "walls_s": walls[family, mnk]}
            about = {k: [w.get(k) for w in won] for k in ("spread", "samples", "margin")}
            bench.keep("stability", label(family, mnk), {**kept, **about})
        done += len(batch)
    if not regrets:
        raise LeftOutError("the time cap left no shape")
    how = f"{len(regrets)} shapes, {TUNINGS} tunings each"
    sure = sum(m >= 3 for m in margins)
    worst = f"the best of the {TUNINGS} winners side by side; {sum(r > 0 for r in regrets)} shapes with any, "
    worst += f"{sure} of {len(margins)} winners with a margin of 3 standard errors and more"
    return [
        Figure("winners' times apart, median", 100 * statistics.median(apart), 1, "%", f"{how}, pairs of tunings"),
        Figure("regret, the worst shape", 100 * max(regrets), 1.5, "%", worst),
        Figure("regret, median", 100 * statistics.median(regrets), 0.5, "%", how),
    ]


def regret_of(bench: Bench, family: str, mnk: Shape, names: Sequence[str]) -> dict[str, float]:
    """Regret of each winner against the best of them, ranked side by side; 0 where all are one."""
    distinct = list(dict.fromkeys(names))
    if len(distinct) == 1:
        return {distinct[0]: 0.0}
    tuned = bench.tune(family, [mnk], only=distinct, seed=TUNINGS, again=2)
    us = {r["kernelName"]: r["us"] for r in tuned.rows[mnk[0]] if r["us"] > 0}  # the last row of each is the ranking's
    us[tuned.winners[mnk[0]]["kernelName"]] = tuned.winners[mnk[0]]["us"]
    return {n: us[n] / min(us.values()) - 1 for n in distinct}


def run(folder: Path, match: str = "", out: Path | None = None, cap_s: float = CAP_S) -> list[Figure]:
    """The figures. Raises LeftOutError without a GPU."""
    from worker.tuners.search.measuring_process import NoDeviceError

    until = time.monotonic() + cap_s
    try:
        bench = Bench(folder, out or folder / "stability.json", until, candidates=0)
    except NoDeviceError as e:
        raise LeftOutError(str(e)) from e
    try:
        figures = stability(bench, [s for s in SHAPES if match in label(*s)])
        bench.keep("figures", "stability", [[f.name, f.value, f.bound, f.unit, f.how, f.holds] for f in figures])
    finally:
        bench.tuner.close()
    return figures


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.stability")
    parser.add_argument("--match", default="", metavar="TEXT", help="only shapes with TEXT, such as 8192x or a8w8")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    parser.add_argument("--cap", type=float, default=CAP_S, help="seconds after which no batch is begun")
    args = parser.parse_args(argv)
    return kept("stability", args.out, lambda folder, out: run(folder, args.match, out, args.cap))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
