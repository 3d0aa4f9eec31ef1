"""Places of AITER's shipped Triton configs in the order of our model, before and after it is corrected for them.

    python -m benchmarks.aiter_configs TREE [--gfx gfx950] [--buckets 500]

A shipped bucket stands against 100 drawn legal configs of the same shape. The weights (`space.WEIGHTS`) are those of a
conditional logit (the shipped config is chosen with probability exp(-estimate) among the drawn) fitted to half of the
files; the other half is judged.
"""

from __future__ import annotations

import argparse
import math
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from worker.triton_configs.config_file import bound_of
from worker.triton_configs.kinds import BY_NAME
from worker.triton_configs.resolve import ResolveError, Resolver
from worker.tuners.aiter_triton import space
from worker.tuners.aiter_triton.problem import KindProblem, family_of, problem_of
from worker.tuners.aiter_triton.spec import tuned_kinds
from worker.tuners.common.problem import UnsupportedError
from worker.tuners.search.target import Target, datasheet_target
from worker.tuners.search.tile_config import TileConfig, tile_config
from worker.tuners.search.time_model import estimate_us

DRAWN, TRIES = 100, 3000
FIRST = 0.08
"""Share of the candidates that a search tries at most (48 of 600)."""
BATCH = 16
_SIZES = re.compile(r"(?:-B=(\d+))?-N=(\d+)-K=(\d+)\Z")
Case = tuple[str, str, KindProblem, TileConfig]
"""(kind, file, problem at the bucket's bound, shipped config)."""
Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]


def shipped(resolver: Resolver, gfx: str) -> Iterator[Case]:
    """Every M_LEQ bucket of the files of a shape."""
    for name in tuned_kinds():
        kind = BY_NAME[name]
        try:
            place = resolver.folder(kind.config, kind.backend)
        except ResolveError:
            continue
        stem = place.prefix + kind.config
        for path in sorted(place.folder.glob(f"{stem}-*.json")):
            sizes = _SIZES.match(path.stem.removeprefix(stem))
            if not sizes:
                continue
            b, n, k = (int(s or 0) for s in sizes.groups())
            for bucket, values in resolver.read(path).buckets.items():
                side, m = bound_of(bucket)
                key: dict[str, int | str] = {"M": m, "N": n, "K": k, **({"B": b or BATCH} if kind.batched else {})}
                if side == "LEQ":
                    try:
                        yield name, path.name, problem_of(name, family_of(kind), key, gfx), tile_config(values)
                    except UnsupportedError:
                        continue


def traits(p: KindProblem, c: TileConfig, target: Target) -> list[float]:
    """Log of the model's estimate, then what it is corrected by."""
    return [math.log(estimate_us(p, c.knobs, target)), *map(float, space.traits(p, c))]


def against(case: Case, target: Target, rng: random.Random) -> Matrix:
    """Traits of the shipped config (first row) and of drawn legal ones."""
    name, _, p, config = case
    kind = BY_NAME[name]
    knobs = space.legal_values(kind, target)
    rows, seen = [traits(p, config, target)], set()
    for _ in range(TRIES):
        c = tile_config({k: rng.choice(v) for k, v in knobs.items()})
        x = c.knobs
        shape = (x.block_m, x.block_n, x.block_k, x.group_m, x.split_k, x.num_warps, x.num_stages)
        if shape not in seen and space.is_legal(kind, p, c, target):
            seen.add(shape)
            rows.append(traits(p, c, target))
        if len(rows) > DRAWN:
            break
    return np.array(rows)


def places(weights: Matrix, found: list[Matrix]) -> Matrix:
    """Share of the drawn configs that come before the shipped one."""
    return np.array([(x @ weights < x[0] @ weights).sum() / max(1, len(x) - 1) for x in found])


def fitted(found: list[Matrix], steps: int = 3000) -> Matrix:
    """Weights by gradient ascent, relative to that of the estimate."""
    w = np.zeros(found[0].shape[1])
    w[0] = 2.0
    for _ in range(steps):
        up = np.zeros_like(w)
        for x in found:
            score = -(x @ w)
            q = np.exp(score - score.max())
            up += (q / q.sum()) @ x - x[0]
        w += 0.3 / len(found) * up - 3e-4 * w
    relative: Matrix = w / w[0]
    return relative


def main() -> None:
    """Fit, and judge the half that was not fitted."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("tree", type=Path)
    options.add_argument("--gfx", default="gfx950")
    options.add_argument("--buckets", type=int, default=500)
    args = options.parse_args()
    rng, target = random.Random(1), datasheet_target(args.gfx)
    cases = list(shipped(Resolver(args.tree, args.gfx), args.gfx))
    rng.shuffle(cases)
    cases = cases[: args.buckets]
    files = sorted({file for _, file, *_ in cases})
    rng.shuffle(files)
    learned = set(files[::2])
    found = [against(case, target, rng) for case in cases]
    weights = fitted([x for x, case in zip(found, cases, strict=True) if case[1] in learned])
    rest = [(case[0], x) for x, case in zip(found, cases, strict=True) if case[1] not in learned]
    alone = np.zeros_like(weights)
    alone[0] = 1.0
    print(
        f"{len(cases)} buckets of {len(files)} files, {len(rest)} judged; weights {np.round(weights[1:], 3).tolist()}"
    )
    by_kind: dict[str, list[Matrix]] = defaultdict(list)
    for kind, x in rest:
        by_kind[kind].append(x)
    for kind, some in [("all", [x for _, x in rest]), *sorted(by_kind.items())]:
        one, other = places(alone, some), places(weights, some)
        print(
            f"{kind:28} {len(some):4} buckets: among the first {FIRST:.0%} {np.mean(one <= FIRST):.0%} by the model,"
            f" {np.mean(other <= FIRST):.0%} corrected; median place {np.median(one):.1%}, {np.median(other):.1%}"
        )


if __name__ == "__main__":
    main()
