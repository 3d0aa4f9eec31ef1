"""python -m benchmarks.vllm_configs --root ENGINE [options]: an engine's shipped config files tuned again on one GPU.

Each file of this device is tuned as `tune --tuner vllm` (or sglang) does, with the 18 usual keys as the workload, and
then what was written is judged by measurements that the tuner had no part in: other operands, at each key and between
the keys, the old config and the new one interleaved. An M is slower by the product's rule (new > 1.005 old + 0.5 us).

--family fmoe judges fused MoE layers at four routings, and says what the choice by uniform routing alone would lose.
--again JSON tunes the files of an earlier result a second time and measures both results beside each other.
--exhaustive M,M runs vLLM's own timing loop over its whole space there, and compares the search's choice with its best.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.figure import Figure, show
from worker.protocol import Spec, SpecShape
from worker.triton_configs.cutting import cut_ranges, unite_points
from worker.triton_configs.m_ranges import USUAL_KEYS
from worker.triton_configs.pair import needs_down_file
from worker.triton_configs.point_record import PointRecord, values_of
from worker.triton_configs.serving_engine import KernelLaunch
from worker.triton_configs.slowdown import is_slower
from worker.tuners.base import Emit, Place
from worker.tuners.common.measure import Finalist, SamplingPolicy, measure, rerank
from worker.tuners.engines.moe_problem import MoeProblem
from worker.tuners.engines.sglang_moe import SglangMoeSource
from worker.tuners.engines.source import EngineSource, LayerProblem, Operands
from worker.tuners.engines.tuner import EngineTuner, SglangTuner, VllmTuner
from worker.tuners.search.compile_pool import CompilePool
from worker.tuners.search.device_bench import DeviceBench
from worker.tuners.search.tile_config import TileConfig, Values

BETWEEN = (3, 6, 12, 20, 40, 80, 192, 384, 2560)
SPACE = {
    "BLOCK_SIZE_M": (16, 32, 64, 128, 256), "BLOCK_SIZE_N": (32, 64, 128, 256), "BLOCK_SIZE_K": (64, 128),
    "GROUP_SIZE_M": (1, 16, 32, 64), "num_warps": (4, 8), "num_stages": (2, 3, 4, 5),
}  # fmt: skip
"""vLLM's own space of block-FP8 linear layers: 1,280 configs."""
LAYERS = {
    # Qwen3-30B-A3B at TP 1, 2 and 4; Mixtral-8x7B at TP 8; Qwen3-Next-80B-A3B at TP 4
    "E=128,N=768": (2048, 8), "E=128,N=384": (2048, 8), "E=128,N=192": (2048, 8), "E=8,N=1792": (4096, 2),
    "E=512,N=128": (2048, 10),
    # Qwen3-235B-A22B-FP8 at TP 4, DeepSeek-V3 at TP 8
    "E=128,N=384,fp8": (4096, 8), "E=256,N=256,fp8": (7168, 8),
    # Mixtral-8x7B-Instruct-FP8 at TP 8
    "E=8,N=1792,fp8 by tensor": (4096, 2),
}  # fmt: skip
"""Hidden size and top-k of a model that reads the file."""
SGLANG_LAYERS = {
    "E=32,N=1792": (2048, 4), "E=256,N=128": (2048, 8), "E=512,N=128": (2048, 10),
    # GLM-4.5-Air at TP 2; Qwen3-235B-A22B-FP8 at TP 4 and 2, Qwen3.5-397B-A17B-FP8 at TP 8
    "E=128,N=704": (4096, 8),
    "E=128,N=384,fp8": (4096, 8), "E=128,N=768,fp8": (4096, 8), "E=512,N=128,fp8": (4096, 10),
    "E=8,N=1792,fp8 by tensor": (4096, 2),
}  # fmt: skip
"""The same of SGLang's layers."""
TUNERS: dict[str, type[EngineTuner]] = {"vllm": VllmTuner, "sglang": SglangTuner}
RIVAL = 1.1
PREFILL_M = 256
"""The ratio from this M on is also reported for itself."""
Key = dict[str, int | str]


