"""python -m benchmarks.triton_tuner [--only fast,torch,aa,autotune] [--out DIR] [--cap S]: the tuner on one GPU.

- fast: the fast search beside the exhaustive one over the same candidates, each from a cold cache
- autotune: its wall time beside triton.autotune's, same candidates, same repeats, own cold caches
- torch: the winners beside torch's library GEMM, both through a graph, interleaved
- aa: the same tuning twice

All sections go into one JSON file as they come (default benchmarks/results/), and a table is printed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, LeftOutError
from benchmarks.triton_tuning import CANDIDATES, GROUP, NAMED, SINGLES, Bench, geomean, kept, label

SECTIONS = ("fast", "torch", "aa", "autotune")


def fast(bench: Bench) -> list[Figure]:
    """Fast beside exhaustive."""
    ratios, idle, walls, busy, of_all = [], 0.0, 0.0, [], []
    for family, shapes in bench.work():
        if bench.late():
            break
        quick = bench.cold(family, shapes)
        whole = bench.cold(family, shapes, search="exhaustive")
        idle += quick.account["idle_s"] + whole.account["idle_s"]
        walls += quick.wall_s + whole.wall_s
        busy += [quick.account["busy"], whole.account["busy"]]
        of_all += [quick.account["busy_of_all"], whole.account["busy_of_all"]]
        name = label(family, shapes[0]) + ("" if len(shapes) == 1 else f" and {len(shapes) - 1} more M")
        rows = {
            str(m): [[r["kernelName"], r["us"], r["status"], r["samples"]] for r in rows]
            for m, rows in whole.rows.items()
        }
        bench.keep("rows", name, rows)
        tried = {str(m): len(r) for m, r in quick.rows.items()}
        times = {
            "fast_s": quick.wall_s,
            "exhaustive_s": whole.wall_s,
            "fast": quick.account,
            "exhaustive": whole.account,
        }
        bench.keep("walls", name, {**times, "tried": tried, "spent": quick.spent})
        for shape in shapes:
            q, w = quick.winners[shape[0]], whole.winners[shape[0]]
            ratios.append(bench.ratio(family, shape, q["kernelName"], w["kernelName"]))
            kept = {"ratio": ratios[-1], "fast": [q["kernelName"], q["us"], q["spread"], q["samples"]],
                    "exhaustive": [w["kernelName"], w["us"], w["spread"], w["samples"]]}  # fmt: skip
            bench.keep("fast", label(family, shape), kept)
    least = "until the last needed kernel, of the time with work, the median search; "
    least += f"the least {100 * min(busy):.0f} %; of all time {100 * statistics.median(of_all):.0f} %"
    how = f"{len(ratios)} shapes, at most {bench.candidates} candidates, winners side by side"
    return [
        Figure("fast over exhaustive, geometric mean", geomean(ratios), 1.02, "x", how),
        Figure("fast over exhaustive, the worst shape", max(ratios), 1.05, "x", how),
        Figure("GPU idle beside a compiled candidate", 100 * idle / walls, 2, "% of wall", "all searches from cold"),
        Figure("compile processes busy", 100 * statistics.median(busy), 85, "%", least, at_least=True),
    ]  # fmt: skip


def aa(bench: Bench) -> list[Figure]:
    """The same tuning twice; the second run's winner beside the first's."""
    off, ratios = [], []
    for family, shapes in bench.work():
        if len(shapes) > 1 or bench.late():
            continue
        one, two = (bench.cold(family, shapes).winners[shapes[0][0]] for _ in range(2))
        off.append(abs(two["us"] / one["us"] - 1))
        ratios.append(bench.ratio(family, shapes[0], two["kernelName"], one["kernelName"]))
        times = {"us": [one["us"], two["us"]], "names": [one["kernelName"], two["kernelName"]], "ratio": ratios[-1]}
        bench.keep("aa", label(family, shapes[0]), times)
    return [
        Figure("A/A: winners' times apart, median", 100 * statistics.median(off), 1, "%", f"{len(off)} shapes twice"),
        Figure("A/A: second winner over first, the worst", max(ratios), 1.01, "x", "side by side"),
    ]


def against_torch(bench: Bench) -> list[Figure]:
    """The winners beside torch's library GEMM, in a process of their own."""
    ours: dict[str, Any] = {}
    families = [f for f in bench.families if f != "a4w4_blockscale"]
    for family in families:
        for shapes in [(s,) for s in SINGLES] + [GROUP]:
            found = bench.tune(family, shapes, max_candidates=bench.candidates)
            ours |= {label(family, s): (family, s, found.winners[s[0]]["kernelName"]) for s in shapes}
    request, answer = bench.folder / "ours.json", bench.folder / "torch.json"
    request.write_text(json.dumps(ours))
    child(bench, "--torch-child", request, answer)
    times = json.loads(answer.read_text())
    for name, value in times.items():
        bench.keep("torch", name, value)
    figures = []
    for family in families:
        ratios = [v["torch_us"] / v["ours_us"] for name, v in times.items() if name.startswith(family + " ")]
        how = f"{len(ratios)} shapes, graphs, rotated inputs, interleaved"
        figures += [
            Figure(f"torch's time over ours, {family}, geometric mean", geomean(ratios), 1.0, "x", how, at_least=True),
            Figure(f"torch's time over ours, {family}, the worst", min(ratios), 0.85, "x", how, at_least=True),
        ]
    return figures


