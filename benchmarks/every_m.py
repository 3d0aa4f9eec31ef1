"""python -m benchmarks.every_m --root ENGINE [options]: a tuned file at every M that a server runs, on one GPU.

Each layer is tuned as `tune --tuner vllm` does, with the 18 usual keys as the workload. Then another process measures,
with other operands, at M that no key knows as well (capture sizes, chunks of prefill, drawn ones): what is there today,
what the new file gives, and the best of a grid of more than a hundred configs with the file's own among them, which is
slower than today's at no routing; the fastest of the grid interleaved with both. An M is slower by the rule of the
product (new > 1.005 old + 0.5 us) at any routing. Times are sums over the routings; a linear layer has none.

--before JSON, a raw result of `benchmarks.vllm_configs`, measures the files of an earlier tuner beside these.
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
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import vllm_configs
from benchmarks.figure import Figure, show
from benchmarks.vllm_configs import Key, Tuning, beside, compiled, config_of, moe_keys, new_at
from worker.triton_configs.m_ranges import CAPTURE_SIZES, USUAL_KEYS
from worker.triton_configs.slowdown import is_slower
from worker.tuners.common.device import device_seconds
from worker.tuners.engines.source import LayerProblem
from worker.tuners.search.device_bench import capture

CHUNKS = (640, 768, 769, 1024, 1280, 1536, 2048, 3072, 4096)
GRIDS = {
    "a8w8_blockscale": {
        "BLOCK_SIZE_M": (16, 32, 64, 128), "BLOCK_SIZE_N": (16, 32, 64, 128, 256), "BLOCK_SIZE_K": (128,),
        "GROUP_SIZE_M": (1, 16), "num_warps": (2, 4, 8), "num_stages": (3, 4, 6),
    },
    "fmoe": {
        "BLOCK_SIZE_M": (16, 32, 64, 128), "BLOCK_SIZE_N": (32, 64, 128, 256), "BLOCK_SIZE_K": (64, 128),
        "GROUP_SIZE_M": (1, 32), "num_warps": (4, 8), "num_stages": (3, 4),
    },
}  # fmt: skip
CALLS = {"a8w8_blockscale": 24, "fmoe": 8}
"""Calls of a graph for a quick time."""
FINALISTS = 4
NEARLY = 1.02
"""A config whose quick time is longer than today's by this factor is taken for slower."""
RIGHT = 0.05
"""A config of a higher errRatio is wrong."""


def grid(family: str) -> Iterator[dict[str, int]]:
    """The configs that are measured at every M."""
    knobs = GRIDS[family]
    for chosen in itertools.product(*knobs.values()):
        config = dict(zip(knobs, chosen, strict=True))
        area = config["BLOCK_SIZE_M"] * config["BLOCK_SIZE_N"]
        warps = {2, 4} if area <= 1024 else {4} if area <= 8192 else {4, 8}
        if area <= 32768 and config["num_warps"] in warps and not (area >= 16384 and config["num_stages"] == 6):
            yield config


