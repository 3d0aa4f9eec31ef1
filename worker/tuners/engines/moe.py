"""vLLM's fused mixture of experts as a kernel source: two products of a layer, one file for each (experts, N).

vLLM reads one entry for both products, so they are one call here. `moe_problem.py` says what they are, and draws their
operands; `sglang_moe.py` is the source of SGLang, whose space and model are these. The search calls, as of any source,
`problem` and `space` once, `compile` for each candidate, and in the measuring process `inputs`, `operands` and
`launches` (worker/tuners/search/source.py). Imports torch and triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from worker.triton_configs.engine_package import Layer
from worker.triton_configs.pair import split_pair
from worker.triton_configs.serving_engine import KernelLaunch, ServingEngine
from worker.tuners.common.problem import SCALE_BLOCK, UnsupportedError, flag_of, fp8_of, size_of
from worker.tuners.engines.moe_problem import EXPONENTS, MoeInputs, MoeProblem, batched_products
from worker.tuners.engines.source import AMD_KNOBS, LEAST_SUMS, EngineSource, Operands, warps_factor
from worker.tuners.search.space import Space, fits_device
from worker.tuners.search.target import Target
from worker.tuners.search.tile_config import TileConfig, Values, tile_config
from worker.tuners.search.time_model import TileKnobs, accumulators, estimate_us, stage_bytes

SCALES = {"QuantType.No": "none", "QuantType.per_Tensor": "tensor", "QuantType.per_1x128": "block"}
"""Kinds of scales (Problem.scale) by the column q_type."""
BF16 = ("torch.bfloat16",)
FP8 = ("torch.float8_e4m3fn", "torch.float8_e4m3fnuz")
BLOCKS_M = (8, 16, 32, 64, 128, 256)
SORTED_BLOCKS = tuple(1 << exponent for exponent in range(10))
"""Each BLOCK_SIZE_M that a file may have."""
# vLLM's own space (its benchmark_moe.py) has rows from 16, 4 and 8 warps; the rest is what the kernel takes beyond it.
KNOBS: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {"num_warps": (2, 4, 8, 16), "num_stages": (2, 3, 4, 5)},
    "hip": {"num_warps": (1, 2, 4, 8), "num_stages": (2, 3), **AMD_KNOBS},
}
WGMMA = (90, 100, 103)
"""Capabilities whose matrix instructions (wgmma, tcgen05) read operands from shared memory."""
SKEWED = 4
"""A tile may have this many times the rows of the average expert."""
SMALL_BYTES = 1 << 31
"""AMD's compiler takes smaller tensors for others."""
ASSIGNED = ("slots", "owners", "padded")
"""Our names of the three tensors of the engine's _prepare_expert_assignment."""