def linear_keys(names: Sequence[str]) -> Iterator[tuple[str, str, Key]]:
    """(name, family, key columns without M) of shipped files of block-FP8 linear layers."""
    for name in names:
        n, k = (int(x) for x in re.findall(r"\d+", name)[:2])
        yield f"N={n},K={k}", "a8w8_blockscale", {"N": n, "K": k}


def moe_keys(engine: str) -> Iterator[tuple[str, str, Key]]:
    """The same of fused MoE layers."""
    layers = SGLANG_LAYERS if engine == "sglang" else LAYERS
    for name, (hidden, topk) in layers.items():
        experts, width = (int(x) for x in re.findall(r"\d+", name)[:2])
        dtype = "torch.float8_e4m3fn" if "fp8" in name else "torch.bfloat16"
        scales = "per_Tensor" if name.endswith("tensor") else "per_1x128" if "fp8" in name else "No"
        yield name, "fmoe", {
            "model_dim": hidden, "inter_dim": width, "expert": experts, "topk": topk, "act_type": "ActivationType.Silu",
            "dtype": "torch.bfloat16", "q_dtype_a": dtype, "q_dtype_w": dtype,
            "q_type": f"QuantType.{scales}", "use_g1u1": 1, "doweight_stage1": 0,
        }  # fmt: skip


