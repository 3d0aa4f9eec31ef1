"""python -m benchmarks.decode_step --root ENGINE --results JSON...: a step of a server beside the sum of its kernels.

A decode step of DeepSeek-V3 at TP 8 has 305 block-FP8 products: five in each of 61 layers. They are captured as one
CUDA graph, each with weights of its own as a server has them, with the files of today and with those that
`benchmarks.every_m` tuned. Beside them each kind of product is timed for itself, as the tuner times it, and added up.
Between two products nothing runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import vllm_configs
from benchmarks.figure import Figure, show
from benchmarks.vllm_configs import Tuning, config_of, new_at
from worker.tuners.common.device import device_seconds
from worker.tuners.engines.source import LayerProblem
from worker.tuners.search.device_bench import GraphTimer, capture

ATTENTION = ("2112,7168", "3072,1536", "7168,2048")
DENSE = (*ATTENTION, "4608,7168", "7168,2304")
SHARED_EXPERT = (*ATTENTION, "512,7168", "7168,256")
STEP = (*DENSE * 3, *SHARED_EXPERT * 58)
"""(N, K) of the step's products, in their order."""
NOT_TUNED: dict[str, Any] = {"ranges": []}
ROUNDS = 15


def step_us(
    problems: Mapping[str, LayerProblem], configs: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> dict[str, dict[str, float]]:
    """Microseconds of the step and of the sum of its products, by the name of the configs: {name: {(N, K): values}}."""
    bench = vllm_configs._bench
    source = bench._source
    operands, outputs = {}, {}
    for size, problem in problems.items():
        first = source.inputs(problem, torch.device("cuda"), 7, 0)
        copies = [first, *(first.copy() for _ in range(STEP.count(size) - 1))]
        operands[size] = [source.operands(inputs) for inputs in copies]
        outputs[size] = first.output()
    steps: dict[str, torch.cuda.CUDAGraph] = {}
    timers: dict[str, dict[str, GraphTimer]] = {}
    for name, values in configs.items():
        calls = {
            size: source.launch(problem, config_of(values[size]), operands[size], outputs[size])
            for size, problem in problems.items()
        }
        for of_size in calls.values():
            of_size[0]()  # compiles and loads it
        timers[name] = {size: GraphTimer(of_size) for size, of_size in calls.items()}
        turns = {size: itertools.count() for size in calls}
        steps[name] = capture([calls[size][next(turns[size])] for size in STEP])
        steps[name].replay()
    order = list(configs)
    whole: dict[str, list[float]] = {name: [] for name in order}
    added: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(ROUNDS):
        random.shuffle(order)
        for name in order:
            whole[name].append(device_seconds(steps[name].replay, 1e-3) * 1e6)
            seconds = sum(timer(STEP.count(size)) for size, timer in timers[name].items())
            added[name].append(seconds * 1e6)
    return {name: {"step": statistics.median(whole[name]), "sum": statistics.median(added[name])} for name in configs}


def main() -> int:
    """Returns the exit code."""
    options = argparse.ArgumentParser(prog="benchmarks.decode_step", description=__doc__)
    options.add_argument("--root", type=Path, required=True, help="vLLM's package, or a folder that holds it")
    options.add_argument("--results", type=Path, nargs="+", required=True, help="of benchmarks.every_m")
    options.add_argument("--m", default="1,16,64,128,256", help="M, with commas")
    options.add_argument("--out", type=Path, required=True)
    args = options.parse_args()
    layers: dict[str, Any] = {}
    for path in args.results:
        layers |= json.loads(path.read_text())["layers"]
    kept: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "products": len(STEP), "steps": []}
    ratios = []
    with tempfile.TemporaryDirectory(prefix="gemmfleet-bench-") as scratch:
        t = Tuning("vllm", args.root, Path(scratch), "a8w8_blockscale", {})
        kept["tuner"] = t.facts
        for m in (int(m) for m in args.m.split(",")):
            problems = {size: t.problem(key_of(size), m) for size in dict.fromkeys(STEP)}
            today = {size: t.engine.config(p.layer, m) for size, p in problems.items()}
            tuned = {size: new_at(layers.get(size, NOT_TUNED)["ranges"], m, today[size]) for size in problems}
            us = t.judge(step_us, problems, {"today": today, "tuned": tuned})
            measured, added = (us["today"][way] / us["tuned"][way] for way in ("step", "sum"))
            made = {"m": m, "us": us, "by_step": measured, "by_sum": added}
            kept["steps"].append(made)
            ratios.append(measured / added)
            print(json.dumps(made), file=sys.stderr, flush=True)
            args.out.write_text(json.dumps(kept) + "\n")
        t.close()
    farthest = max(ratios, key=lambda ratio: abs(ratio - 1))
    how = f"gain of a step over that of the sum of its products, the farthest of {len(ratios)} M"
    show([Figure("a step's gain over that of its parts", farthest, 1.0, "x", how)])
    return 0


def key_of(size: str) -> dict[str, int | str]:
    """The key columns of a layer without M."""
    n, k = (int(number) for number in size.split(","))
    return {"N": n, "K": k}


if __name__ == "__main__":
    sys.exit(main())