def autotune(bench: Bench) -> list[Figure]:
    """Wall time beside triton.autotune's."""
    family, single = "a16w16", SINGLES[0]
    one = bench.cold(family, [single])
    four = bench.cold(family, GROUP)
    walls = []
    for shape in (single, *GROUP):
        if bench.late():
            break
        request, answer = bench.folder / "autotune.in", bench.folder / "autotune.json"
        request.write_text(json.dumps([family, [shape], bench.candidates]))
        try:
            child(bench, "--autotune-child", request, answer)
        except subprocess.TimeoutExpired:
            print(f"ended for the time cap: autotune of {shape}", file=sys.stderr)
            break
        walls.append(json.loads(answer.read_text()))
        bench.keep("autotune", label(family, shape), walls[-1])
    if not walls:
        return []
    alone, *apart = (w["seconds"][0] for w in walls)
    bench.keep("autotune", "ours", {"one_s": one.wall_s, "group_s": four.wall_s})
    how = f"cold, {walls[0]['configs'][0]} candidates: {one.wall_s:.1f} s against {alone:.1f} s"
    how4 = f"cold: {four.wall_s:.1f} s for the group against {sum(apart):.0f} s for the four, one after the other"
    figures = [Figure("fast's wall time over autotune's, one shape", one.wall_s / alone, 0.1, "x", how)]
    if len(apart) == len(GROUP):
        figures.append(Figure("fast's wall time over autotune's, four M", four.wall_s / sum(apart), 0.05, "x", how4))
    return figures


def child(bench: Bench, flag: str, request: Path, answer: Path) -> None:
    """A section's process of its own, with a cold cache of its own."""
    with tempfile.TemporaryDirectory(dir=bench.folder) as cache:
        left = max(30.0, bench.until - time.monotonic())
        argv = [sys.executable, "-m", "benchmarks.triton_tuner", flag, str(request), str(answer)]
        subprocess.run(argv, check=True, timeout=left, env={**os.environ, "TRITON_CACHE_DIR": cache})


RUNS: dict[str, Callable[[Bench], list[Figure]]] = {
    "fast": fast,
    "aa": aa,
    "torch": against_torch,
    "autotune": autotune,
}


def run(
    folder: Path, only: Sequence[str] = SECTIONS, out: Path | None = None, cap_s: float = 520.0,
    families: Sequence[str] = tuple(NAMED), candidates: int = CANDIDATES,
) -> list[Figure]:  # fmt: skip
    """The sections' figures. Raises LeftOutError without a GPU."""
    from worker.tuners.search.measuring_process import NoDeviceError

    until = time.monotonic() + cap_s
    try:
        bench = Bench(folder, out or folder / "triton_tuner.json", until, families, candidates)
    except NoDeviceError as e:
        raise LeftOutError(str(e)) from e
    figures: list[Figure] = []
    try:
        for name in only:
            if bench.late():
                print(f"left out for the time cap: {name}", file=sys.stderr)
                continue
            start = time.monotonic()
            found: list[Figure] = []
            try:
                found = RUNS[name](bench)
            except subprocess.TimeoutExpired:
                print(f"ended for the time cap: {name}", file=sys.stderr)
            except subprocess.CalledProcessError as e:  # the other sections are worth having
                print(f"ended with an error: {name}: {e}", file=sys.stderr)
                found = [Figure(f"{name}: errors", 1, 0, "", "see above")]
            figures += found
            bench.keep("figures", name, [[f.name, f.value, f.bound, f.unit, f.how, f.holds] for f in found])
            bench.keep("sections_s", name, time.monotonic() - start)
    finally:
        bench.tuner.close()
    return figures


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.triton_tuner")
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    parser.add_argument("--cap", type=float, default=520.0)
    parser.add_argument("--families", default=",".join(NAMED))
    parser.add_argument("--candidates", type=int, default=CANDIDATES)
    parser.add_argument("--torch-child", nargs=2, type=Path)
    parser.add_argument("--autotune-child", nargs=2, type=Path)
    args = parser.parse_args(argv)
    if args.torch_child or args.autotune_child:
        from benchmarks import triton_peers

        request, answer = args.torch_child or args.autotune_child
        (triton_peers.torch_gemm if args.torch_child else triton_peers.autotune)(request, answer)
        return 0
    only = args.only.split(",")
    if unknown := set(only) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    return kept(
        "triton_tuner",
        args.out,
        lambda folder, out: run(folder, only, out, args.cap, args.families.split(","), args.candidates),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