class Tuning:
    """One tuner of a family, and what it decided."""

    def __init__(self, engine: str, root: Path, folder: Path, family: str, options: Mapping[str, Any]) -> None:
        os.environ["GEMMFLEET_CACHE"] = str(folder / "cache")
        self.family, self.tuner = family, TUNERS[engine]()
        self.tuner.configure({"family": family, "root": str(root), **options}, Place(folder))
        self.facts = self.tuner.open()
        source = self.tuner._source
        assert isinstance(source, EngineSource)
        self.source = source
        self.engine = source.engine()
        os.environ["TRITON_CACHE_DIR"] = str(self.tuner._store.compiled)
        # kernels cannot run in this process from the first search on: it compiles for a target
        self._judge = ProcessPoolExecutor(1, get_context("spawn"), open_bench, (source,))
        assert self.tuner._measurer.device is not None
        self.target = self.tuner._measurer.device.target
        self.m = "token" if family == "fmoe" else "M"

    def tuned(self, key: Key, ms: Sequence[int], **options: Any) -> dict[str, Any]:
        """The ranges as documents (first, last, values; None: as today), the records of all M, and seconds."""
        messages: list[dict[str, Any]] = []
        shapes = tuple(SpecShape(i, {self.m: m, **key}) for i, m in enumerate(ms, 1))
        spec = Spec("bench-1", "bench", 1, family=self.family, tuner=self.tuner.engine, options=options, shapes=shapes)
        start = time.monotonic()

        def take(message: dict[str, Any]) -> None:
            messages.append(message)
            if message["type"] == "point_timed":
                point = message["point"]
                print(f"{time.monotonic() - start:.0f} s: M={point['m']} {point['label']}", file=sys.stderr)

        spent = self.tuner.tune(spec, Emit(take))
        seconds = time.monotonic() - start
        records = [PointRecord.from_document(m["point"]) for m in messages if m["type"] == "point_timed"]
        values = values_of(records)
        documents = [
            {"first": r.first, "last": r.last, "values": values.get(r.config)}
            for r in cut_ranges(unite_points(record.point for record in records))
        ]
        failed = [m for m in messages if m["type"] == "shape_failed"]
        timed = sum(m["type"] == "row" and m["row"]["us"] > 0 for m in messages)
        return {
            "seconds": seconds, "spent": spent, "timed": timed, "failed": [str(f)[:300] for f in failed],
            "documents": documents, "records": records,
        }  # fmt: skip

    def problem(self, key: Key, m: int, label: str = "") -> LayerProblem:
        """The problem at an M."""
        return replace(self.source.problem(self.family, {self.m: m, **key}, self.target.gfx), label=label)

    def judge(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the process that measures beside the tuner."""
        return self._judge.submit(function, *args).result()

    def close(self) -> None:
        """End all processes."""
        self._judge.shutdown()
        self.tuner.close()


_bench: DeviceBench


def open_bench(source: EngineSource) -> None:
    """The judge's process begins."""
    global _bench
    _bench = DeviceBench(source, interpreted=False)


def beside(
    p: LayerProblem, configs: Sequence[Mapping[str, Any]], cap_s: float = 0.6, seed: int = 7
) -> list[tuple[float, float]]:
    """(us, errRatio) of configs, interleaved; -1 for one that does not run."""
    refused = _bench.prepare(p, seed, 512 << 20, lambda: None)
    if refused:
        raise RuntimeError(refused)
    out = [(-1.0, 1.0)] * len(configs)
    there = []
    for i, values in enumerate(configs):
        try:
            loaded = _bench.load(config_of(values))
            there.append((i, _bench.timer(loaded), _bench.check(loaded)))
        except Exception as e:  # noqa: BLE001 - a config that does not run is a result
            print(f"{p.layer} M={p.m}: {dict(values)}: {e}", file=sys.stderr)
    policy = SamplingPolicy(min_sample_s=3e-3, min_samples=5, max_samples=11)
    finalists = [Finalist(timer, measure(timer, policy, 0.15)) for _, timer, _ in there]
    ranking = rerank(finalists, random.Random(seed), cap_s, sustained=p.is_sustained)
    for (i, _, err), us in zip(there, ranking.us, strict=True):
        out[i] = (us, err)
    return out


def with_a_kernel_between(p: LayerProblem, configs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Microseconds of configs as of `beside`, with a small kernel between the two products, as a server has one: the
    second product cannot begin while the first one ends."""
    source = _bench._source
    assert isinstance(source, EngineSource)
    _bench._source = KernelBetween(source.root, source.device)
    try:
        return [us for us, _ in beside(p, configs, 1.5)]
    finally:
        _bench._source = source


@triton.jit
def _small_kernel(flag):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - Triton compiles annotations too
    tl.store(flag, 1)


class KernelBetween(SglangMoeSource):
    """SGLang's fused experts with a small kernel between the products."""

    def launches(
        self, problem: MoeProblem, values: Values, operands: Operands, out: torch.Tensor
    ) -> list[KernelLaunch]:
        first, second = SglangMoeSource.launches(self, problem, values, operands, out)
        flag = torch.zeros(1, dtype=torch.int32, device=out.device)
        return [first, KernelLaunch(_small_kernel, (1,), (flag,), {}), second]


def config_of(values: Mapping[str, Any]) -> TileConfig:
    """A candidate of a file's values."""
    return TileConfig(tuple(values.items()))


def new_at(documents: Sequence[Mapping[str, Any]], m: int, old: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what the new file gives an M."""
    return next((d["values"] or old for d in documents if d["first"] <= m <= d["last"]), old)


def judged(t: Tuning, key: Key, documents: Sequence[Mapping[str, Any]], ms: Sequence[int]) -> list[dict[str, Any]]:
    """Old and new at each M and label; those that are the same config are not measured. The slow ones are measured
    again, twice as long."""
    out = []
    for m, label in itertools.product(ms, t.source.labels):
        p = t.problem(key, m, label)
        old = t.engine.config(p.layer, m)
        new = new_at(documents, m, old)
        row: dict[str, Any] = {"m": m, "label": label, "changed": dict(new) != dict(old)}
        if row["changed"]:
            (row["old_us"], row["old_err"]), (row["new_us"], row["new_err"]) = t.judge(beside, p, [old, new])
            if row["old_us"] > 0 and is_slower(row["old_us"], row["new_us"]):
                row["first"] = [row["old_us"], row["new_us"]]
                (row["old_us"], _), (row["new_us"], _) = t.judge(beside, p, [old, new], 2.5, 8)
        print(json.dumps(row), file=sys.stderr)
        out.append(row)
    return out


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts and the geometric mean of old over new."""
    ratios = [r["old_us"] / r["new_us"] if r["changed"] and r["old_us"] > 0 else 1.0 for r in rows]
    bad = [r for r in rows if r["changed"] and r["old_us"] > 0 and is_slower(r["old_us"], r["new_us"])]
    large = [ratio for row, ratio in zip(rows, ratios, strict=True) if row["m"] >= PREFILL_M]
    wrong = [r["new_err"] for r in rows if r["changed"]]
    return {
        "geomean_from_256": math.exp(sum(map(math.log, large)) / max(1, len(large))),
        "worst_err": max(wrong, default=0.0), "entries": len(rows), "slower": len(bad),
        "faster_5": sum(r >= 1.05 for r in ratios) / len(rows),
        "geomean": math.exp(sum(map(math.log, ratios)) / len(ratios)), "worst": min(ratios), "best": max(ratios),
    }  # fmt: skip


def regrets(records: Sequence[PointRecord], documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Worst regret over the routings, with its M: of new entries, of those that stayed, and if the fastest at uniform
    routing were taken everywhere. Bounds for any choice among the file's configs: `least`, and `allowed` of those that
    are slower than today's at no routing."""
    by_m: dict[int, list[PointRecord]] = {}
    for record in records:
        by_m.setdefault(record.m, []).append(record)
    found: dict[str, list[tuple[float, int]]] = {"written": [], "kept": [], "uniform": [], "least": [], "allowed": []}
    for m, at_m in by_m.items():
        points = [record.point for record in at_m]
        common = set.intersection(*(set(point.us) for point in points))
        document = next((d for d in documents if d["first"] <= m <= d["last"]), None)
        values = document["values"] if document else None
        name = next((n for n, v in values_of(at_m).items() if v == values), "") if values else points[0].today
        if name not in common:
            continue
        regret = {c: max(p.us[c] / min(p.us.values()) for p in points) - 1 for c in common}
        found["written" if values else "kept"].append((regret[name], m))
        uniform = points[0].us
        found["uniform"].append((regret[min(common, key=lambda c: uniform[c])], m))
        harmless = [c for c in common if all(p.allows(c) for p in points)]
        found["least"].append((min(regret.values()), m))
        found["allowed"].append((min((regret[c] for c in harmless), default=regret[name]), m))
    return {name: max(some, default=None) for name, some in found.items()}


def pair_gain(records: Sequence[PointRecord]) -> float:
    """Geometric mean of the least time of one config for both products over that of a pair, over all measured M and
    routings; 1 where there are no pairs."""
    logs: list[float] = []
    for record in records:
        right = [time for time in record.times if time.us > 0]
        pairs = [time.us for time in right if needs_down_file(time.values)]
        single = [time.us for time in right if not needs_down_file(time.values)]
        if pairs and single:
            logs.append(math.log(min(single) / min(pairs)))
    return math.exp(sum(logs) / max(1, len(logs)))


def between(t: Tuning, key: Key, records: Sequence[PointRecord], ms: Sequence[int]) -> list[dict[str, Any]]:
    """The fastest config of each M of a workload at the first routing beside those that took at most RIVAL times as
    long, with a small kernel between the products: its time over the least."""
    rows = []
    for record in records:
        right = sorted((time for time in record.times if time.us > 0), key=lambda time: time.us)
        if record.m not in ms or record.label != t.source.labels[0] or not right:
            continue
        near = [time.values for time in right if time.us <= RIVAL * right[0].us]
        us = t.judge(with_a_kernel_between, t.problem(key, record.m, record.label), near)
        least_us = min((time for time in us if time > 0), default=math.nan)
        rows.append({"m": record.m, "us": us, "over_least": us[0] / least_us})
        print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def space() -> Iterator[dict[str, int]]:
    """vLLM's own space."""
    for chosen in itertools.product(*SPACE.values()):
        yield dict(zip(SPACE, chosen, strict=True))


def exhaustive(t: Tuning, key: Key, ms: Sequence[int]) -> dict[str, Any]:
    """Each M: the search's choice beside the 24 best of vLLM's whole space by its own loop, and the loop's seconds."""
    found = t.tuned(key, ms)
    out: dict[str, Any] = {"search_s": found["seconds"], "at": []}
    configs = list(space())
    for m in ms:
        p = t.problem(key, m)
        start = time.monotonic()
        busy = compiled(t, p, configs)
        wall = time.monotonic() - start
        loop_s, times = t.judge(own_loop, p, configs)
        order = sorted(times, key=lambda i: times[i])[:24]
        old = t.engine.config(p.layer, m)
        new = new_at(found["documents"], m, old)
        beside_all = t.judge(beside, p, [new, *(configs[i] for i in order)], 4.0)
        best_us, at = min((us, i) for (us, err), i in zip(beside_all[1:], order, strict=True) if us > 0 and err <= 0.05)
        out["at"].append({
            "m": m, "space": len(configs), "ran": len(times), "ours": beside_all[0][0], "best": best_us,
            "best_config": configs[at], "our_config": dict(new), "compile_cpu_s": busy, "compile_wall_s": wall,
            "loop_s": loop_s,
        })  # fmt: skip
    return out


def compiled(t: Tuning, p: LayerProblem, configs: Sequence[Mapping[str, Any]]) -> float:
    """Compile all in the tuner's pool; the sum of the seconds that compilers were busy."""
    pool: CompilePool = t.tuner._pool
    jobs = {repr(job): job for job in (t.source.job(p, config_of(c)) for c in configs)}
    begun, busy, left = time.monotonic(), 0.0, len(jobs)
    pool.request(list(jobs.items()))
    while left:
        done = len(pool.collect())
        left -= done
        now = time.monotonic()
        busy += (now - begun) * len(pool.connections)
        begun = now
        time.sleep(0.02)
    return busy


def own_loop(p: LayerProblem, configs: Sequence[Mapping[str, Any]]) -> tuple[float, dict[int, float]]:
    """(seconds, mean us by a config's place) of the loop of vLLM's benchmark_w8a8_block_fp8.py: 5 + 10 launches each,
    one synchronisation a launch, timed by events. Kernels are compiled already."""
    _bench.prepare(p, 7, 0, lambda: None)
    start, found = time.monotonic(), dict[int, float]()
    for i, values in enumerate(configs):
        try:
            call = _bench.load(config_of(values)).checked
            for _ in range(5):
                call()
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            spent = 0.0
            for _ in range(10):
                torch.cuda.synchronize()
                begin.record()
                call()
                end.record()
                end.synchronize()
                spent += begin.elapsed_time(end)
            found[i] = 100 * spent
        except Exception:  # noqa: BLE001 - it skips those as well
            continue
    return time.monotonic() - start, found


def again(t: Tuning, key: Key, first: Sequence[Mapping[str, Any]], ms: Sequence[int]) -> dict[str, Any]:
    """A second tuning, and both results beside each other at each M."""
    second = t.tuned(key, ms)
    rows = []
    for m, label in itertools.product(ms, t.source.labels):
        p = t.problem(key, m, label)
        old = t.engine.config(p.layer, m)
        one, two = new_at(first, m, old), new_at(second["documents"], m, old)
        row: dict[str, Any] = {"m": m, "label": label, "changed": dict(one) != dict(two)}
        if row["changed"]:
            (row["old_us"], _), (row["new_us"], _) = t.judge(beside, p, [one, two], 1.5)
            a, b = row["old_us"], row["new_us"]
            row["apart"] = not (abs(a - b) <= 0.2 or abs(a - b) <= 0.01 * min(a, b))
        out = row
        rows.append(out)
    same = sum(not r.get("apart", False) for r in rows) / len(rows)
    return {"seconds": second["seconds"], "documents": second["documents"], "rows": rows, "within": same}


def main() -> int:
    """Returns the exit code."""
    options = argparse.ArgumentParser(prog="benchmarks.vllm_configs", description=__doc__)
    options.add_argument("--engine", default="vllm", choices=tuple(TUNERS))
    options.add_argument("--root", type=Path, required=True, help="the engine's package, or a folder that holds it")
    options.add_argument("--family", default="a8w8_blockscale", choices=("a8w8_blockscale", "fmoe"))
    options.add_argument("--part", default="0/1", help="I/N: every N-th layer from the I-th on")
    options.add_argument("--only", default="", help="names of layers, with semicolons")
    options.add_argument("--seconds", type=float, default=1e9, help="begin no layer after this time")
    options.add_argument("--again", type=Path, default=None, help="an earlier result")
    options.add_argument("--exhaustive", default="", help="M, with commas: vLLM's own loop over its whole space there")
    options.add_argument("--m", default="", help="M of the workload; default: the usual keys")
    options.add_argument("--judge-m", default="", help="M of the judge; default: the workload's, linear: and between")
    options.add_argument("-O", action="append", default=[], metavar="NAME=JSON")
    options.add_argument("--out", type=Path, required=True)
    args = options.parse_args()
    begun = time.monotonic()
    given = {k: json.loads(v) for k, _, v in (word.partition("=") for word in args.O)}
    ms = [int(m) for m in args.m.split(",")] if args.m else list(USUAL_KEYS)
    kept: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "options": given, "layers": {}}
    with tempfile.TemporaryDirectory(prefix="gemmfleet-bench-") as scratch:
        t = Tuning(args.engine, args.root, Path(scratch), args.family, given)
        kept["tuner"] = t.facts
        if args.family == "fmoe":
            layers = list(moe_keys(args.engine))
        else:
            own = t.engine.file_name(t.problem({"N": 128, "K": 128}, 16).layer).partition(",device_name")[2]
            folder = t.engine.folders(t.problem({"N": 128, "K": 128}, 16).layer)[-1]
            layers = list(linear_keys(sorted(p.name for p in folder.glob("N=*") if p.name.endswith(own))))
        i, n = map(int, args.part.split("/"))
        only = args.only.split(";") if args.only else [name for name, _, _ in layers]
        chosen = sorted((x for x in layers if x[0] in only), key=lambda x: only.index(x[0]))[i::n]
        earlier = json.loads(args.again.read_text())["layers"] if args.again else {}
        for name, _, key in chosen:
            if time.monotonic() - begun > args.seconds or (args.again and name not in earlier):
                continue
            try:
                if args.exhaustive:
                    made: dict[str, Any] = exhaustive(t, key, [int(m) for m in args.exhaustive.split(",")])
                    kept["layers"][name] = made
                    print(name, json.dumps(made), file=sys.stderr, flush=True)
                    args.out.write_text(json.dumps(kept) + "\n")
                    continue
                if args.again:
                    made = again(t, key, earlier[name]["documents"], ms)
                    line = {"within": made["within"], "seconds": made["seconds"]}
                else:
                    made = t.tuned(key, ms)
                    wanted = ms if t.family == "fmoe" else sorted({*ms, *BETWEEN})
                    if args.judge_m:
                        wanted = [int(m) for m in args.judge_m.split(",")]
                    made["judged"] = judged(t, key, made["documents"], wanted)
                    line = {**summary(made["judged"]), "seconds": made["seconds"], "timed": made["timed"]}
                    if t.family == "fmoe":
                        made["regrets"] = regrets(made["records"], made["documents"])
                        line |= made["regrets"] | {"pair_gain": pair_gain(made["records"])}
                        if args.engine == "sglang":
                            made["between"] = between(t, key, made["records"], ms)
                    made["summary"] = line
                    del made["records"]
            except Exception as e:  # noqa: BLE001 - one layer's failure keeps the others
                made, line = {"error": f"{type(e).__name__}: {e}"}, {"error": str(e)}
            kept["layers"][name] = made
            print(name, json.dumps(line), file=sys.stderr, flush=True)
            args.out.write_text(json.dumps(kept) + "\n")
        t.close()
    rows = [r for made in kept["layers"].values() for r in made.get("judged", ())]
    if rows:
        whole = summary(rows)
        print(json.dumps(whole), file=sys.stderr)
        how = f"{whole['entries']} entries, {whole['slower']} slower, {whole['faster_5']:.0%} at least 5 % faster"
        show([Figure("new over shipped, geometric mean", 1 / whole["geomean"], 1.0, "x", how)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
