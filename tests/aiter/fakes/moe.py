"""AITER's mixture of experts on the CPU: the router, the sorting, each stage, both in one kernel.

A kernel reads what the script gives it, as the GPU would: rows by the sorted ids (token in the low 24 bits, place among
the token's experts above), an expert a block, weights as shuffle_weight left them. Activation: SiLU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

TOKEN = (1 << 24) - 1
GROUP = 128
FAR = 1000.0
"""By how much a wrong result is too large: one-stage kernels are compared with an absolute tolerance of 1, which is
more than what a small shape computes."""


def route(weights: Any, ids: Any, _: Any, scores: Any, *rest: Any) -> None:
    """topk_softmax."""
    renormalise = next(a for a in rest if isinstance(a, (bool, int)))
    best, at = torch.softmax(scores.float(), -1).topk(weights.shape[1], -1)
    weights[: len(best)] = best / best.sum(-1, keepdim=True) if renormalise else best
    ids[: len(at)] = at.to(ids.dtype)


def sort(ids: Any, weights: Any, sorted_ids: Any, sorted_weights: Any, experts: Any, valid: Any, out: Any, n: int,
         block: int, *_: Any) -> None:  # fmt: skip
    """moe_sorting_fwd: tokens by expert, each expert's to a multiple of `block`."""
    tokens, places = ids.shape
    sorted_ids.fill_(places << 24 | tokens)
    sorted_weights.zero_()
    begin = 0
    for expert in range(n):
        token, place = (ids == expert).nonzero(as_tuple=True)
        blocks = -(-len(token) // block)
        there = slice(begin, begin + len(token))
        sorted_ids[there] = (place << 24 | token).to(sorted_ids.dtype)
        sorted_weights[there] = weights[token, place]
        experts[begin // block : begin // block + blocks] = expert
        begin += blocks * block
    valid[0], valid[1] = begin, tokens
    out.zero_()


@dataclass(frozen=True)
class Routing:
    """`weights`: None where the other stage takes them in."""

    ids: Any
    experts: Any
    valid: Any
    weights: Any
    tokens: int

    def blocks(self) -> Iterator[tuple[int, Any, Any, Any]]:
        """(expert, tokens, places, weights as a column)."""
        size = len(self.ids) // len(self.experts)
        for number, expert in enumerate(self.experts[: int(self.valid[0]) // size].tolist()):
            ids = self.ids[number * size : (number + 1) * size].long()
            real = (ids & TOKEN) < self.tokens
            ids = ids[real]
            weights = torch.ones(len(ids)) if self.weights is None else self.weights[number * size :][:size][real]
            yield expert, ids & TOKEN, ids >> 24, weights.view(-1, 1)


def _first(x: Any, w: Any, routing: Routing, places: int) -> Any:
    half = w.shape[1] // 2
    out = torch.zeros(len(x), places, half)
    for expert, token, place, weight in routing.blocks():
        both = x[token] @ w[expert].T * weight
        out[token, place] = torch.nn.functional.silu(both[:, :half]) * both[:, half:]
    return out


def _second(x: Any, w: Any, routing: Routing) -> Any:
    out = torch.zeros(len(x), w.shape[1])
    for expert, token, place, weight in routing.blocks():
        out.index_add_(0, token, x[token, place] @ w[expert].T * weight)
    return out


def _rows(x: Any, scale: Any) -> Any:
    """Activations: a scale a row, or one for each group of a row (which ASM kernels have transposed)."""
    values, rows = x.float().flatten(0, -2), x.shape[:-1].numel()
    if scale is None:
        return values.view(x.shape)
    if scale.numel() == rows:
        return (values * scale.float().view(-1, 1)).view(x.shape)
    scale = scale if scale.is_contiguous() and scale.shape[0] != x.shape[-1] // GROUP else scale.T
    return (values * scale.reshape(rows, -1).repeat_interleave(GROUP, 1)).view(x.shape)


def _weights(w: Any, scale: Any) -> Any:
    """Weights: a scale a row, or one a square."""
    from gemmfleet_fakes import ours  # type: ignore[import-not-found]

    values = ours("kernels").plain(w).float()
    experts, n, k = w.shape
    if scale is None:
        return values
    if scale.numel() == experts * n:
        return values * scale.float().view(experts, n, 1)
    squares = scale.view(experts, n // GROUP, k // GROUP)
    return values * squares.repeat_interleave(GROUP, 1).repeat_interleave(GROUP, 2)


def _asm_first(x: Any, w1: Any, w2: Any, ids: Any, experts: Any, valid: Any, out: Any, inter: int, name: str, block: int,
               ksplit: int, act: Any, quant: Any, xs: Any, ws: Any, weights: Any) -> Any:  # fmt: skip
    routing = Routing(ids, experts, valid, weights, len(x))
    return out, _first(_rows(x, xs), _weights(w1, ws), routing, out.shape[1])


def _ck_first(x: Any, w1: Any, w2: Any, ids: Any, experts: Any, valid: Any, out: Any, topk: int, name: str, ws: Any,
              xs: Any, block: int, weights: Any, *_: Any) -> Any:  # fmt: skip
    return out, _first(_rows(x, xs), _weights(w1, ws), Routing(ids, experts, valid, weights, len(x)), topk)


def _ck_second(x: Any, w1: Any, w2: Any, ids: Any, experts: Any, valid: Any, out: Any, topk: int, name: str, ws: Any,
               xs: Any, block: int, weights: Any, *_: Any) -> Any:  # fmt: skip
    return out, _second(_rows(x, xs), _weights(w2, ws), Routing(ids, experts, valid, weights, len(x)))


def _both(out: Any, x: Any, w1: Any, w2: Any, ids: Any, weights: Any, experts: Any, valid: Any, topk: int, xs: Any,
          w1s: Any, w2s: Any, *_: Any) -> Any:  # fmt: skip
    inner = _first(_rows(x, xs), _weights(w1, w1s), Routing(ids, experts, valid, None, len(x)), topk)
    return out, _second(inner, _weights(w2, w2s), Routing(ids, experts, valid, weights, len(x)))


STAGES = {
    "moe_stage1_g1u1": _asm_first,
    "ck_moe_stage1": _ck_first,
    "ck_moe_stage2": _ck_second,
    "fmoe_g1u1": _both,
    "fmoe_fp8_blockscale_g1u1": _both,
}
"""A kernel's function -> (its output, what it computes)."""
BEFORE = {
    "topk_softmax": route, "topk_softmax_asm": route, "moe_sorting_fwd": sort, "moe_sorting_opus_fwd": sort,
    "moe_sorting_opus_get_workspace_size": lambda *_: 0,
}  # fmt: skip
"""What prepares a kernel's operands."""