@dataclass(frozen=True, slots=True)
class MoeSource(EngineSource):
    """The fused MoE layer; each M is measured with several routings."""

    op = "moe"
    alike_from: ClassVar[int] = 1
    """The engine's launcher specialises a kernel in no further way from this M on."""
    labels = tuple(EXPONENTS)
    searched_labels: ClassVar[tuple[str, ...]] = ("uniform", "zipf1.5")

    def problem(self, family: str, key: Mapping[str, int | str], gfx: str) -> MoeProblem:
        m, k, n, experts, topk = (size_of(key, c) for c in ("token", "model_dim", "inter_dim", "expert", "topk"))
        scale = _scale_of(key)
        multiple = SCALE_BLOCK if scale == "block" else 8
        if topk > experts:
            raise UnsupportedError(f"topk is {topk}, of {experts} experts")
        if n % multiple or k % multiple:
            raise UnsupportedError(f"inter_dim and model_dim must be multiples of {multiple} here")
        dtype = "bfloat16" if scale == "none" else fp8_of(gfx)
        layer = Layer.from_key(key)
        gated = flag_of(key, "use_g1u1")
        return MoeProblem(family, 1, m, n, k, dtype, scale=scale, layer=layer, gated=gated, stored=experts)

    def space(self, problem: MoeProblem, target: Target) -> Space:
        return Space(
            knobs={
                "BLOCK_SIZE_M": BLOCKS_M,
                "BLOCK_SIZE_N": (32, 64, 128, 256),
                # a longer step is cut to the block
                "BLOCK_SIZE_K": (64, 128) if problem.scale == "block" else (64, 128, 256),
                "GROUP_SIZE_M": (1, 16, 32, 64),
                **KNOBS[target.backend],
            },
            plain={},
            is_legal=lambda config: is_legal(problem, config, target),
            estimate=lambda config: estimate(problem, config, target),
            identity=lambda config: as_launched(problem, config).items,
            prefix=self.prefix,
        )

    def compile_problem(self, problem: MoeProblem) -> MoeProblem:
        """The problem with fewer experts' weights, as many as make no small tensor (SMALL_BYTES), and at a lesser M.

        Large M are sorted and specialised alike, but Triton looks whether 16 divides a size. So each of them has the
        kernels of the least large M with the same rest by 16.
        """
        smaller_weight_bytes = min(n * k for n, k in problem.products) * problem.bits // 8
        experts = problem.layer.e
        stored = min(experts, -(-SMALL_BYTES // smaller_weight_bytes))
        alike_from = max(BLOCKS_M[-1], experts, self.alike_from)
        least_m = 16 * -(-alike_from // 16)
        m = problem.m
        is_small = max(problem.x_bytes, problem.out_bytes) < SMALL_BYTES
        if m >= least_m and experts % 16 == 0 and is_small:
            m = least_m + m % 16
        return replace(problem, m=m, label=self.labels[0], captured=(), stored=stored)

    def needed_bytes(self, problem: MoeProblem) -> int:
        """Weights and activations twice, the outputs, and in float32 the activations and the reference; what is there
        while a weight is drawn. All this is drawn for both products, also if one of them is measured."""
        problem = replace(problem, part="")
        experts = problem.layer.e
        first_columns, first_sums = problem.products[0]
        wide_x = problem.x_bytes * 32 // problem.bits
        wide_out = problem.out_bytes * 4 // problem.out_size
        while_drawn = 3 * experts * first_columns * first_sums
        twice = 2 * (experts * problem.expert_bytes + problem.x_bytes)
        return twice + problem.out_bytes + wide_x + wide_out + while_drawn

    def inputs(self, problem: MoeProblem, device: torch.device, seed: int, draw: int) -> MoeInputs:
        return MoeInputs.make(problem, device, seed, draw)

    def operands(self, inputs: MoeInputs) -> Operands:
        """The tensors of `inputs`, and what vLLM makes of their routing for each BLOCK_SIZE_M: `slots64`, `owners64`,
        `padded64` (see `sort_slots_by_expert`).

        vLLM decides whether slots are sorted; there are no `slots64` if not. Its operator in C++ for that is not at
        hand, so torch sorts, before anything is timed.
        """
        engine = self.engine()
        problem = inputs.problem
        experts_of_tokens = inputs.experts_of_tokens
        weights = inputs.weights
        for name in ("w1", "w2"):
            weights[name] = as_stored(engine, weights[name])
        operands = {**inputs.tokens, **weights}

        def sort_slots(ids: torch.Tensor, block: int, experts: int, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
            return sort_slots_by_expert(ids, block, experts)

        engine.moe.moe_align_block_size = sort_slots
        for block in SORTED_BLOCKS:
            assigned = engine.moe._prepare_expert_assignment(
                experts_of_tokens, {"BLOCK_SIZE_M": block}, problem.m, problem.layer.topk, problem.layer.e, None
            )
            for name, tensor in zip(ASSIGNED, assigned, strict=True):
                if tensor is not None:
                    operands[f"{name}{block}"] = tensor
        return operands

    def launches(
        self, problem: MoeProblem, values: Values, operands: Operands, out: torch.Tensor
    ) -> list[KernelLaunch]:
        engine = self.engine()
        get = operands.get
        topk = problem.layer.topk
        first_size = problem.slots * problem.products[0][0]
        config = dict(values)
        block = config["BLOCK_SIZE_M"]

        def start_both() -> None:
            engine.moe.invoke_fused_moe_triton_kernel(
                A=get("x"),
                A_scale=get("xs"),
                C=out[:first_size].view(problem.m, topk, -1),
                topk_weights=None,
                config=config,
                **launcher_arguments(problem, 1, operands, block),
            )
            engine.moe.invoke_fused_moe_triton_kernel(
                A=get("y"),
                A_scale=get("ys"),
                C=out[first_size:].view(problem.m, topk, -1),
                topk_weights=get("scores"),
                config=config,
                **launcher_arguments(problem, 2, operands, block),
            )

        return engine.launches(self.op, start_both)


def launcher_arguments(problem: MoeProblem, product: int, operands: Operands, block: int) -> dict[str, Any]:
    """Arguments, by name, that the launchers of both engines take alike for the first or second product: its weights,
    the slots as sorted for tiles of `block` rows (None if vLLM does not sort them), and the types of the operands."""
    import triton.language as tl

    return {
        "B": operands[f"w{product}"],
        "B_scale": operands.get(f"s{product}"),
        "mul_routed_weight": product == 2,
        "top_k": problem.layer.topk if product == 1 else 1,
        "sorted_token_ids": operands.get(f"slots{block}"),
        "expert_ids": operands[f"owners{block}"],
        "num_tokens_post_padded": operands[f"padded{block}"],
        "compute_type": tl.bfloat16,
        "use_fp8_w8a8": problem.scale != "none",
        "use_int8_w8a8": False,
        "use_int8_w8a16": False,
        "use_int4_w4a16": False,
        "per_channel_quant": False,
        "block_shape": list(problem.layer.block) if problem.layer.block else None,
    }


def _scale_of(key: Mapping[str, int | str]) -> str:
    """The kind of scales of a shape. Raises UnsupportedError for operands that this tuner does not have."""
    quant = key.get("q_type")
    scale = SCALES.get(str(quant))
    if scale is None:
        raise UnsupportedError(f"q_type is {quant}; this tuner has {', '.join(SCALES)}")
    if flag_of(key, "doweight_stage1"):
        raise UnsupportedError("doweight_stage1 is 1; this tuner weights the second product")
    types = [key.get(column) for column in ("dtype", "q_dtype_a", "q_dtype_w")]
    operand_types = BF16 if scale == "none" else FP8
    wanted = [BF16, operand_types, operand_types]
    if any(dtype not in legal for dtype, legal in zip(types, wanted, strict=True)):
        raise UnsupportedError(f"dtype and operands are {types}; with {quant} this tuner has {wanted}")
    return scale


def sort_slots_by_expert(
    ids: torch.Tensor, block: int, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """vLLM's moe_align_block_size in torch: slots sorted by their expert, those of each expert padded to blocks; the
    expert of each block; the number of padded slots. vLLM's kernel reads nothing behind these."""
    device = ids.device
    flat_ids = ids.flatten().long()
    count = ids.numel()
    size = count + experts * (block - 1)
    if count < experts:
        size = min(size, count * block)
    no_slots = torch.zeros(experts, dtype=torch.int64, device=device)
    slots_of_expert = no_slots.scatter_add_(0, flat_ids, torch.ones_like(flat_ids))
    blocks_of_expert = (slots_of_expert + block - 1) // block
    padded_start = (blocks_of_expert.cumsum(0) - blocks_of_expert) * block
    unpadded_start = slots_of_expert.cumsum(0) - slots_of_expert
    order = flat_ids.argsort(stable=True)
    places = torch.arange(count, device=device) + (padded_start - unpadded_start)[flat_ids[order]]
    slots = torch.full((size,), count, device=device).scatter_(0, places, order)
    block_numbers = torch.arange(-(-size // block), device=device)
    owners = torch.searchsorted(blocks_of_expert.cumsum(0), block_numbers, right=True).clamp_(max=experts - 1)
    padded_count = (blocks_of_expert.sum() * block).int().view(1)
    return slots.int(), owners.int(), padded_count


def as_stored(engine: ServingEngine, w: torch.Tensor) -> torch.Tensor:
    """A weight as vLLM keeps it: on ROCm rows in bf16 lie apart (UnquantizedFusedMoEMethod._maybe_pad_weight)."""
    if engine.device.backend != "hip" or not engine.moe.envs.VLLM_ROCM_MOE_PADDING:
        return w
    size = w.element_size()
    if size == 1 or w.stride(-2) * size % 512:
        return w
    return torch.nn.functional.pad(w, (0, 256 // size))[..., : w.shape[-1]]


def as_launched(problem: MoeProblem, config: TileConfig) -> TileConfig:
    """A config as vLLM's launcher hands it on."""
    values = config.values
    if problem.scale == "block":
        values["BLOCK_SIZE_K"] = min(config.number("BLOCK_SIZE_K"), SCALE_BLOCK)
    values.pop("SPLIT_K", None)
    return replace(config, items=tuple(values.items()))


def is_legal(problem: MoeProblem, config: TileConfig, target: Target) -> bool:
    """False for what cannot be a good one, or does not run, before anything is compiled."""
    knobs = config.knobs
    if knobs.block_k > max(problem.n, problem.k) or accumulators(knobs, target) < LEAST_SUMS:
        return False
    stages = knobs.num_stages
    if not _has_all_stages_in_shared(problem, knobs, target):
        stages -= 1
    if stages * stage_bytes(problem, knobs) > target.shared_bytes:
        return False
    for product in batched_products(problem):
        with_skew = replace(product, m=min(problem.m, SKEWED * product.m))
        if not fits_device(with_skew, config, target):
            return False
    return True


def _has_all_stages_in_shared(problem: MoeProblem, knobs: TileKnobs, target: Target) -> bool:
    """All stages of the pipeline lie in shared memory with asynchronous copies on AMD, and where wgmma reads them, for
    which vLLM swaps the operands of fp8. Elsewhere one may be in registers."""
    if target.backend == "hip":
        return target.async_copy
    is_swapped = target.arch == 90 and problem.bits == 8 and knobs.block_n >= 64
    return target.arch in WGMMA and (knobs.block_m >= 64 or is_swapped)


def product_entries(problem: MoeProblem, values: Values) -> tuple[Values, Values]:
    """The configs of both products; of a part its own for either."""
    return (values, values) if problem.part else split_pair(values)


def estimate(problem: MoeProblem, config: TileConfig, target: Target) -> float:
    """Microseconds of the products that are measured, each with its own values of a pair, as they are launched."""
    entries = product_entries(problem, config.values)
    us = 0.0
    for place in problem.measured_products:
        entry = as_launched(problem, tile_config(entries[place]))
        us += estimate_us(batched_products(problem)[place], entry.knobs, target) * warps_factor(entry, target)
    return us