def quick_us(p: LayerProblem, configs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Microseconds of each config, by the faster of two replays of a graph; infinite for one that does not run."""
    bench = vllm_configs._bench
    refused = bench.prepare(p, 7, 512 << 20, lambda: None)
    if refused:
        raise RuntimeError(refused)
    us = [math.inf] * len(configs)
    for i, values in enumerate(configs):
        try:
            timed = bench.load(config_of(values)).timed
            calls = list(itertools.islice(itertools.cycle(timed), CALLS[p.family]))
            graph = capture(calls)
            graph.replay()
            us[i] = min(device_seconds(graph.replay, 1e-4) for _ in range(2)) / len(calls) * 1e6
        except Exception as e:  # noqa: BLE001 - a config that does not run is a result
            print(f"M={p.m} {dict(values)}: {str(e)[:100]}", file=sys.stderr)
    return us


def row(
    t: Tuning, key: Key, m: int, entries: Mapping[str, Mapping[str, Any]], configs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """An M: sums of microseconds over the routings, of today's config (`old`), the other entries (`new`, and `before`
    where an earlier tuner has one) and the best; -1: does not run."""
    problems = [t.problem(key, m, label) for label in t.source.labels]
    names = {entry: json.dumps(config) for entry, config in entries.items()}
    of_name = {json.dumps(config): config for config in (*entries.values(), *configs)}
    old_name = names["old"]
    quick = [dict(zip(of_name, t.judge(quick_us, p, list(of_name.values())), strict=True)) for p in problems]

    def may_be_allowed(name: str) -> bool:
        return all(math.isinf(us[old_name]) or us[name] <= NEARLY * us[old_name] for us in quick)

    fastest = sorted(filter(may_be_allowed, of_name), key=lambda name: sum(us[name] for us in quick))
    finalists = list(dict.fromkeys([*names.values(), *fastest[:FINALISTS]]))
    measured = [t.judge(beside, p, [of_name[name] for name in finalists], 0.4) for p in problems]
    times = [dict(zip(finalists, (us for us, _ in at), strict=True)) for at in measured]
    right = [name for i, name in enumerate(finalists) if all(at[i][0] > 0 and at[i][1] <= RIGHT for at in measured)]

    def slower_at(name: str) -> int:
        return sum(is_slower(us[old_name], us[name]) for us in times) if old_name in right else 0

    sums = {name: sum(us[name] for us in times) for name in right}
    best = min((name for name in right if not slower_at(name)), key=lambda name: sums[name])
    found: dict[str, Any] = {"m": m, "best": sums[best], "best_config": of_name[best]}
    for entry, name in names.items():
        found |= {entry: sums.get(name, -1.0), f"{entry}_config": of_name[name]}
    return found | {"slower": slower_at(names["new"]), "before_slower": slower_at(names.get("before", old_name))}


def every_m(
    t: Tuning,
    key: Key,
    workload: Sequence[int],
    ms: Sequence[int],
    configs: Sequence[Mapping[str, Any]],
    before: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """A layer: seconds of its tuning, its ranges, and a row for each M. `before`: the ranges of an earlier tuner."""
    # a linear layer's kernels are those of M that 16 divides and of others
    for m in ms if t.family == "fmoe" else (16, 17):
        compiled(t, t.problem(key, m), configs)
    made = t.tuned(key, workload)
    documents = made["documents"]
    own = [d["values"] for d in documents if d["values"]]
    rows = []
    start = time.monotonic()
    for m in ms:
        p = t.problem(key, m)
        old = t.engine.config(p.layer, m)
        entries = {"old": old, "new": new_at(documents, m, old)}
        if before:
            entries["before"] = new_at(before, m, old)
        rows.append(row(t, key, m, entries, [*own, *configs]))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    points = {record.m for record in made["records"]}
    return {
        "seconds": made["seconds"], "spent": made["spent"], "points": len(points), "judge_s": time.monotonic() - start,
        "ranges": documents, "rows": rows, "failed": made["failed"],
    }  # fmt: skip


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Ratios to the best, over the M where the new config ran; `not_run` counts the others."""
    ratios = sorted(row["new"] / row["best"] for row in rows if row["new"] > 0)
    old = sorted(row["old"] / row["best"] for row in rows if row["old"] > 0)
    before = sorted(row["before"] / row["best"] for row in rows if row.get("before", -1.0) > 0)
    found = {
        "m": len(ratios), "not_run": len(rows) - len(ratios), "slower": sum(row["slower"] > 0 for row in rows),
        "new_over_best": math.exp(sum(map(math.log, ratios)) / len(ratios)),
        "above_3": sum(ratio > 1.03 for ratio in ratios) / len(ratios),
        "p99": ratios[math.ceil(0.99 * len(ratios)) - 1], "worst": ratios[-1],
        "old_over_best": math.exp(sum(map(math.log, old)) / max(1, len(old))),
    }  # fmt: skip
    if before:
        found |= {
            "before_over_best": math.exp(sum(map(math.log, before)) / len(before)), "before_worst": before[-1],
            "before_above_3": sum(ratio > 1.03 for ratio in before) / len(before),
            "before_slower": sum(row["before_slower"] > 0 for row in rows),
        }  # fmt: skip
    return found


