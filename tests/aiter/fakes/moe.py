"""AITER's mixture of experts on the CPU: the router, the sorting, each stage, both in one kernel.

A kernel reads what the script gives it, as the GPU would: rows by the sorted ids (token in the low 24 bits, place among
the token's experts above), an expert a block, weights as shuffle_weight left them. Activation: SiLU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

TOKEN = (1 << 24) - 1
GROUP = 128
STEP = 16
"""Divisor of every block's size."""
FAR = 1000.0
"""Error of a wrong result: one-stage kernels are compared with an absolute tolerance of 1, which is
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


def after(module: Any) -> None:
    """Replace what Triton would run, in the module of 4-bit helpers and in that of the quantiser that is only timed."""
    for name in ("moe_mxfp4_sort", "fused_dynamic_mxfp4_quant_moe_sort"):
        if hasattr(module, name):
            setattr(module, name, sort_scales if name == "moe_mxfp4_sort" else lambda *_, **__: None)


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
        for expert, token, place, weights in self._unsorted() if self.ids.dim() == 2 else self._sorted():
            yield expert, token, place, torch.ones(len(token), 1) if weights is None else weights.view(-1, 1)

    def _sorted(self) -> Iterator[tuple[int, Any, Any, Any]]:
        size = -(-len(self.ids) // len(self.experts) // STEP) * STEP  # the last block's padding may be left out
        for number, expert in enumerate(self.experts[: int(self.valid[0]) // size].tolist()):
            block = slice(number * size, (number + 1) * size)
            ids = self.ids[block].long()
            real = (ids & TOKEN) < self.tokens
            yield (
                expert,
                ids[real] & TOKEN,
                ids[real] >> 24,
                None if self.weights is None else self.weights[block][real],
            )

    def _unsorted(self) -> Iterator[tuple[int, Any, Any, Any]]:
        """The router's own answer, which some kernels sort by themselves."""
        for expert in self.ids.unique().tolist():
            token, place = (self.ids == expert).nonzero(as_tuple=True)
            yield expert, token, place, None if self.weights is None else self.weights[token, place]


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


def sort_scales(scales: Any, sorted_ids: Any, *_: Any, **__: Any) -> Any:
    """moe_mxfp4_sort, a Triton kernel: a row of scales for each sorted id, not shuffled (only kernels here read it)."""
    places = scales.shape[1] if scales.dim() == 3 else 1
    rows = scales.view(torch.uint8).reshape(-1, scales.shape[-1])
    token, place = sorted_ids.long() & TOKEN, sorted_ids.long() >> 24
    at = (token * places + (place if places > 1 else 0)).clamp(max=len(rows) - 1)
    return rows[at].view(scales.dtype)


def quantise(out: Any, x: Any, scales: Any, *_: Any) -> None:
    """dynamic_per_token_scaled_quant: a scale a row of x."""
    rows = x.reshape(len(x), -1).float()
    scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / torch.finfo(out.dtype).max
    out.view(rows.shape).copy_((rows / scale).to(out.dtype))
    scales.view(-1).copy_(scale.view(-1))


def _plain(w: Any) -> Any:
    from gemmfleet_fakes import ours  # type: ignore[import-not-found]

    return ours("kernels").plain(w)


def _fp4(x: Any, scales: Any) -> Any:
    """Values of two a byte, with a scale each 32."""
    from aiter.utility import fp4_utils  # type: ignore[import-not-found]

    values = fp4_utils.mxfp4_to_f32(x.view(torch.uint8))
    factors = fp4_utils.e8m0_to_f32(scales.view(torch.uint8)).repeat_interleave(32, -1)
    return values * factors[..., : values.shape[-1]]


def _unshuffled(scales: Any) -> Any:
    """Undo e8m0_shuffle."""
    from aiter.utility import fp4_utils

    flat = scales.view(torch.uint8).flatten()
    plain = torch.empty_like(flat)
    plain[fp4_utils.e8m0_shuffle(torch.arange(flat.numel()).view(scales.shape)).flatten()] = flat
    return plain.view(scales.shape)


