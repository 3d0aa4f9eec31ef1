"""SGLang's fused mixture of experts as a kernel source: a config of each product, one for both or a pair.

As SGLang's `_fused_moe_kernel_sequence` (0.5.23): if the second product loads through TMA, it wants its rows in the
order of experts, each expert's padded to whole tiles, and the first one writes them so (`c_sorted`), which is another
kernel. So a pair is two kernels that belong together (`worker/triton_configs/pair.py`), and either can be measured for
itself in that order (`MoeProblem.part`). Imports torch and triton.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from worker.families import SGLANG
from worker.triton_configs.pair import ROWS, TMA, split_pair
from worker.triton_configs.serving_engine import KernelLaunch, taking_quantized
from worker.tuners.engines.moe import MoeSource, sort_slots_by_expert
from worker.tuners.engines.moe_problem import MOST_ROWS, MoeInputs, MoeProblem
from worker.tuners.engines.source import Operands
from worker.tuners.search.source import Call
from worker.tuners.search.space import Space
from worker.tuners.search.target import Target
from worker.tuners.search.tile_config import TileConfig, Values

BLOCKS_M = (16, 32, 64, 128, MOST_ROWS)
"""SGLang's own space (its tuning_fused_moe_triton.py)."""
FIRST_WITH_TMA = 90
"""The first capability with TMA."""
EARLY_M = 512
"""Up to here a launcher lets the next kernel start early (`GDC_EARLY`)."""


@dataclass(frozen=True, slots=True)
class SglangMoeSource(MoeSource):
    """The fused MoE layer of SGLang."""

    prefix = SGLANG
    searched = ("uniform",)
    """One routing: the searches of both products take the time of a second one."""
    alike_from = EARLY_M + 1

    def problem(self, family: str, key: Mapping[str, int | str], gfx: str) -> MoeProblem:
        return replace(MoeSource.problem(self, family, key, gfx), with_padding=True)

    def space(self, problem: MoeProblem, target: Target) -> Space:
        """One config for both products; of a part also TMA, without which the second one needs no padding."""
        space = MoeSource.space(self, problem, target)
        knobs = {**space.knobs, ROWS: BLOCKS_M}
        if problem.part:
            knobs[TMA] = (True,) if problem.part == "down" else (False, True)
        return replace(space, knobs=knobs)

    def has_pairs(self, target: Target) -> bool:
        return target.backend == "cuda" and int(target.arch) >= FIRST_WITH_TMA

    def needed_bytes(self, problem: MoeProblem) -> int:
        padded = problem.padded_rows(MOST_ROWS) * (problem.products[0][0] * problem.out_size + 4 * problem.n)
        return MoeSource.needed_bytes(self, problem) + padded

    def operands(self, inputs: MoeInputs) -> Operands:
        """SGLang sorts slots into one expert more than there are, for those of other ranks, and rounds their number up
        to 4 (moe_align_block_size.py)."""
        problem = inputs.problem
        ids = inputs.experts_of_tokens
        operands = {**inputs.tokens, **inputs.weights, "ids": ids}
        for block in BLOCKS_M:
            slots, owners, padded = sort_slots_by_expert(ids, block, problem.layer.e + 1)
            slots = torch.nn.functional.pad(slots, (0, -len(slots) % 4), value=problem.slots)
            for name, tensor in (("slots", slots), ("owners", owners), ("padded", padded)):
                operands[f"{name}{block}"] = tensor
            for name in ("y", "ys"):
                rows = inputs.tokens.get(name)
                if rows is not None and rows.dim() == 2:
                    operands[f"{name}{block}"] = _sorted_rows(rows, operands[f"slots{block}"], problem, block)
        return operands

    def launches(
        self, problem: MoeProblem, values: Values, operands: Operands, out: torch.Tensor
    ) -> list[KernelLaunch]:
        import triton.language as tl

        up, down = entries_of(problem, values)
        block = up[ROWS]
        is_padded = is_first_padded(problem, values)
        is_fp8 = problem.scale != "none"
        get = operands.get
        routing = [operands[name] for name in ("scores", "ids", f"slots{block}", f"owners{block}", f"padded{block}")]
        first_out, second_out = _outputs(problem, out, block, is_padded)
        y = operands[f"y{block}"] if is_padded else operands["y"]
        y_scales = get("ys")
        if is_padded:
            y_scales = get(f"ys{block}", y_scales)
        scales = {id(operands["x"]): get("xs"), id(y): y_scales}

        def start(product: int, rows: torch.Tensor, to: torch.Tensor, entry: Values, **tma: bool) -> None:
            config = {key: value for key, value in entry.items() if key != TMA}
            is_second = product == 2
            self.engine().moe.invoke_fused_moe_kernel(
                *(rows, operands[f"w{product}"], None, to, scales[id(rows)], get(f"s{product}"), None, *routing),
                *(is_second, 1 if is_second else problem.layer.topk, config),
                compute_type=tl.bfloat16,
                use_fp8_w8a8=is_fp8,
                use_int8_w8a8=False,
                use_int8_w8a16=False,
                use_int4_w4a16=False,
                per_channel_quant=False,
                block_shape=list(problem.layer.block) if problem.layer.block else None,
                **tma,
            )

        def start_products() -> None:
            if problem.part != "down":
                start(1, operands["x"], first_out, up, b_use_tma=bool(up.get(TMA)), c_sorted=is_padded)
            if problem.part != "up":
                start(2, y, second_out, down, a_use_tma=is_padded, b_use_tma=is_padded)

        with taking_quantized(self.engine().moe, lambda rows: scales[id(rows)]):
            launches = self.engine().launches(self.op, start_products)
        self.engine().moe.clear_b_tma_desc_cache()  # it would keep the weights of earlier problems
        return launches

    def launch(
        self, problem: Any, candidate: TileConfig, operands: Sequence[Operands], out: torch.Tensor
    ) -> list[Call]:
        """The first call, which is checked, also puts the rows of a padded first output into the order of the slots."""
        calls = MoeSource.launch(self, problem, candidate, operands, out)
        if problem.part == "down" or not is_first_padded(problem, candidate.values):
            return calls
        block = candidate.number(ROWS)
        padded_out, _ = _outputs(problem, out, block, True)
        in_order, _ = _outputs(problem, out, block, False)
        slots = operands[0][f"slots{block}"].long()
        places = (slots < problem.slots).nonzero().flatten()

        def checked() -> None:
            calls[0]()
            in_order[slots[places]] = padded_out[places]

        return [checked, *calls[1:]]