def ranges_of(raw: Mapping[str, Any], family: str, layer: str) -> list[dict[str, Any]]:
    """The ranges of a layer in a raw result of `benchmarks.vllm_configs`; none if it is not there."""
    if family == "fmoe":
        made = raw.get("moe", {}).get(layer, {})
    else:
        made = raw.get("linear", {}).get("N={},K={}".format(*layer.split(",")), {})
    return [{"first": first, "last": last, "values": values} for first, last, values in made.get("ranges", ())]


def keys_of(family: str, layers: str) -> dict[str, Key]:
    """The key columns of layers without M, by name."""
    if family == "fmoe":
        moe = {name: key for name, _, key in moe_keys("vllm")}
        return {name: moe[name] for name in layers.split(";")}
    keys: dict[str, Key] = {}
    for layer in layers.split(";"):
        n, k = (int(size) for size in layer.split(","))
        keys[layer] = {"N": n, "K": k}
    return keys


def main() -> int:
    """Returns the exit code."""
    options = argparse.ArgumentParser(prog="benchmarks.every_m", description=__doc__)
    options.add_argument("--root", type=Path, required=True, help="vLLM's package, or a folder that holds it")
    options.add_argument("--family", default="a8w8_blockscale", choices=tuple(GRIDS))
    options.add_argument("--layers", required=True, help="N,K with semicolons: 1536,7168;2304,4096; of fmoe: names")
    options.add_argument("--every", type=int, default=1, help="every N-th capture size")
    options.add_argument("--drawn", type=int, default=20, help="drawn M that no key knows")
    options.add_argument("--workload", default="", help="M of the workload, with commas; default: the usual keys")
    options.add_argument("--m", default="", help="M to measure instead, with commas")
    options.add_argument("--before", type=Path, help="a raw result of benchmarks.vllm_configs")
    options.add_argument("--seconds", type=float, default=1e9, help="begin no layer after this time")
    options.add_argument("--out", type=Path, required=True)
    args = options.parse_args()
    begun = time.monotonic()
    drawn = sorted(random.Random(2).sample(sorted(set(range(1, 4096)) - {*CAPTURE_SIZES, *CHUNKS}), args.drawn))
    ms = sorted({*CAPTURE_SIZES[1 :: args.every], *CHUNKS, *drawn})  # M = 1 has kernels of its own
    if args.m:
        ms = [int(m) for m in args.m.split(",")]
    workload = [int(m) for m in args.workload.split(",")] if args.workload else USUAL_KEYS
    raw = json.loads(args.before.read_text()) if args.before else {}
    kept: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "m": ms, "layers": {}}
    configs = list(grid(args.family))
    with tempfile.TemporaryDirectory(prefix="gemmfleet-bench-") as scratch:
        t = Tuning("vllm", args.root, Path(scratch), args.family, {})
        kept["tuner"] = {**t.facts, "grid": len(configs)}
        for layer, key in keys_of(args.family, args.layers).items():
            if time.monotonic() - begun > args.seconds:
                continue
            try:
                made = every_m(t, key, workload, ms, configs, ranges_of(raw, args.family, layer))
                made["summary"] = summary(made["rows"])
            except Exception as e:  # noqa: BLE001 - one layer's failure keeps the others
                traceback.print_exc()
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
        ran = f"{whole['m']} M, {whole['not_run']} where the new config did not run"
        how = f"{ran}, {whole['slower']} slower than before, {whole['above_3']:.1%} more than 3 % above"
        show([Figure("new file over the best, geometric mean", whole["new_over_best"], 1.01, "x", how)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
