"""The problems of a kind, and its configs: seeds of a search, and legal configs without doubles.

The seeds are what a shape gets today, what lies beside it, and what similar shapes got. On AITER's own tables the
winner of a held-out shape is among the first eight configs of its nearest neighbours in 82 to 96 % of the cases; so
these come before the model's.

The values are those of the 171 files of gfx950 at e4048607a5 (1,277 buckets). Knobs that shape the kernel (tile, K
step, warps, stages, split-K) are combined; the others (order of tiles, waves, instruction, cache modifier) are varied
one at a time around the combinations that the model names first and around every seed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.bench.case import BLOCK8, MX4, PRE4, PRE8, ROW8, Case, parse
from worker.families import CONFIG
from worker.triton_configs.kinds import BY_NAME, REQUIRED, ConfigKind
from worker.triton_configs.resolve import (
    Bucket,
    ConfigFileError,
    Resolved,
    ResolveError,
    Resolver,
    bucket_for,
    shipped,
    spelled,
)
from worker.tuners.common.problem import Problem
from worker.tuners.search.model import MAX_REGISTERS, Knobs, accumulators, estimate_us
from worker.tuners.search.source import Target

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

    @property
    def batch(self) -> int | None:
        """B of a batched case, None for another."""
        return self.case.b or None

    @property
    def group_key(self) -> tuple[object, ...]:
        """All but M."""
        return (self.kind, self.b, self.n, self.k, self.dtype, self.outdtype, self.bias)


def family_of(kind: ConfigKind) -> str:
    """The family whose key columns a kind's shapes have."""
    return kind.family or ALIKE.get(kind.name, "")


def case_of(kind: ConfigKind, family: str, key: dict[str, int | str], gfx: str) -> Case:
    """The case of a shape's key columns. Raises UnsupportedError."""
    return parse(family, key, OF_BENCH.get(kind.name, ""), gfx)


def problem_of(kind: str, family: str, key: dict[str, int | str], gfx: str) -> KindProblem:
    """The problem of a shape's key columns. Raises UnsupportedError."""
    c = case_of(BY_NAME[kind], family, key, gfx)
    scale = _SCALES.get(c.format, "none")
    return KindProblem(family, max(1, c.b), c.m, c.n, c.k, c.dtype, c.outdtype, c.bias, scale, kind=kind, case=c)


Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AiterConfig:
    """A bucket's values, in AITER's order of keys. `caller`: the operator that runs them, "" for the kind's wrapper."""

    items: tuple[tuple[str, Any], ...]
    caller: str = ""

    @property
    def values(self) -> dict[str, Any]:
        """As the JSON file holds them."""
        return dict(self.items)

    def get(self, key: str, default: int = 1) -> int:
        """A whole number of the config."""
        found = dict(self.items).get(key)
        return found if isinstance(found, int) else default

    @property
    def split_k(self) -> int:
        return self.get("NUM_KSPLIT")

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Of two that are equally fast the lower one wins."""
        return self.split_k, self.get("num_stages"), self.get("waves_per_eu", 0)

    @property
    def name(self) -> str:
        """`config_16x64x256_g1_k4_w4_s2_eu2_mfma16_cg`, further keys behind it. ASCII, no commas."""
        caller = f"_in_{self.caller}" if self.caller else ""
        return (CONFIG + spelled(dict(self.items)) + caller)[:160]

    @property
    def knobs(self) -> Knobs:
        """The knobs by which its time is estimated."""
        m, n, k = (max(1, self.get(f"BLOCK_SIZE_{x}", 128)) for x in "MNK")
        return Knobs(
            m, n, k,
            max(1, self.get("GROUP_SIZE_M")), max(1, self.split_k), num_warps=max(1, self.get("num_warps", 4)),
            num_stages=max(1, self.get("num_stages", 2)), waves_per_eu=self.get("waves_per_eu", 0),
            matrix_instr_nonkdim=self.get("matrix_instr_nonkdim", 0), kpack=self.get("kpack"),
        )  # fmt: skip

    @property
    def features(self) -> tuple[float, ...]:
        """As a point: neighbours differ by one step of one knob."""
        return (*self.knobs.features, 0.5 * bool(dict(self.items).get("cache_modifier")))


def config_of(values: Values) -> AiterConfig:
    """A candidate of a bucket's values; keys in the order of shipped files, further ones behind."""
    ordered = [k for k in REQUIRED if k in values]
    return AiterConfig(tuple((k, values[k]) for k in (*ordered, *(k for k in values if k not in ordered))))


