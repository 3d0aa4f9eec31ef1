"""The problems of a kind, and its configs: seeds of a search, and legal configs without doubles.

The seeds are what a shape gets today, what lies beside it, and what similar shapes got. On AITER's own tables the
winner of a held-out shape is among the first eight configs of its nearest neighbours in 82 to 96 % of the cases; so
these come before the model's.

The values are those of the 171 files of gfx950 at e4048607a5 (1,277 buckets); `worker/tuners/search/tiles.py` makes
configs of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.bench.case import BLOCK8, MX4, PRE4, PRE8, ROW8, Case, parse
from worker.triton_configs.kinds import REQUIRED, ConfigKind
from worker.triton_configs.resolve import (
    Bucket,
    ConfigFileError,
    Resolved,
    ResolveError,
    Resolver,
    bucket_for,
    shipped,
)
from worker.tuners.common.problem import Problem
from worker.tuners.search.model import estimate_us
from worker.tuners.search.source import Target
from worker.tuners.search.tiles import NEAREST, Seeds, Space, TileConfig, Values, away, config_of, fits, same_as

OF_BENCH = {
    "batched_a4w4": "aiter-bmm-afp4wfp4",
    "batched_a16w4": "aiter-bmm-a16wfp4",
    "batched_a8w8_prequant": "aiter-bmm-a8w8-prequant",
}  # kinds with a format of their own, by the backend of a bench that has it (worker/bench/case.py)
# Family whose key columns the shapes of a kind have, where no family of tables is the kind's own.
ALIKE = {"a4w4_preshuffle": "a4w4_blockscale", **dict.fromkeys(OF_BENCH, "batched_bf16")}
_SCALES = {ROW8: "row", BLOCK8: "block", MX4: "mx", PRE8: "row", PRE4: "mx"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KindProblem(Problem):
    """A problem of one kind. Where X is quantised within the call, its bytes are counted as those of W's format."""

    kind: str
    case: Case


def family_of(kind: ConfigKind) -> str:
    """The family whose key columns a kind's shapes have."""
    return kind.family or ALIKE.get(kind.name, "")


def problem_of(kind: str, family: str, key: dict[str, int | str], gfx: str) -> KindProblem:
    """The problem of a shape's key columns. Raises UnsupportedError."""
    c = parse(family, key, OF_BENCH.get(kind, ""), gfx)
    scale = _SCALES.get(c.format, "none")
    return KindProblem(family, max(1, c.b), c.m, c.n, c.k, c.dtype, c.outdtype, c.bias, scale, kind=kind, case=c)


def portable(values: Values, kind: ConfigKind, arch: str) -> dict[str, Any]:
    """The tuned keys of another bucket's values that a chip takes: unknown ones belong to that bucket."""
    return {k: v for k, v in values.items() if k in REQUIRED and kind.takes(k, arch)}


class AiterSeeds(Seeds):
    """Seeds of one kind in one tree for one chip."""

    def __init__(self, root: Path, arch: str, kind: ConfigKind) -> None:
        """Raises ResolveError where the tree has no loader that is known, or no default of the kind."""
        super().__init__()
        self._tree, self._kind, self._arch = Resolver(root, arch), kind, arch
        self._place = self._tree.place(kind.config, kind.backend)
        self.bounds = self._tree.bounds(kind)
        there = [f for f in shipped(self._tree)[0] if f.kind is kind and f.path.parent == self._place.folder]
        # (B or 0, N, K) of the kind's other files by their path.
        self._others = {f.path: (f.named[0] or 0, *f.named[1:]) for f in there if f.named}

    def today(self, p: KindProblem) -> Resolved:
        """The bucket that a shape gets. Raises ResolveError, ConfigFileError, OSError."""
        return self._tree.config_for(self._kind, p.m, p.n, p.k, p.case.b or None)

    def sizes(self, p: KindProblem) -> tuple[int, ...]:
        return p.m, p.b, p.n, p.k

    def there(self, p: KindProblem) -> list[TileConfig]:
        """Today's, its neighbours in the file, the default's for M, then those of the nearest (N, K)."""
        found: list[Bucket] = []
        with contextlib.suppress(ResolveError, ConfigFileError, OSError):
            today = self.today(p)
            found.append(today.values)
            buckets = self._tree.read(today.path).buckets
            names = list(buckets)
            at = names.index(today.bucket)
            found += [buckets[name] for name in (*names[at + 1 : at + 2], *names[max(0, at - 1) : at])]
        near = sorted(self._others, key=lambda path: (away(self._others[path], (p.b, p.n, p.k)), path.name))
        for path in (self._place.default, *near[:NEAREST]):
            with contextlib.suppress(ResolveError, ConfigFileError, OSError):
                buckets = self._tree.read(path).buckets
                found.append(buckets[bucket_for(buckets, p.m, self.bounds)])
        made = [config_of(portable(values, self._kind, self._arch)) for values in found]
        return [c for c in made if set(self._kind.required_on(self._arch)) <= set(c.values)]

    def bucket_with(self, more: Mapping[str, Any], m: int) -> str:
        """The bucket of M in the default file if it had these buckets too. Raises ResolveError, ConfigFileError,
        OSError."""
        return bucket_for({**self._tree.read(self._place.default).buckets, **more}, m, self.bounds)


# Values as AITER rewrites them for the problem (source.Wrapper.completed).
Completed = Callable[[dict[str, Any]], dict[str, Any]]