def entries_of(problem: MoeProblem, values: Values) -> tuple[Values, Values]:
    """The configs of both products; of a part its own for either."""
    return (values, values) if problem.part else split_pair(values)


def is_first_padded(problem: MoeProblem, values: Values) -> bool:
    """True if the first output lies in the order of experts, because the second product loads it through TMA."""
    _, down = entries_of(problem, values)
    return bool(problem.part or down.get(TMA))


def _sorted_rows(rows: torch.Tensor, slots: torch.Tensor, problem: MoeProblem, block: int) -> torch.Tensor:
    """Rows of the slots in the order of experts, the padding 0."""
    plain = rows.view(torch.uint8) if rows.element_size() == 1 else rows  # torch cannot gather 8-bit floats everywhere
    with_zeros = torch.cat([plain, torch.zeros_like(plain[:1])])
    return with_zeros[slots[: problem.padded_rows(block)].long()].view(rows.dtype)


def _outputs(problem: MoeProblem, out: torch.Tensor, block: int, is_padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of both products, of which a part has its own alone; a padded first one lies behind them."""
    sizes = [problem.slots * problem.products[place][0] for place in problem.measured_products]
    columns = problem.products[0][0]
    second = out[sum(sizes) - sizes[-1] : sum(sizes)].view(problem.m, problem.layer.topk, -1)
    if not is_padded:
        return out[: sizes[0]].view(problem.slots, -1), second
    rows = problem.padded_rows(block)
    return out[sum(sizes) :][: rows * columns].view(rows, columns), second