def portable(values: Values, kind: ConfigKind, arch: str) -> dict[str, Any]:
    """The tuned keys of another bucket's values that a chip takes: unknown ones belong to that bucket."""
    return {k: v for k, v in values.items() if k in REQUIRED and kind.takes(k, arch)}


NEAREST, NEAREST_WON = 6, 4  # files of other (N, K) whose bucket for M is tried, and winners of this run


def _away(one: Sequence[int], other: Sequence[int]) -> float:
    """Distance of two shapes: ratios of their sizes, 0 for a size that is not named."""
    return sum(abs(math.log2(x / y)) for x, y in zip(one, other, strict=True) if x)


class Seeds:
    """Seeds of one kind in one tree for one chip."""

    def __init__(self, root: Path, arch: str, kind: ConfigKind) -> None:
        """Raises ResolveError where the tree has no loader that is known, or no default of the kind."""
        self._tree, self._kind = Resolver(root, arch), kind
        self._arch = arch
        self._place = self._tree.place(kind.config, kind.backend)
        self.bounds = self._tree.bounds(kind)
        there = [f for f in shipped(self._tree)[0] if f.kind is kind and f.path.parent == self._place.folder]
        # (B or 0, N, K) of the kind's other files by their path.
        self._others = {f.path: (f.named[0] or 0, *f.named[1:]) for f in there if f.named}
        self._won: dict[tuple[int, ...], AiterConfig] = {}  # winners of this run by (M, B, N, K)

    def today(self, m: int, n: int, k: int, b: int | None) -> Resolved:
        """The bucket that a shape gets. Raises ResolveError, ConfigFileError, OSError."""
        return self._tree.config_for(self._kind, m, n, k, b)

    def won(self, p: KindProblem, config: AiterConfig) -> None:
        """Keep a winner for shapes like it."""
        self._won[p.m, p.b, p.n, p.k] = config

    def of(self, m: int, n: int, k: int, b: int | None) -> list[AiterConfig]:
        """Configs to try first, the most promising first: today's, its neighbours in the file, the default's for M,
        then those of the nearest (N, K), and winners of this run for the nearest shapes."""
        found: list[Bucket] = []
        with contextlib.suppress(ResolveError, ConfigFileError, OSError):
            today = self.today(m, n, k, b)
            found.append(today.values)
            buckets = self._tree.read(today.path).buckets
            names = list(buckets)
            at = names.index(today.bucket)
            found += [buckets[name] for name in (*names[at + 1 : at + 2], *names[max(0, at - 1) : at])]
        for path in (self._place.default, *self._nearest(n, k, b)):
            with contextlib.suppress(ResolveError, ConfigFileError, OSError):
                buckets = self._tree.read(path).buckets
                found.append(buckets[bucket_for(buckets, m, self.bounds)])
        made = [config_of(portable(values, self._kind, self._arch)) for values in found]
        made += [self._won[at] for at in sorted(self._won, key=lambda at: _away(at, (m, b or 1, n, k)))[:NEAREST_WON]]
        return [c for c in dict.fromkeys(made) if set(self.needed) <= set(c.values)]

    def bucket_with(self, more: Mapping[str, Any], m: int) -> str:
        """The bucket of M in the default file if it had these buckets too. Raises ResolveError, ConfigFileError,
        OSError."""
        return bucket_for({**self._tree.read(self._place.default).buckets, **more}, m, self.bounds)

    @property
    def needed(self) -> tuple[str, ...]:
        """Keys that a config of the kind must have on this chip."""
        return self._kind.required_on(self._arch)

    def _nearest(self, n: int, k: int, b: int | None) -> list[Path]:
        """Files of other shapes by the ratio of their sizes, the nearest first."""
        near = sorted(self._others, key=lambda path: (_away(self._others[path], (b or 1, n, k)), path.name))
        return near[:NEAREST]


