"""python -m benchmarks.every_m --root ENGINE [options]: a tuned file at every M that a server runs, on one GPU.

Each layer is tuned as `tune --tuner vllm` does, with the 18 usual keys as the workload. Then another process measures,
with other operands, at M that no key knows as well (capture sizes, chunks of prefill, drawn ones): what is there today,
what the new file gives, and the best of a grid of more than 150 configs with the file's own among them; the fastest of
the grid interleaved with both. An M is slower by the rule of the product (new > 1.005 old + 0.5 us).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import vllm_configs
from benchmarks.figure import Figure, show
from benchmarks.vllm_configs import Key, Tuning, compiled, config_of, new_at
from worker.triton_configs.m_ranges import CAPTURE_SIZES, USUAL_KEYS
from worker.triton_configs.slowdown import is_slower
from worker.tuners.common.device import device_seconds
from worker.tuners.common.measure import Finalist, SamplingPolicy, measure, rerank
from worker.tuners.engines.source import LayerProblem
from worker.tuners.search.device_bench import capture

CHUNKS = (640, 768, 769, 1024, 1280, 1536, 2048, 3072, 4096)
GRID = {
    "BLOCK_SIZE_M": (16, 32, 64, 128), "BLOCK_SIZE_N": (16, 32, 64, 128, 256), "BLOCK_SIZE_K": (128,),
    "GROUP_SIZE_M": (1, 16), "num_warps": (2, 4, 8), "num_stages": (3, 4, 6),
}  # fmt: skip
QUICK = SamplingPolicy(min_sample_s=3e-4, min_samples=3, max_samples=5)
FINALISTS = 4


def grid() -> list[dict[str, int]]:
    """The configs that are measured at every M."""
    configs = []
    for chosen in itertools.product(*GRID.values()):
        config = dict(zip(GRID, chosen, strict=True))
        area = config["BLOCK_SIZE_M"] * config["BLOCK_SIZE_N"]
        warps = {2, 4} if area <= 1024 else {4} if area <= 8192 else {4, 8}
        if area <= 32768 and config["num_warps"] in warps and not (area >= 16384 and config["num_stages"] == 6):
            configs.append(config)
    return configs


def replayed_us(calls: Sequence[Any]) -> float:
    """Microseconds of a call, by the faster of two replays of a graph of all."""
    graph = capture(calls)
    graph.replay()
    return min(device_seconds(graph.replay, 1e-4) for _ in range(2)) / len(calls) * 1e6


def best_beside(p: LayerProblem, pair: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> Any:
    """([us of the pair], least us, its config), the pair and the fastest others interleaved; -1: does not run."""
    bench = vllm_configs._bench
    refused = bench.prepare(p, 7, 512 << 20, lambda: None)
    if refused:
        raise RuntimeError(refused)
    quick_us: dict[str, float] = {}
    loaded: dict[str, Any] = {}
    for values in [*pair, *others]:
        name = json.dumps(values, sort_keys=True)
        if name in loaded:
            continue
        try:
            loaded[name] = bench.load(config_of(values))
            quick_us[name] = replayed_us(loaded[name].timed[:24])
        except Exception as e:  # noqa: BLE001 - a config that does not run is a result
            print(f"M={p.m} {name}: {str(e)[:100]}", file=sys.stderr)
    names = [json.dumps(values, sort_keys=True) for values in pair]
    fastest = sorted(quick_us, key=lambda name: quick_us[name])[:FINALISTS]
    finalists: dict[str, Finalist] = {}
    for name in dict.fromkeys([*names, *fastest]):
        if name in quick_us and bench.check(loaded[name]) <= 0.05:
            timer = bench.timer(loaded[name])
            finalists[name] = Finalist(timer, measure(timer, QUICK, 0.1))
    ranking = rerank(list(finalists.values()), random.Random(7), 0.4, sustained=p.is_sustained)
    us = dict(zip(finalists, ranking.us, strict=True))
    winner = min(us, key=lambda name: us[name])
    return [us.get(name, -1.0) for name in names], us[winner], json.loads(winner)


def every_m(t: Tuning, key: Key, ms: Sequence[int], configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A layer: seconds of its tuning, its ranges, and a row for each M."""
    for m in (16, 17):  # the kernels of M that 16 divides, and of others
        compiled(t, t.problem(key, m), configs)
    made = t.tuned(key, list(USUAL_KEYS))
    documents = made["documents"]
    own = [d["values"] for d in documents if d["values"]]
    rows = []
    start = time.monotonic()
    for m in ms:
        p = t.problem(key, m)
        old = t.engine.config(p.layer, m)
        new = new_at(documents, m, old)
        (old_us, new_us), best_us, best = t.judge(best_beside, p, [old, new], [*own, *configs])
        rows.append({"m": m, "old": old_us, "new": new_us, "best": best_us, "best_config": best, "new_config": new})
    points = {record.m for record in made["records"]}
    return {
        "seconds": made["seconds"], "spent": made["spent"], "points": len(points), "judge_s": time.monotonic() - start,
        "ranges": documents, "rows": rows, "failed": made["failed"],
    }  # fmt: skip


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Ratios of new to the best, and of old to new."""
    ratios = sorted(row["new"] / row["best"] for row in rows)
    old = sorted(row["old"] / row["best"] for row in rows if row["old"] > 0)
    return {
        "m": len(rows), "slower": sum(is_slower(row["old"], row["new"]) for row in rows if row["old"] > 0),
        "new_over_best": math.exp(sum(map(math.log, ratios)) / len(ratios)),
        "above_3": sum(ratio > 1.03 for ratio in ratios) / len(ratios),
        "p99": ratios[math.ceil(0.99 * len(ratios)) - 1], "worst": ratios[-1],
        "old_over_best": math.exp(sum(map(math.log, old)) / max(1, len(old))),
    }  # fmt: skip


def main() -> int:
    """Returns the exit code."""
    options = argparse.ArgumentParser(prog="benchmarks.every_m", description=__doc__)
    options.add_argument("--root", type=Path, required=True, help="vLLM's package, or a folder that holds it")
    options.add_argument("--layers", required=True, help="N,K with semicolons: 1536,7168;2304,4096")
    options.add_argument("--every", type=int, default=1, help="every N-th capture size")
    options.add_argument("--drawn", type=int, default=20, help="drawn M that no key knows")
    options.add_argument("--seconds", type=float, default=1e9, help="begin no layer after this time")
    options.add_argument("--out", type=Path, required=True)
    args = options.parse_args()
    begun = time.monotonic()
    drawn = sorted(random.Random(2).sample(sorted(set(range(1, 4096)) - {*CAPTURE_SIZES, *CHUNKS}), args.drawn))
    ms = sorted({*CAPTURE_SIZES[1 :: args.every], *CHUNKS, *drawn})  # M = 1 has kernels of its own
    kept: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "m": ms, "layers": {}}
    configs = grid()
    with tempfile.TemporaryDirectory(prefix="gemmfleet-bench-") as scratch:
        t = Tuning("vllm", args.root, Path(scratch), "a8w8_blockscale", {})
        kept["tuner"] = {**t.facts, "grid": len(configs)}
        for layer in args.layers.split(";"):
            if time.monotonic() - begun > args.seconds:
                continue
            n, k = (int(size) for size in layer.split(","))
            try:
                made = every_m(t, {"N": n, "K": k}, ms, configs)
                made["summary"] = summary(made["rows"])
            except Exception as e:  # noqa: BLE001 - one layer's failure keeps the others
                made = {"error": f"{type(e).__name__}: {e}", "summary": {}}
            kept["layers"][layer] = made
            line = {name: made.get(name) for name in ("error", "seconds", "spent", "points", "judge_s")}
            print(layer, json.dumps({**line, **made["summary"]}), file=sys.stderr, flush=True)
            args.out.write_text(json.dumps(kept) + "\n")
        t.close()
    rows = [row for made in kept["layers"].values() for row in made.get("rows", ())]
    if rows:
        whole = summary(rows)
        print(json.dumps(whole), file=sys.stderr)
        how = f"{whole['m']} M, {whole['slower']} slower than before, {whole['above_3']:.1%} more than 3 % above"
        show([Figure("new file over the best, geometric mean", whole["new_over_best"], 1.01, "x", how)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
