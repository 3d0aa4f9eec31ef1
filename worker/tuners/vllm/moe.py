"""vLLM's fused mixture of experts: two products of a layer, one file for each (experts, N).

A layer of E experts computes, for each of a token's top-k experts,

    one = x @ w1[e]^T              w1 [E, 2N, K] (gate and up; N rows without a gate)
    two = (y @ w2[e]^T) * score    w2 [E, K, N]

vLLM reads one entry for both, so they are one call here. In a model y is the activation of `one`, quantised. That step
reads no config and is left out: y is drawn, and fixed.

The time depends on which experts the tokens get, so a routing is part of a problem: a token's experts are drawn without
repetition, the r-th in the order of popularity with a weight of r^-exponent. Each copy of the operands has a routing
and an order of popularity of its own. The copies share the weights, as far as these span what is to be rotated over.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from worker.families import ENGINE
from worker.triton_configs.engine import Engine, Launch, Layer
from worker.tuners.common.device import GPU_ROTATE
from worker.tuners.common.operands import draw_rows, float_of, generator, w_exponent, widen_rows
from worker.tuners.common.problem import SCALE_BLOCK, Problem, UnsupportedError, flag_of, fp8_of, size_of
from worker.tuners.search.model import accumulators, estimate_us, stage_bytes
from worker.tuners.search.source import Target
from worker.tuners.search.tiles import Space, TileConfig, Values, fits
from worker.tuners.vllm.source import LEAST_SUMS, EngineSource, LayerProblem, Operands, warps_factor

EXPONENTS = {"uniform": 0.0, "zipf0.5": 0.5, "zipf1": 1.0, "zipf1.5": 1.5}
"""Exponents of the experts' popularity, by the routing's label."""
SCALES = {"QuantType.No": "none", "QuantType.per_Tensor": "tensor", "QuantType.per_1x128": "block"}
"""Kinds of scales (Problem.scale) by the column q_type."""
FP8 = ("torch.float8_e4m3fn", "torch.float8_e4m3fnuz")
BLOCKS_M = (8, 16, 32, 64, 128, 256)
KNOBS: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {"num_warps": (2, 4, 8, 16), "num_stages": (2, 3, 4, 5)},
    "hip": {
        "num_warps": (1, 2, 4, 8), "num_stages": (2, 3), "waves_per_eu": (0, 1, 2, 4),
        "matrix_instr_nonkdim": (16, 32),
    },
}  # fmt: skip
WGMMA = (90, 100, 103)  # and tcgen05
SKEWED = 4  # a tile may have this many times the rows of the average expert
SMALL_BYTES = 1 << 31  # AMD's compiler takes smaller tensors for others


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeProblem(LayerProblem):
    """A layer at m tokens. `n`: inter_dim of a rank, `k`: model_dim; `gated`: w1 has 2N rows. `stored`: experts whose
    weights are there, which is all of them but for compiling."""

    gated: bool
    stored: int

    @property
    def slots(self) -> int:
        """The number of (token, expert) pairs: rows of either output."""
        return self.m * self.layer.topk

    @property
    def products(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(columns of the output, length of the sums) of both."""
        return (self.n * (1 + self.gated), self.k), (self.k, self.n)

    @property
    def expert_bytes(self) -> int:
        """Both weights of one expert."""
        return sum(n * k for n, k in self.products) * self.bits // 8

    @property
    def flops(self) -> int:
        return sum(2 * self.slots * n * k for n, k in self.products)

    @property
    def x_bytes(self) -> int:
        return (self.m * self.k + self.slots * self.n) * self.bits // 8

    @property
    def w_bytes(self) -> int:
        return round(hit(self) * self.expert_bytes)

    @property
    def out_bytes(self) -> int:
        return self.slots * sum(n for n, _ in self.products) * self.out_size


@cache
def hit(p: MoeProblem) -> float:
    """The number of experts that some token gets, as expected: of `route`'s race those that come in until a time at
    which a token has its topk."""
    weights, time = [math.pow(rank + 1, -EXPONENTS[p.label]) for rank in range(p.layer.e)], 0.0
    for _ in range(20):  # Newton's method, from below
        late = [math.exp(-w * time) for w in weights]
        time += (p.layer.topk - p.layer.e + sum(late)) / sum(w * x for w, x in zip(weights, late, strict=True))
    return sum(1 - math.exp(-w * time * p.m) for w in weights)