KNOBS: dict[str, tuple[Any, ...]] = {
    "BLOCK_SIZE_M": (4, 8, 16, 32, 64, 128, 256),
    "BLOCK_SIZE_N": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_K": (64, 128, 256, 512, 1024),
    "GROUP_SIZE_M": (1, 2, 4, 8, 16),
    "num_warps": (1, 2, 4, 8),
    "num_stages": (1, 2, 3),
    "waves_per_eu": (0, 1, 2, 4, 6, 8),
    "matrix_instr_nonkdim": (16, 32),
    "cache_modifier": (None, ".cg"),
    "NUM_KSPLIT": (1, 2, 3, 4, 7, 8, 14, 16),
}
OF_CUDA: dict[str, tuple[Any, ...]] = {
    "BLOCK_SIZE_M": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_K": (32, 64, 128, 256, 512),
    "num_stages": (2, 3, 4, 5),
    "waves_per_eu": (0,),  # read by AMD's compiler alone
}
"""NVIDIA's loads are further from its multiprocessors than AMD's; its files are nobody's but the user's."""
MOST_PARTS = 256 << 20  # bytes of the parts of its splits
WEIGHTS: dict[str, tuple[float, ...]] = {
    "hip": (0.151, 0.229, 0.801, 0.365, 0.18, 0.022, -0.04, 0.233, 0.611),
    "cuda": (0.03, 0, 0, 0, 0, 0, 0, 0, 0),
}
"""Weights of `traits`. Those of AMD were fitted to half of AITER's files of gfx950 (benchmarks/aiter_configs.py);
AITER ships none for NVIDIA."""
DEFAULT_GROUP = 8


def space_of(kind: ConfigKind, p: Problem, target: Target, completed: Completed) -> Space:
    """The configs of a problem of a kind."""
    there = knobs(kind, target)
    usual = {"GROUP_SIZE_M": DEFAULT_GROUP, **({"waves_per_eu": 2} if 2 in there.get("waves_per_eu", ()) else {})}
    return Space(
        there, {k: v for k, v in usual.items() if k in there}, lambda c: is_legal(kind, p, c, target),
        lambda c: estimate(p, c, target), lambda c: same_as(p, completed(c.values)),
    )  # fmt: skip


def knobs(kind: ConfigKind, target: Target) -> dict[str, tuple[Any, ...]]:
    """Values of each key that a kind's files hold for a chip, in the files' order of keys."""
    there = KNOBS | (OF_CUDA if target.backend == "cuda" else {})
    if "blockscale" in kind.name:
        there["BLOCK_SIZE_K"] = (128,)
    elif "a4w4" in kind.name or "a16w4" in kind.name:
        there["BLOCK_SIZE_K"] = (256, 512, 1024)
    return {k: v for k, v in there.items() if k in kind.required_on(str(target.arch))}


def estimate(p: Problem, c: TileConfig, target: Target) -> float:
    """Microseconds by the search's model, corrected for what AITER's shipped files prefer."""
    weights = WEIGHTS[target.backend]
    return estimate_us(p, c.knobs, target) * math.exp(sum(w * x for w, x in zip(weights, traits(p, c), strict=True)))


def traits(p: Problem, c: TileConfig) -> tuple[float, ...]:
    """Traits that the model is corrected by: distance from 4 warps, more than 4, one stage, three, log2 of a step's 128
    bytes, of the splits and of the tile, how far the tile is from a square, and that there are splits."""
    x = c.knobs
    warps = math.log2(x.num_warps) - 2
    tile, step = math.log2(x.block_m * x.block_n), math.log2(x.block_k * p.bits / 1024)
    square = abs(math.log2(x.block_n / x.block_m))
    return (
        abs(warps), max(0.0, warps), x.num_stages == 1, x.num_stages == 3, step, math.log2(x.split_k), tile, square,
        x.split_k > 1,
    )  # fmt: skip


def is_legal(kind: ConfigKind, p: Problem, c: TileConfig, target: Target) -> bool:
    """False for a config that cannot be a good one for the problem, or does not run, before anything is compiled."""
    x = c.knobs
    parts = 4 * p.b * p.m * p.n * x.split_k
    return fits(p, c, target) and not (
        x.block_k > (p.k if x.split_k > 1 else 2 * p.k)  # a step is longer than K
        or (x.split_k > 1 and (p.k // x.split_k < x.block_k or parts > MOST_PARTS))  # a split has less than one step
        or least_shared_bytes(kind, p, c, target) > target.shared_bytes
    )


def least_shared_bytes(kind: ConfigKind, p: Problem, c: TileConfig, target: Target) -> int:
    """Bytes of shared memory that the compiler takes for the operands at least; it may pad rows, and add scales.

    On AMD a loop of one stage has one operand there at a time; one warp may load it into registers. So has one of one
    step in AITER's kernels with scales along K, where the number of steps is a constant. Of a pipelined one every stage
    is there with asynchronous copies; else all but one, which is in registers. Shuffled W may stay in registers, as may
    all but one stage of an X beside it; X that is quantised between load and product is there once.
    """
    plain = c.knobs
    x, w = (size * plain.block_k * p.bits // 8 for size in (plain.block_m, plain.block_n))
    if target.backend != "hip":
        return plain.num_stages * (x + w)
    if kind.shuffled_w:
        w = 0
    one_step = p.scale in ("block", "mx") and p.k <= plain.split_k * plain.block_k
    if plain.num_stages == 1 or one_step:
        return max(x, w) if plain.num_warps > 1 else 0
    buffers = plain.num_stages - (not target.async_copy)
    if kind.shuffled_w and not target.async_copy:
        return x
    return x + buffers * w if kind.quantises_x else buffers * (x + w)
