"""Peers of the tuner `triton`: torch's library GEMM, and triton.autotune. Each in a process of its own."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.triton_tuning import NAMED
from worker.families.triton_config import KernelConfig, from_name
from worker.tuners.common.measure import Timer, rerank
from worker.tuners.common.problem import Problem, parse
from worker.tuners.search.target import Target, of_device
from worker.tuners.triton import launch, model, space
from worker.tuners.triton.device_bench import DeviceBench, GraphTimer
from worker.tuners.triton.operands import Operands, make, out_like

WARMUP_MS, REPEAT_MS = 2, 8
"""Time for which autotune measures a candidate; the tuner takes about as long: up to 31 samples of 0.3 ms."""


def torch_gemm(request: Path, answer: Path) -> None:
    """Ours and torch's microseconds by shape, interleaved, both through graphs over the same rotated operands."""
    chip = DeviceBench(interpreted=False)
    times = {}
    for name, (family, (m, n, k), winner) in json.loads(request.read_text()).items():
        problem = parse("triton", family, {"M": m, "N": n, "K": k, **NAMED[family]}, chip.target.fp8)
        if why := chip.prepare(problem, 0, 256 << 20, lambda: None):
            raise RuntimeError(f"{name}: {why}")
        loaded = chip.load(from_name(winner))
        err = chip.check(loaded)
        timers: list[Timer] = [chip.timer(loaded)]
        names = ["ours"]
        for peer, call in peers(problem).items():
            out = out_like(problem, torch.device("cuda"))
            calls = [bound(call, o, out) for o in chip.copies]
            try:
                calls[0]()
                timers.append(GraphTimer(calls))
                names.append(peer)
            except RuntimeError as e:
                print(f"{name}: {peer}: {e}", flush=True)
        sizes = [t.size for t in timers if isinstance(t, GraphTimer)]
        v = rerank(timers, sizes, [(i,) for i in range(len(timers))], random.Random(name), 1.5)
        best = min(range(1, len(timers)), key=lambda i: v.us[i])
        times[name] = {
            "ours_us": v.us[0], "torch_us": v.us[best], "torch": names[best], "candidate": winner, "errRatio": err,
            "spread": [v.spread[0], v.spread[best]], "rounds": v.rounds,
        }  # fmt: skip
        answer.write_text(json.dumps(times))


def bound(call: Callable[[Operands, torch.Tensor], None], o: Operands, out: torch.Tensor) -> Callable[[], None]:
    return lambda: call(o, out)


def _mm(o: Operands, out: torch.Tensor) -> None:
    torch.mm(o.x, o.w.t(), out=out)


def peers(p: Problem) -> dict[str, Callable[[Operands, torch.Tensor], None]]:
    """torch's ways to compute a problem."""
    if p.scale == "none":
        return {"torch.mm": _mm}

    def scaled(fast: bool) -> Callable[[Operands, torch.Tensor], None]:
        def call(o: Operands, out: torch.Tensor) -> None:
            assert o.x_scale is not None
            assert o.w_scale is not None
            x_scale, w_scale = o.x_scale.view(-1, 1), o.w_scale.view(1, -1)
            torch._scaled_mm(
                o.x, o.w.t(), scale_a=x_scale, scale_b=w_scale, out_dtype=out.dtype, use_fast_accum=fast, out=out
            )

        return call

    return {"torch._scaled_mm": scaled(False), "torch._scaled_mm fast": scaled(True)}