@cache
def batched(p: MoeProblem) -> tuple[Problem, ...]:
    """The products as batched GEMMs of the experts that are hit, each of as many rows, for the model of times."""
    experts = max(1, round(hit(p)))
    rows = -(-p.slots // experts)
    return tuple(Problem(p.family, experts, rows, n, k, p.dtype, p.outdtype, scale=p.scale) for n, k in p.products)


def route(p: MoeProblem, draw: torch.Generator) -> torch.Tensor:
    """[M, topk] int32 on the CPU: the experts of each token.

    The first topk of a race of exponential times, whose rates are the weights, are such a draw without repetition.
    """
    weights = torch.arange(1, p.layer.e + 1).double().pow(-EXPONENTS[p.label]).float()
    weights = weights[torch.rand(p.layer.e, generator=draw).argsort()]
    race = torch.rand(p.m, p.layer.e, generator=draw).log_().neg_().div_(weights)
    return race.topk(p.layer.topk, dim=1, largest=False).indices.int()


def align(ids: torch.Tensor, block: int, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """vLLM's moe_align_block_size in torch: slots sorted by their expert, those of each expert padded to blocks; the
    expert of each block; the number of padded slots. vLLM's kernel reads nothing behind these."""
    flat, n = ids.flatten().long(), ids.numel()
    size = n + experts * (block - 1)
    size = min(size, n * block) if n < experts else size
    counts = torch.zeros(experts, dtype=torch.int64).scatter_add_(0, flat, torch.ones_like(flat))
    blocks = (counts + block - 1) // block
    moved = (blocks.cumsum(0) - blocks) * block - (counts.cumsum(0) - counts)  # by padding of the experts before
    order = flat.argsort(stable=True)
    slots = torch.full((size,), n).scatter_(0, torch.arange(n) + moved[flat[order]], order)
    owners = torch.searchsorted(blocks.cumsum(0), torch.arange(-(-size // block)), right=True).clamp_(max=experts - 1)
    return slots.int(), owners.int(), (blocks.sum() * block).int().view(1)


@dataclass(slots=True)
class MoeInputs:
    """One set, tensors by name: tokens x and what the second product gets, y, with their scales xs and ys, and the
    scores; weights w1 and w2 with their scales s1 and s2.

    `words`: what it is drawn by. `sets`: all weights that there are; this copy uses those of its turn.
    """

    problem: MoeProblem
    words: tuple[object, ...]
    own: dict[str, torch.Tensor]
    sets: list[dict[str, torch.Tensor]]
    turn: int = 0
    turns: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @classmethod
    def make(cls, p: MoeProblem, device: torch.device, seed: int, draw: int) -> MoeInputs:
        """Draw one set by (seed, problem, draw)."""
        rng = generator(device, seed, p, draw)
        own: dict[str, torch.Tensor] = {}
        weights: dict[str, torch.Tensor] = {}
        for name, rows, k in (("x", p.m, p.k), ("y", p.slots, p.n)):
            own |= _named(name, f"{name}s", *draw_rows(p.scale, p.dtype, (rows,), k, 0, rng))
        own["scores"] = torch.rand(p.m, p.layer.topk, device=device, generator=rng).add_(0.5)
        for i, (n, k) in enumerate(p.products, 1):
            w, scale = draw_rows(p.scale, p.dtype, (p.stored * n,), k, w_exponent(k, mx=False), rng, blocked=True)
            if p.scale == "block" and scale is not None:
                scale = scale.view(p.stored, n // SCALE_BLOCK, -1)
            elif scale is not None:  # each expert has its own
                scale = torch.rand(p.stored, device=device, generator=rng).add_(0.5) * scale
            weights |= _named(f"w{i}", f"s{i}", w.view(p.stored, n, k), scale)
        return cls(p, (seed, p, draw), own, [weights])

    @property
    def ids(self) -> torch.Tensor:
        """The experts of each token, by `route`; each turn has its own."""
        return route(self.problem, generator(torch.device("cpu"), *self.words, self.turn))

    @property
    def bytes(self) -> int:
        """Bytes that a call reads: of the experts that are hit, not of all that there are."""
        return self.problem.w_bytes + self.problem.x_bytes

    def copy(self) -> MoeInputs:
        """The same tokens in other memory with another routing; with weights of their own, until those span enough."""
        if len(self.sets) * self.problem.layer.e * self.problem.expert_bytes < GPU_ROTATE:
            self.sets.append({n: t.clone() for n, t in self.sets[0].items()})
        return replace(self, own={n: t.clone() for n, t in self.own.items()}, turn=next(self.turns))

    def output(self) -> torch.Tensor:
        """Both outputs, one behind the other."""
        size, device = self.problem.out_bytes // self.problem.out_size, self.own["x"].device
        return torch.full((size,), math.nan, dtype=float_of(self.problem.outdtype), device=device)

    def reference(self) -> tuple[torch.Tensor, ...]:
        """Both answers, each product for itself: one wrong is wrong, however small it is beside the other."""
        p, own, w = self.problem, self.own, self.sets[self.turn % len(self.sets)]
        x, y = (widen_rows(p.scale, own[n].shape[-1], own[n], own.get(f"{n}s")) for n in "xy")
        owners, scores = self.ids.flatten().to(x.device), own["scores"].view(-1, 1)
        one, two = (torch.empty(p.slots, n, device=x.device) for n, _ in p.products)
        for e in set(owners.tolist()):
            at = (owners == e).nonzero().flatten()
            w1, w2 = (
                widen_rows(p.scale, k, w[f"w{i}"][e], w[f"s{i}"][e] if f"s{i}" in w else None, blocked=True)
                for i, (_, k) in enumerate(p.products, 1)
            )
            one[at] = x[at // p.layer.topk] @ w1.t()
            two[at] = y[at] @ w2.t() * scores[at]
        return one, two


def _named(name: str, of_scale: str, t: torch.Tensor, scale: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {name: t} if scale is None else {name: t, of_scale: scale}


@dataclass(frozen=True, slots=True)
class Moe(EngineSource):
    """The source."""

    op = "moe"
    labels = tuple(EXPONENTS)
    searched = ("uniform", "zipf1.5")

    def problem(self, family: str, key: Mapping[str, int | str], gfx: str) -> MoeProblem:
        m, k, n, experts, topk = (size_of(key, c) for c in ("token", "model_dim", "inter_dim", "expert", "topk"))
        quant, types = key.get("q_type"), [key.get(c) for c in ("dtype", "q_dtype_a", "q_dtype_w")]
        scale = SCALES.get(str(quant), "")
        multiple = SCALE_BLOCK if scale == "block" else 8
        wanted = [("torch.bfloat16",), *[FP8 if scale != "none" else ("torch.bfloat16",)] * 2]
        reasons = {
            f"q_type is {quant}; this tuner has {', '.join(SCALES)}": not scale,
            "doweight_stage1 is 1; this tuner weights the second product": flag_of(key, "doweight_stage1"),
            f"dtype and operands are {types}; with {quant} this tuner has {wanted}": any(
                t not in legal for t, legal in zip(types, wanted, strict=True)
            ),
            f"topk is {topk}, of {experts} experts": topk > experts,
            f"inter_dim and model_dim must be multiples of {multiple} here": n % multiple or k % multiple,
        }
        if any(reasons.values()):
            raise UnsupportedError(next(reason for reason in reasons if reasons[reason]))
        block = (SCALE_BLOCK, SCALE_BLOCK) if scale == "block" else None
        dtype, of_file = ("bfloat16", "") if scale == "none" else (fp8_of(gfx), "fp8_w8a8")
        layer, gated = Layer("moe", n, k, experts, topk, of_file, block), flag_of(key, "use_g1u1")
        return MoeProblem(family, 1, m, n, k, dtype, scale=scale, layer=layer, gated=gated, stored=experts)

    def sibling(self, layer: Layer, sizes: Sequence[int]) -> Layer:
        return replace(layer, e=sizes[0], n=sizes[1])

    def space(self, p: MoeProblem, target: Target) -> Space:
        """vLLM's own (its benchmark_moe.py has rows from 16, 4 and 8 warps), and what the kernel takes beyond it."""
        knobs = {
            "BLOCK_SIZE_M": BLOCKS_M, "BLOCK_SIZE_N": (32, 64, 128, 256),
            # a longer step is cut to the block
            "BLOCK_SIZE_K": (64, 128) if p.scale == "block" else (64, 128, 256),
            "GROUP_SIZE_M": (1, 16, 32, 64), **KNOBS[target.backend],
        }  # fmt: skip
        return Space(
            knobs, {}, lambda c: is_legal(p, c, target), lambda c: estimate(p, c, target), lambda c: as_run(p, c).items,
            ENGINE,
        )  # fmt: skip

    def alike(self, p: MoeProblem) -> MoeProblem:
        """One expert's weights are enough to compile with, as far as they are not small."""
        least = min(n * k for n, k in p.products) * p.bits // 8
        stored = min(p.layer.e, -(-SMALL_BYTES // least))
        first = 16 * -(-max(BLOCKS_M[-1], p.layer.e) // 16)  # from here on all M are sorted and specialised alike
        many = p.m >= first and p.layer.e % 16 == 0 and max(p.x_bytes, p.out_bytes) < SMALL_BYTES
        return replace(p, m=first + p.m % 16 if many else p.m, label=self.labels[0], stored=stored)

    def needed_bytes(self, p: MoeProblem) -> int:
        """Weights and activations twice, the outputs, and in float32 the activations and the reference; what is there
        while a weight is drawn."""
        weights, one = p.layer.e * p.expert_bytes, p.layer.e * p.products[0][0] * p.k
        wide = p.x_bytes * 32 // p.bits + p.out_bytes * 4 // p.out_size
        return 2 * (weights + p.x_bytes) + p.out_bytes + wide + 3 * one

    def inputs(self, p: MoeProblem, device: torch.device, seed: int, draw: int) -> MoeInputs:
        return MoeInputs.make(p, device, seed, draw)

    def operands(self, inputs: MoeInputs) -> Operands:
        """vLLM decides whether slots are sorted. Its operator in C++ for that is not at hand, so torch sorts, for each
        BLOCK_SIZE_M that a file may have, before anything is timed."""
        engine, p, ids, device = self.engine(), inputs.problem, inputs.ids, inputs.own["x"].device
        w = inputs.sets[inputs.turn % len(inputs.sets)]
        w |= {n: padded(engine, w[n]) for n in ("w1", "w2")}
        made = {**inputs.own, **w}
        engine.moe.moe_align_block_size = lambda ids, block, experts, *_, **__: align(ids, block, experts)
        for block in (1 << i for i in range(10)):
            found = engine.moe._prepare_expert_assignment(
                ids, {"BLOCK_SIZE_M": block}, p.m, p.layer.topk, p.layer.e, None
            )
            made |= {f"{n}{block}": t.to(device) for n, t in zip(ASSIGNED, found, strict=True) if t is not None}
        return made

    def launches(self, p: MoeProblem, values: Values, operands: Operands, out: torch.Tensor) -> list[Launch]:
        import triton.language as tl

        engine = self.engine()
        invoke, get, config = engine.moe.invoke_fused_moe_triton_kernel, operands.get, dict(values)
        first = p.slots * p.products[0][0]
        one, two = (c.view(p.m, p.layer.topk, -1) for c in (out[:first], out[first:]))
        slots, owners, count = (f"{what}{config['BLOCK_SIZE_M']}" for what in ASSIGNED)
        assigned = (get(slots), operands[owners], operands[count])
        rest = (tl.bfloat16, p.scale != "none", False, False, False, False, p.layer.block)

        def both() -> None:
            invoke(get("x"), get("w1"), one, get("xs"), get("s1"), None, *assigned, False, p.layer.topk, config, *rest)
            invoke(get("y"), get("w2"), two, get("ys"), get("s2"), get("scores"), *assigned, True, 1, config, *rest)

        return engine.launches(self.op, both)


ASSIGNED = ("slots", "owners", "padded")
"""Our names of the three tensors of the engine's _prepare_expert_assignment."""


def padded(engine: Engine, w: torch.Tensor) -> torch.Tensor:
    """A weight as vLLM keeps it: on ROCm rows in bf16 lie apart (UnquantizedFusedMoEMethod._maybe_pad_weight)."""
    wanted = engine.device.backend == "hip" and engine.moe.envs.VLLM_ROCM_MOE_PADDING
    if not wanted or w.element_size() == 1 or w.stride(-2) * w.element_size() % 512:
        return w
    return torch.nn.functional.pad(w, (0, 256 // w.element_size()))[..., : w.shape[-1]]


def as_run(p: MoeProblem, c: TileConfig) -> TileConfig:
    """A config as vLLM's launcher hands it on."""
    step = min(c.get("BLOCK_SIZE_K"), SCALE_BLOCK if p.scale == "block" else 1 << 20)
    values = {**c.values, "BLOCK_SIZE_K": step}
    values.pop("SPLIT_K", None)
    return replace(c, items=tuple(values.items()))


def is_legal(p: MoeProblem, c: TileConfig, target: Target) -> bool:
    """False for what cannot be a good one, or does not run, before anything is compiled.

    All stages of the pipeline lie in shared memory with asynchronous copies on AMD, and where wgmma reads them, for
    which vLLM swaps the operands of fp8. Elsewhere one may be in registers.
    """
    x, hip = c.knobs, target.backend == "hip"
    swapped = target.arch == 90 and p.bits == 8 and x.block_n >= 64
    whole = target.async_copy if hip else target.arch in WGMMA and (x.block_m >= 64 or swapped)
    return (
        x.block_k <= max(p.n, p.k)
        and accumulators(x, target) >= LEAST_SUMS
        and (x.num_stages - (not whole)) * stage_bytes(p, x) <= target.shared_bytes
        and all(fits(replace(q, m=min(p.m, SKEWED * q.m)), c, target) for q in batched(p))
    )


def estimate(p: MoeProblem, c: TileConfig, target: Target) -> float:
    """Microseconds of both products."""
    x = as_run(p, c)
    return sum(estimate_us(q, x.knobs, target) for q in batched(p)) * warps_factor(x, target)