def _rows(x: Any, scale: Any, routing: Routing) -> Any:
    """Activations: a scale in all, a row, or a group of a row, which ASM kernels have transposed. Kernels that quantise
    by themselves are given scales too."""
    if x.element_size() == 1 and scale is not None and scale.element_size() == 1:
        return _rows_of_4_bits(x, scale, routing)
    rows = x.float().flatten(0, -2)
    if scale is None or x.element_size() > 1:
        return rows.view(x.shape)
    if scale.numel() in (1, len(rows)):
        return (rows * scale.float().view(-1, 1)).view(x.shape)
    scale = scale.T if scale.shape == (x.shape[-1] // GROUP, len(rows)) else scale
    return (rows * scale.reshape(len(rows), -1).repeat_interleave(GROUP, 1)).view(x.shape)


def _rows_of_4_bits(x: Any, scale: Any, routing: Routing) -> Any:
    """The scales come as sort_scales made them: a row for each sorted id."""
    rows = x.shape[:-1].numel()
    token, place = routing.ids.long() & TOKEN, routing.ids.long() >> 24
    real = token < routing.tokens
    at = token * (rows // routing.tokens) + (place if x.dim() == 3 else 0)
    plain = torch.zeros(rows, scale.shape[1], dtype=torch.uint8)
    plain[at[real]] = scale.view(torch.uint8)[: len(at)][real]
    return _fp4(x.view(torch.uint8).reshape(rows, -1), plain).view(*x.shape[:-1], -1)


def _weights(w: Any, scale: Any, kernel: str = "") -> Any:
    """Weights: a scale an expert, a row, a square, or 32 values of a row. Those of 4 bits are shuffled for kernels that
    are called so."""
    if scale is not None and scale.element_size() == 1:
        experts, n = w.shape[:2]
        values = w.view(torch.uint8)
        values = _plain(values) if "Shuffled" in kernel else values
        return _fp4(values, _unshuffled(scale)[: experts * n].view(experts, n, -1))
    values = _plain(w).float()
    experts, n, k = w.shape
    if scale is None:
        return values
    if scale.numel() in (experts, experts * n):
        return values * scale.float().view(experts, -1, 1)
    squares = scale.view(experts, n // GROUP, k // GROUP)
    return values * squares.repeat_interleave(GROUP, 1).repeat_interleave(GROUP, 2)


def _asm_first(x: Any, w1: Any, w2: Any, ids: Any, experts: Any, valid: Any, out: Any, *more: Any) -> Any:
    """`more`: inter_dim, name, block_m, ksplit, activation, quantisation, scales of x and w1, weights."""
    xs, ws, weights = (*more, None)[6:9]
    routing = Routing(ids, experts, valid, weights, len(x))
    result = _first(_rows(x, xs, routing), _weights(w1, ws), routing, out.shape[1])
    if out.element_size() > 1:
        return out, result
    quantised, scales = torch.empty(result.shape, dtype=out.dtype), torch.empty(result.numel() // GROUP)
    quantise(quantised, result.view(-1, GROUP), scales)
    out[len(x) :].view(-1)[: scales.numel() * 4] = scales.view(out.dtype)  # as the next stage finds them
    return out[: len(x)], quantised.float()


def _ck_first(x: Any, w1: Any, w2: Any, ids: Any, experts: Any, valid: Any, out: Any, topk: int, name: str, ws: Any,
              xs: Any, block: int, weights: Any, *_: Any) -> Any:  # fmt: skip
    routing = Routing(ids, experts, valid, weights, len(x))
    return out, _first(_rows(x, xs, routing), _weights(w1, ws, name), routing, topk)


def _ck_second(x: Any, w1: Any, w2: Any, ids: Any, experts: Any, valid: Any, out: Any, topk: int, name: str, ws: Any,
               xs: Any, block: int, weights: Any, *_: Any) -> Any:  # fmt: skip
    routing = Routing(ids, experts, valid, weights, len(x))
    return out, _second(_rows(x, xs, routing), _weights(w2, ws, name), routing)


def _both(out: Any, x: Any, w1: Any, w2: Any, ids: Any, weights: Any, experts: Any, valid: Any, topk: int, xs: Any,
          w1s: Any, w2s: Any, *_: Any) -> Any:  # fmt: skip
    routing = Routing(ids, experts, valid, weights, len(x))
    inner = _first(_rows(x, xs, routing), _weights(w1, w1s), replace(routing, weights=None), topk)
    return out, _second(inner, _weights(w2, w2s), routing)


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
    "moe_sorting_opus_get_workspace_size": lambda *_: 0, "dynamic_per_token_scaled_quant": quantise,
}  # fmt: skip
"""Functions that prepare a kernel's operands."""
