"""A fused mixture of experts at one number of tokens: its sizes, its routing, its operands. Imports torch.

A layer of E experts computes, for each of a token's top-k experts,

    first  = x @ w1[e]^T              w1 [E, 2N, K] (gate and up; N rows without a gate)
    second = (y @ w2[e]^T) * score    w2 [E, K, N]

In a model y is the activation of `first`, quantised. That step reads no config and is left out: y is drawn, and fixed.

The time depends on which experts the tokens get, so a routing is part of a problem: a token's experts are drawn without
repetition, the r-th in the order of popularity with a weight of r^-exponent, or as often as tokens of a server got
them. Each copy of the operands has a routing and an order of popularity of its own. The copies share the weights, as
far as these span what is to be rotated over. `moe.py` is the kernel source.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from worker.tuners.common.device import GPU_ROTATE
from worker.tuners.common.operands import draw_rows, float_of, generator, w_exponent, widen_rows
from worker.tuners.common.problem import SCALE_BLOCK, Problem
from worker.tuners.engines.source import LayerProblem
from worker.tuners.engines.specs import CAPTURED

EXPONENTS = {"uniform": 0.0, "zipf0.5": 0.5, "zipf1": 1.0, "zipf1.5": 1.5}
"""Exponents of the experts' popularity, by the routing's label."""
NEWTON_STEPS = 20
MOST_ROWS = 256
"""Rows of a tile at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeProblem(LayerProblem):
    """A layer at m tokens. `n` is inter_dim of a rank, `k` model_dim."""

    gated: bool
    """w1 has 2N rows."""
    stored: int
    """Experts whose weights are there: all of them but for compiling."""
    part: str = ""
    """`up` or `down` if only this product of a pair is measured, with the values of its own file."""
    with_padding: bool = False
    """There is room for the first output in the order of experts, each padded to whole tiles."""

    @property
    def slots(self) -> int:
        """The number of (token, expert) pairs: rows of either output."""
        return self.m * self.layer.topk

    @property
    def products(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(columns of the output, length of the sums) of both."""
        first_columns = 2 * self.n if self.gated else self.n
        return (first_columns, self.k), (self.k, self.n)

    @property
    def measured_products(self) -> tuple[int, ...]:
        """Places in `products` of those that a call computes."""
        return {"up": (0,), "down": (1,)}.get(self.part, (0, 1))

    @property
    def output_size(self) -> int:
        """Elements of the outputs that a call computes, without padding."""
        return self.slots * sum(self.products[place][0] for place in self.measured_products)

    def padded_rows(self, block: int) -> int:
        """Rows of an output in the order of experts, as SGLang allocates it for tiles of `block` rows."""
        return self.slots + min(self.slots, self.layer.e + 1) * (block - 1)

    @property
    def expert_bytes(self) -> int:
        """Both weights of one expert."""
        return sum(n * k for n, k in self.products) * self.bits // 8

    @property
    def flops(self) -> int:
        return 2 * self.slots * self._measured_weight_size

    @property
    def x_bytes(self) -> int:
        rows_of_products = (self.m, self.slots)
        size = sum(rows_of_products[place] * self.products[place][1] for place in self.measured_products)
        return size * self.bits // 8

    @property
    def w_bytes(self) -> int:
        return round(expected_experts_hit(self) * self._measured_weight_size * self.bits / 8)

    @property
    def out_bytes(self) -> int:
        return self.output_size * self.out_size

    @property
    def _measured_weight_size(self) -> int:
        """Elements of one expert's weights that a call reads."""
        products = [self.products[place] for place in self.measured_products]
        return sum(n * k for n, k in products)


@cache
def expected_experts_hit(problem: MoeProblem) -> float:
    """Expected number of experts that at least one of the M tokens is routed to.

    Each expert arrives in a Poisson race with its popularity as rate; a token takes the first topk arrivals (`route`
    draws such races). `horizon` is the time by which topk arrivals are expected. Source: exponential races (Efraimidis
    and Spirakis, 2006).
    """
    if problem.label == CAPTURED:
        return sum(_expected_hit_as_captured(problem, counts) for counts in problem.captured) / len(problem.captured)
    popularity = [math.pow(rank + 1, -EXPONENTS[problem.label]) for rank in range(problem.layer.e)]
    horizon = _time_of_expected_arrivals(popularity, problem.layer.topk)
    return sum(1 - math.exp(-rate * horizon * problem.m) for rate in popularity)


def _expected_hit_as_captured(problem: MoeProblem, counts: Sequence[int]) -> float:
    """Expected number of experts hit if each token gets an expert as likely as in one capture. `counts`: by expert."""
    tokens = sum(counts) / problem.layer.topk
    return sum(1 - (1 - count / tokens) ** problem.m for count in counts)


def _time_of_expected_arrivals(rates: Sequence[float], arrivals: int) -> float:
    """The time by which `arrivals` of the rates are expected to have arrived: the root of
    sum(1 - exp(-rate * time)) = arrivals, by Newton's method from below."""
    time = 0.0
    for _ in range(NEWTON_STEPS):
        still_missing = [math.exp(-rate * time) for rate in rates]
        error = arrivals - len(rates) + sum(still_missing)
        time += error / sum(rate * missing for rate, missing in zip(rates, still_missing, strict=True))
    return time


@cache
def batched_products(problem: MoeProblem) -> tuple[Problem, ...]:
    """The products as batched GEMMs of the experts that are hit, each of as many rows, for the model of times."""
    experts = max(1, round(expected_experts_hit(problem)))
    rows = -(-problem.slots // experts)
    return tuple(
        Problem(problem.family, experts, rows, n, k, problem.dtype, problem.outdtype, scale=problem.scale)
        for n, k in problem.products
    )


def route(problem: MoeProblem, draw: torch.Generator) -> torch.Tensor:
    """[M, topk] int32 on the device of `draw`: the experts of each token.

    The first topk of a race of exponential times, whose rates are the weights, are such a draw without repetition.
    """
    if problem.label == CAPTURED:
        return _route_as_captured(problem, draw)
    experts = problem.layer.e
    ranks = torch.arange(1, experts + 1, device=draw.device)
    weights = ranks.double().pow(-EXPONENTS[problem.label]).float()
    weights = weights[torch.rand(experts, device=draw.device, generator=draw).argsort()]
    race = torch.rand(problem.m, experts, device=draw.device, generator=draw).log_().neg_().div_(weights)
    return race.topk(problem.layer.topk, dim=1, largest=False).indices.int()


def _route_as_captured(problem: MoeProblem, draw: torch.Generator) -> torch.Tensor:
    """Draw one of the captures, and a routing in which each expert is as likely as it was for a token there.

    Systematic sampling: the experts' shares lie one behind the other on a line of length topk, and a token gets those
    at a drawn place and each 1 further on. No share is longer than 1, so none is met twice.
    """
    topk = problem.layer.topk
    capture = int(torch.randint(len(problem.captured), (), device=draw.device, generator=draw))
    shares = torch.tensor(problem.captured[capture], dtype=torch.float64, device=draw.device)
    ends = (shares * (topk / shares.sum())).cumsum(0)
    starts = torch.rand(problem.m, 1, dtype=torch.float64, device=draw.device, generator=draw)
    places = starts + torch.arange(topk, device=draw.device)
    return torch.searchsorted(ends, places, right=True).clamp_(max=len(shares) - 1).int()


@dataclass(slots=True)
class MoeInputs:
    """One set of operands, drawn by `make`; `copy` gives further ones, which calls are rotated over."""

    problem: MoeProblem
    draw_key: tuple[object, ...]
    """It is drawn by this, on `device`."""
    device: torch.device
    tokens: dict[str, torch.Tensor]
    """x [M, K], what the second product gets, y [M * topk, N], their scales xs and ys, and scores [M, topk]."""
    weight_sets: list[dict[str, torch.Tensor]]
    """All weights that there are, which the copies share: in each w1, w2, and their scales s1, s2."""
    turn: int = 0
    """The number of this copy: it uses the weights of its turn."""
    turns: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @classmethod
    def make(cls, problem: MoeProblem, device: torch.device, seed: int, draw: int) -> MoeInputs:
        """Draw one set by (seed, problem, draw)."""
        rng = generator(device, seed, problem, draw)
        tokens: dict[str, torch.Tensor] = {}
        for name, rows, k in (("x", problem.m, problem.k), ("y", problem.slots, problem.n)):
            tokens[name], scales = draw_rows(problem.scale, problem.dtype, (rows,), k, 0, rng)
            if scales is not None:
                tokens[f"{name}s"] = scales
        tokens["scores"] = torch.rand(problem.m, problem.layer.topk, device=device, generator=rng).add_(0.5)
        weights: dict[str, torch.Tensor] = {}
        for product in (1, 2):
            _draw_weight(problem, product, rng, weights)
        return cls(problem, (seed, problem, draw), device, tokens, [weights])

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights that this copy uses."""
        return self.weight_sets[self.turn % len(self.weight_sets)]

    @property
    def experts_of_tokens(self) -> torch.Tensor:
        """The experts of each token, by `route`; each turn has its own. Drawn on the operands' device, where it takes a
        millisecond instead of 10 to 50."""
        return route(self.problem, generator(self.device, *self.draw_key, self.turn))

    @property
    def bytes(self) -> int:
        """Bytes that a call reads: of the experts that are hit, not of all that there are."""
        return self.problem.w_bytes + self.problem.x_bytes

    def copy(self) -> MoeInputs:
        """The same tokens in other memory with another routing; with weights of their own, until those span enough."""
        weight_bytes = len(self.weight_sets) * self.problem.layer.e * self.problem.expert_bytes
        if weight_bytes < GPU_ROTATE:
            self.weight_sets.append(_cloned(self.weight_sets[0]))
        return replace(self, tokens=_cloned(self.tokens), turn=next(self.turns))

    def output(self) -> torch.Tensor:
        """The outputs, one behind the other, and room behind them for a padded first one."""
        problem = self.problem
        size = problem.output_size
        if problem.with_padding:
            size += problem.padded_rows(MOST_ROWS) * problem.products[0][0]
        dtype = float_of(self.problem.outdtype)
        return torch.full((size,), math.nan, dtype=dtype, device=self.tokens["x"].device)

    def reference(self) -> tuple[torch.Tensor, ...]:
        """The answers, each product for itself: one wrong is wrong, however small it is beside the other."""
        problem = self.problem
        x = self._wide_tokens("x")
        y = self._wide_tokens("y")
        first, second = (torch.empty(problem.slots, n, device=x.device) for n, _ in problem.products)
        expert_of_slot = self.experts_of_tokens.flatten()
        scores = self.tokens["scores"].view(-1, 1)
        for expert in set(expert_of_slot.tolist()):
            slots = (expert_of_slot == expert).nonzero().flatten()
            first[slots] = x[slots // problem.layer.topk] @ self._wide_weight(1, expert).t()
            second[slots] = y[slots] @ self._wide_weight(2, expert).t() * scores[slots]
        return tuple((first, second)[place] for place in problem.measured_products)

    def _wide_tokens(self, name: str) -> torch.Tensor:
        """x or y in float32."""
        rows = self.tokens[name]
        return widen_rows(self.problem.scale, rows.shape[-1], rows, self.tokens.get(f"{name}s"))

    def _wide_weight(self, product: int, expert: int) -> torch.Tensor:
        """An expert's weight of the first or second product in float32."""
        _, k = self.problem.products[product - 1]
        scales = self.weights.get(f"s{product}")
        expert_scales = None if scales is None else scales[expert]
        return widen_rows(self.problem.scale, k, self.weights[f"w{product}"][expert], expert_scales, blocked=True)


def _draw_weight(problem: MoeProblem, product: int, rng: torch.Generator, weights: dict[str, torch.Tensor]) -> None:
    """Draw all experts' weights of a product and their scales into `weights`."""
    n, k = problem.products[product - 1]
    experts = problem.stored
    w, scale = draw_rows(problem.scale, problem.dtype, (experts * n,), k, w_exponent(k, mx=False), rng, blocked=True)
    weights[f"w{product}"] = w.view(experts, n, k)
    if scale is None:
        return
    if problem.scale == "block":
        weights[f"s{product}"] = scale.view(experts, n // SCALE_BLOCK, -1)
    else:  # each expert has its own
        weights[f"s{product}"] = torch.rand(experts, device=rng.device, generator=rng).add_(0.5) * scale


def _cloned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
