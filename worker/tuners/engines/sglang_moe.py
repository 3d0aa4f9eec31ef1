"""SGLang's fused mixture of experts as a kernel source: a config of each product, one for both or a pair.

Both products are launched as SGLang's `_fused_moe_kernel_sequence` does (0.5.23). If the second product loads through
TMA, it wants its rows in the order of experts, each expert's padded to whole tiles. The first one then writes them so
(`c_sorted`), which is another kernel:

    second without TMA    x -> first -> [slots, columns]      y by slot       -> second -> [M, topk, K]
    second with TMA       x -> first -> [padded, columns]     y by expert     -> second -> [M, topk, K]

So a pair is two kernels that belong together (`worker/triton_configs/pair.py`). Either can be measured for itself, in
the order of experts (`MoeProblem.part`; `pair_search.py` does). Imports torch and triton.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from worker.families import SGLANG
from worker.triton_configs.pair import BLOCK_SIZE_M, USE_TMA, without_tma
from worker.triton_configs.serving_engine import KernelLaunch, taking_quantized
from worker.tuners.engines.moe import MoeSource, launcher_arguments, product_entries, sort_slots_by_expert
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
    searched_labels = ("uniform",)
    """One routing: the searches of both products take the time of a second one."""
    alike_from = EARLY_M + 1

    def problem(self, family: str, key: Mapping[str, int | str], gfx: str) -> MoeProblem:
        return replace(MoeSource.problem(self, family, key, gfx), with_padding=True)

    def space(self, problem: MoeProblem, target: Target) -> Space:
        """One config for both products; of a part also TMA, without which the second one needs no padding."""
        space = MoeSource.space(self, problem, target)
        knobs = {**space.knobs, BLOCK_SIZE_M: BLOCKS_M}
        if problem.part:
            knobs[USE_TMA] = (True,) if problem.part == "down" else (False, True)
        return replace(space, knobs=knobs)

    def has_pairs(self, target: Target) -> bool:
        return target.backend == "cuda" and int(target.arch) >= FIRST_WITH_TMA

    def needed_bytes(self, problem: MoeProblem) -> int:
        padded = problem.padded_rows(MOST_ROWS) * (problem.products[0][0] * problem.out_size + 4 * problem.n)
        return MoeSource.needed_bytes(self, problem) + padded

    def operands(self, inputs: MoeInputs) -> Operands:
        """The tensors of `inputs`, and what SGLang makes of their routing for each BLOCK_SIZE_M: `slots64`, `owners64`,
        `padded64` (see `sort_slots_by_expert`), and y with its scales in the order of these slots, `y64`, `ys64`."""
        problem = inputs.problem
        ids = inputs.experts_of_tokens
        operands = {**inputs.tokens, **inputs.weights, "ids": ids}
        for block in BLOCKS_M:
            # SGLang sorts into one expert more than there are, for slots of other ranks, and rounds the number of slots
            # up to 4 (moe_align_block_size.py)
            slots, owners, padded = sort_slots_by_expert(ids, block, problem.layer.e + 1)
            slots = torch.nn.functional.pad(slots, (0, -len(slots) % 4), value=problem.slots)
            operands |= {f"slots{block}": slots, f"owners{block}": owners, f"padded{block}": padded}
            for name in ("y", "ys"):
                rows = inputs.tokens.get(name)
                if rows is not None and rows.dim() == 2:
                    operands[f"{name}{block}"] = _sorted_rows(rows, slots, problem, block)
        return operands

    def launches(
        self, problem: MoeProblem, values: Values, operands: Operands, out: torch.Tensor
    ) -> list[KernelLaunch]:
        engine = self.engine()
        get = operands.get
        up, down = product_entries(problem, values)
        block = up[BLOCK_SIZE_M]
        is_padded = is_first_padded(problem, values)
        x = operands["x"]
        x_scales = get("xs")
        y = operands["y"]
        y_scales = get("ys")
        if is_padded:
            y = operands[f"y{block}"]
            y_scales = get(f"ys{block}", y_scales)  # one scale for all of y has no order
        for_both = {"topk_weights": operands["scores"], "topk_ids": operands["ids"], "bias": None, "B_zp": None}

        def start_products() -> None:
            if problem.part != "down":
                engine.moe.invoke_fused_moe_kernel(
                    A=x,
                    A_scale=x_scales,
                    C=_first_out(problem, out, block, is_padded=is_padded),
                    config=without_tma(up),
                    b_use_tma=bool(up.get(USE_TMA)),
                    c_sorted=is_padded,
                    **launcher_arguments(problem, 1, operands, block),
                    **for_both,
                )
            if problem.part != "up":
                engine.moe.invoke_fused_moe_kernel(
                    A=y,
                    A_scale=y_scales,
                    C=_second_out(problem, out),
                    config=without_tma(down),
                    a_use_tma=is_padded,
                    b_use_tma=is_padded,
                    **launcher_arguments(problem, 2, operands, block),
                    **for_both,
                )

        row_scales = {id(x): x_scales, id(y): y_scales}
        with taking_quantized(engine.moe, lambda rows: row_scales[id(rows)]):
            launches = engine.launches(self.op, start_products)
        engine.moe.clear_b_tma_desc_cache()  # it would keep the weights of earlier problems
        return launches

    def launch(
        self, problem: Any, candidate: TileConfig, operands: Sequence[Operands], out: torch.Tensor
    ) -> list[Call]:
        """The first call, which is checked, also puts the rows of a padded first output into the order of the slots."""
        calls = MoeSource.launch(self, problem, candidate, operands, out)
        if problem.part == "down" or not is_first_padded(problem, candidate.values):
            return calls
        block = candidate.number(BLOCK_SIZE_M)
        padded_out = _first_out(problem, out, block, is_padded=True)
        out_by_slot = _first_out(problem, out, block, is_padded=False)
        slots = operands[0][f"slots{block}"].long()
        places = (slots < problem.slots).nonzero().flatten()

        def checked() -> None:
            calls[0]()
            out_by_slot[slots[places]] = padded_out[places]

        return [checked, *calls[1:]]


def is_first_padded(problem: MoeProblem, values: Values) -> bool:
    """True if the first output lies in the order of experts, because the second product loads it through TMA."""
    _, down = product_entries(problem, values)
    return bool(problem.part or down.get(USE_TMA))


def _sorted_rows(rows: torch.Tensor, slots: torch.Tensor, problem: MoeProblem, block: int) -> torch.Tensor:
    """Rows of the slots in the order of experts, the padding 0."""
    plain = rows.view(torch.uint8) if rows.element_size() == 1 else rows  # torch cannot gather 8-bit floats everywhere
    with_zeros = torch.cat([plain, torch.zeros_like(plain[:1])])
    return with_zeros[slots[: problem.padded_rows(block)].long()].view(rows.dtype)


def _first_out(problem: MoeProblem, out: torch.Tensor, block: int, *, is_padded: bool) -> torch.Tensor:
    """The output of the first product: [slots, columns] in front of the second one's, or if it is padded to tiles of
    `block` rows, [padded rows, columns] behind both."""
    columns = problem.products[0][0]
    if not is_padded:
        return out[: problem.slots * columns].view(problem.slots, columns)
    rows = problem.padded_rows(block)
    return out[problem.output_size :][: rows * columns].view(rows, columns)


def _second_out(problem: MoeProblem, out: torch.Tensor) -> torch.Tensor:
    """The output of the second product, [M, topk, columns]: the last of those that are not padded."""
    columns = problem.products[1][0]
    start = problem.output_size - problem.slots * columns
    return out[start : problem.output_size].view(problem.m, problem.layer.topk, columns)