# Values as AITER rewrites them for the problem (source.Wrapper.completed).
Completed = Callable[[dict[str, Any]], dict[str, Any]]

TILES_M = (4, 8, 16, 32, 64, 128, 256)
TILES_N = (16, 32, 64, 128, 256)
STEPS_K = (64, 128, 256, 512, 1024)
WARPS = (1, 2, 4, 8)
STAGES = (1, 2, 3)
SPLITS = (1, 2, 3, 4, 7, 8, 14, 16)
GROUPS = (1, 2, 4, 8, 16)
WAVES = (0, 1, 2, 4, 6, 8)
INSTRUCTIONS = (16, 32)
MODIFIERS = (None, ".cg")
# NVIDIA's loads are further from its multiprocessors than AMD's; its files are nobody's but the user's.
CUDA_STAGES = (2, 3, 4, 5)
CUDA_STEPS_K = (32, *STEPS_K[:4])
LEAST_CUDA_TILE = 16
MOST_ACCUMULATORS = {"cuda": 128, "hip": 256}  # registers of a lane for the sums; beyond them everything else spills
MOST_PARTS, MOST_PROGRAMS = 256 << 20, 1 << 18  # bytes of the parts of its splits; programs of a launch
WEIGHTS: dict[str, tuple[float, ...]] = {
    "hip": (0.151, 0.229, 0.801, 0.365, 0.18, 0.022, -0.04, 0.233, 0.611),
    "cuda": (0.03, 0, 0, 0, 0, 0, 0, 0, 0),
}
"""Weights of `traits`. Those of AMD were fitted to half of AITER's files of gfx950 (benchmarks/aiter_configs.py); for
NVIDIA there are none."""
ROOTS = 16  # so many combinations, the best by the model, have their other knobs varied
DEFAULT_GROUP = 8


