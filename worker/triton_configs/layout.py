"""Winners laid into the file that a shape resolves to today, so that no M moves that none of them proves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from worker.triton_configs.kinds import FILLED_IN, ConfigKind
from worker.triton_configs.resolve import Bucket, Resolver, bucket_for, changed, indent_of, written


class Layout(NamedTuple):
    """Buckets of `source`, the file that the shape reads now, and those that `target` is to hold, with its text."""

    source: Path
    target: Path
    old: dict[str, Bucket]
    new: dict[str, Bucket]
    text: str


def lay_out(
    resolver: Resolver, kind: ConfigKind, shape: tuple[int | None, int, int] | None, won: Mapping[str, Bucket]
) -> Layout:
    """The file of a shape (B, N, K), None for the default file, with the winners by bucket.

    Raises ResolveError, ConfigFileError, OSError, and ValueError where no bucket can hold what must not move.
    """
    source = target = resolver.place(kind.config, kind.backend).default
    if shape is not None:
        b, n, k = shape
        b = b if kind.batch_in_name else None
        source, _ = resolver.file_for(kind.config, n, k, b, kind.backend)
        target = resolver.target(kind.config, n, k, b, kind.backend)
    base = resolver.read(source)
    old = base.buckets
    filled = {key: v for key, v in FILLED_IN.items() if key in kind.required}
    whole = {name: _ordered(old.get(name, {}), values | filled | values) for name, values in won.items()}
    new = laid_out(old, whole, resolver.bounds(kind))
    text = changed(base, new) if target == source else written(new, indent_of(base.text))
    return Layout(source, target, old, new, text)


def laid_out(old: Mapping[str, Bucket], won: Mapping[str, Bucket], bounds: Sequence[int]) -> dict[str, Bucket]:
    """The buckets of a file with winners, where every M that none of them proves keeps its config.

    M_LEQ_x proves the M above the bound before x, any other bucket those above the last bound. Where a winner would
    move further M, their old config gets a bucket of its own. Raises ValueError where no bucket can hold them: an old
    M_GEQ_x begins within what one M_LEQ_y covers.
    """
    new = {**old, **won}

    def wanted(m: int) -> Bucket:
        mine = next((f"M_LEQ_{x}" for x in bounds if m <= x), "") or bucket_for(new, m, bounds)
        return won[mine] if mine in won else old[bucket_for(old, m, bounds)]

    for x in reversed(bounds):
        if new[bucket_for(new, x, bounds)] != wanted(x):
            new[f"M_LEQ_{x}"] = wanted(x)
    moved = [m for x in bounds for m in (x - 1, x, x + 1) if m and new[bucket_for(new, m, bounds)] != wanted(m)]
    if moved:
        raise ValueError(f"M={moved[0]} would get another config, unmeasured: tune the buckets around it as well")
    return new


def _ordered(old: Bucket, values: Bucket) -> Bucket:
    """The winner's values in the order of the old bucket's keys."""
    return {k: values[k] for k in old if k in values} | values