def autotune(request: Path, answer: Path) -> None:
    """Seconds that triton.autotune takes for each shape, in one process, from the cold cache it was started with."""
    family, shapes, most = json.loads(request.read_text())
    target = of_device()
    times: dict[str, Any] = {"seconds": [], "best": [], "configs": []}
    for m, n, k in shapes:
        problem = parse("triton", family, {"M": m, "N": n, "K": k, **NAMED[family]}, target.fp8)
        operands = make(problem, torch.device("cuda"), 0)
        out = out_like(problem, torch.device("cuda"))
        listed = model.order(problem, target, space.candidates(problem, target))[:most]
        kinds: dict[tuple[str, bool, frozenset[str]], list[tuple[KernelConfig, launch.LaunchPlan]]] = {}
        for c in listed:
            made = launch.plan(problem, c, target)
            kinds.setdefault((made.kernel, c.side > 0, frozenset(made.blocks)), []).append((c, made))
        torch.cuda.synchronize()
        start = time.perf_counter()
        best = min(_autotuned(some, operands, out, target) for some in kinds.values())
        torch.cuda.synchronize()
        times["seconds"].append(time.perf_counter() - start)
        times["best"].append(best)
        times["configs"].append(len(listed))
        answer.write_text(json.dumps(times))


def _autotuned(
    listed: list[tuple[KernelConfig, launch.LaunchPlan]], o: Operands, out: torch.Tensor, target: Target
) -> tuple[float, str]:
    """triton.autotune over candidates of one kernel: (us of the best, its config)."""
    p, first = o.problem, listed[0][1]
    given: dict[str, Any] = {"x": o.x, "w": o.w, "out": out, "bias": o.bias, "xs": o.x_scale, "ws": o.w_scale}
    if first.kernel == "tiled":
        sides = {"w_side": o.w, "out_side": out}
        given |= sides if listed[0][0].side else dict.fromkeys(sides)
    given |= {name: value for name, value in first.scalars.items() if name not in ("group_m", "splits")}
    if "splits" in first.scalars:
        size = max(made.workspace_bytes for _, made in listed) + 4 * launch.COUNTERS + 4
        workspace = torch.zeros(size // 4 * 4, dtype=torch.uint8, device=out.device)
        given["count"] = workspace[: 4 * launch.COUNTERS].view(torch.int32)
        given["partial"] = workspace[4 * launch.COUNTERS :].view(torch.float32)
    if first.blocks:
        given |= {name: TensorDescriptor.from_tensor(given[name], list(block)) for name, block in first.blocks.items()}

    def grid(meta: dict[str, Any]) -> tuple[int, int, int]:
        tiles = -(-p.m // meta["BM"]) * -(-p.n // (meta["BN"] + meta.get("SIDE", 0)))
        return (tiles, meta["splits"], p.b) if "splits" in meta else (min(tiles * p.b, target.sms), 1, 1)

    decorate = triton.autotune([_config(c, made) for c, made in listed], key=["M", "N", "K"], do_bench=_timed)
    tuner = decorate(launch.kernel_of(first.kernel))
    tuner[grid](**given)
    if len(listed) == 1:  # autotune does not time the only config
        times = {str(tuner.configs[0]): _first(_timed(lambda: tuner[grid](**given), None))}
    else:
        times = {str(config): _first(t) for config, t in tuner.configs_timings.items()}
    name = min(times, key=lambda n: times[n])
    return times[name] * 1e3, name


def _timed(call: Callable[[], None], quantiles: Any) -> Any:
    return triton.testing.do_bench(call, warmup=WARMUP_MS, rep=REPEAT_MS, quantiles=quantiles)


def _first(times: Any) -> float:
    return float(times[0] if isinstance(times, (list, tuple)) else times)


def _config(c: KernelConfig, made: launch.LaunchPlan) -> Any:
    """A triton.Config of a candidate: its switches and its run-time numbers."""
    pointers = ("bias", "xs", "ws", "partial", "count", "w_side", "out_side")
    values = {name: v for name, v in made.constexprs.items() if name not in pointers}
    values |= {name: v for name, v in made.scalars.items() if name in ("group_m", "splits")}

    def describe(arguments: dict[str, Any], **_: Any) -> None:
        for name, block in made.blocks.items():
            arguments[name].block_shape = list(block)

    return triton.Config(
        values, num_warps=c.num_warps, num_stages=c.num_stages, pre_hook=describe if made.blocks else None
    )