def candidates(
    kind: ConfigKind, p: Problem, target: Target, completed: Completed, seeds: Iterable[AiterConfig] = (), most: int = 0
) -> list[AiterConfig]:
    """Legal configs without doubles in the model's order, at most `most` (0: all). Seeds, legal or not, are not among
    them, but the configs that differ from one in one knob are."""
    rough = [c for c in _combined(kind, p, target) if is_legal(kind, p, c, target)]
    ordered = order(p, target, distinct(rough, p, completed))
    near = [v for c in seeds for v in variations(kind, c, target)]
    other = [v for c in ordered[:ROOTS] for v in variations(kind, c, target, shaping=False)]
    varied = distinct((v for v in (*near, *other) if is_legal(kind, p, v, target)), p, completed)
    rest = ordered[: max(most // 2, most - len(varied))] if most else ordered
    found = distinct([*rest, *varied], p, completed)
    return order(p, target, found[:most] if most else found)


def knobs(kind: ConfigKind, target: Target) -> dict[str, tuple[Any, ...]]:
    """Values of each key that a kind's files hold for a chip, in the files' order of keys."""
    hip = target.backend == "hip"
    steps: tuple[int, ...] = STEPS_K if hip else CUDA_STEPS_K
    if "blockscale" in kind.name:
        steps = (128,)
    elif "a4w4" in kind.name or "a16w4" in kind.name:
        steps = (256, 512, 1024)
    all_knobs: dict[str, tuple[Any, ...]] = {
        "BLOCK_SIZE_M": TILES_M if hip else tuple(m for m in TILES_M if m >= LEAST_CUDA_TILE),
        "BLOCK_SIZE_N": TILES_N,
        "BLOCK_SIZE_K": steps,
        "GROUP_SIZE_M": GROUPS,
        "num_warps": WARPS,
        "num_stages": STAGES if hip else CUDA_STAGES,
        "waves_per_eu": WAVES if hip else WAVES[:1],  # read by AMD's compiler alone
        "matrix_instr_nonkdim": INSTRUCTIONS,
        "cache_modifier": MODIFIERS,
        "NUM_KSPLIT": SPLITS,
    }
    return {k: v for k, v in all_knobs.items() if k in kind.required_on(str(target.arch))}


_SHAPING = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages", "NUM_KSPLIT")


def _combined(kind: ConfigKind, p: Problem, target: Target) -> Iterator[AiterConfig]:
    there = knobs(kind, target)
    rest = {k: v[0] for k, v in there.items() if k not in _SHAPING}
    if "GROUP_SIZE_M" in rest:
        rest["GROUP_SIZE_M"] = DEFAULT_GROUP
    if 2 in there.get("waves_per_eu", ()):
        rest["waves_per_eu"] = 2
    names = [k for k in _SHAPING if k in there]
    for chosen in itertools.product(*(there[k] for k in names)):
        yield config_of({**rest, **dict(zip(names, chosen, strict=True))})


def variations(kind: ConfigKind, c: AiterConfig, target: Target, *, shaping: bool = True) -> Iterator[AiterConfig]:
    """Configs that differ from one by another value of one knob: shaping ones by a step, the others by any."""
    for key, legal in knobs(kind, target).items():
        now = c.values.get(key)
        near: list[Any] = []
        if key not in _SHAPING:
            near = [v for v in legal if v != now]
        elif shaping and now in legal:
            at = legal.index(now)
            near = [*legal[max(0, at - 1) : at], *legal[at + 1 : at + 2]]
        for value in near:
            yield config_of({**c.values, key: value})


def order(p: Problem, target: Target, found: Iterable[AiterConfig]) -> list[AiterConfig]:
    """Configs by the estimate, the fastest first."""
    return sorted(found, key=lambda c: (estimate(p, c, target), c.name))


def estimate(p: Problem, c: AiterConfig, target: Target) -> float:
    """Microseconds by the search's model, corrected for what AITER's shipped files prefer."""
    weights = WEIGHTS[target.backend]
    return estimate_us(p, c.knobs, target) * math.exp(sum(w * x for w, x in zip(weights, traits(p, c), strict=True)))


def traits(p: Problem, c: AiterConfig) -> tuple[float, ...]:
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


def identity(c: AiterConfig, p: Problem, completed: Completed) -> object:
    """Equal for configs that start the same kernel alike: as AITER completes them, and without an order of tiles where
    there is one row of tiles, or split-K, which has an order of its own."""
    values = completed(c.values)
    rows = -(-p.m // c.get("BLOCK_SIZE_M"))
    if rows == 1 or (values.get("NUM_KSPLIT") or 1) > 1:
        values["GROUP_SIZE_M"] = 1
    return tuple(sorted((k, str(v)) for k, v in values.items()))


def distinct(found: Iterable[AiterConfig], p: Problem, completed: Completed) -> list[AiterConfig]:
    """Configs without doubles: of those that start the same kernel alike the first."""
    out: dict[object, AiterConfig] = {}
    for c in found:
        out.setdefault(identity(c, p, completed), c)
    return list(out.values())


def is_legal(kind: ConfigKind, p: Problem, c: AiterConfig, target: Target) -> bool:
    """False for a config that cannot be a good one for the problem, or does not run, before anything is compiled."""
    x, sums = c.knobs, accumulators(c.knobs, target)
    tiles = p.b * -(-p.m // x.block_m) * -(-p.n // x.block_n)
    parts = 4 * p.b * p.m * p.n * x.split_k
    return not (
        (x.block_m >= 2 * max(16, p.m) or x.block_n >= 2 * max(32, p.n))  # the tile is twice the output
        or x.block_k > (p.k if x.split_k > 1 else 2 * p.k)  # a step is longer than K
        or (x.split_k > 1 and (p.k // x.split_k < x.block_k or parts > MOST_PARTS))  # a split has less than one step
        or tiles * x.split_k > MOST_PROGRAMS
        or sums > MOST_ACCUMULATORS[target.backend]
        or sums + 32 > MAX_REGISTERS[target.backend]
        or (sums + 32) * x.num_warps * target.warp_size > target.registers
        or least_shared_bytes(kind, p, c, target) > target.shared_bytes
    )


def least_shared_bytes(kind: ConfigKind, p: Problem, c: AiterConfig, target: Target) -> int:
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
