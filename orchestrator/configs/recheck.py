"""Shapes to measure again before a default Triton config of AITER changes: all that read a changed bucket of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from orchestrator.configs.winners import WonFile
from orchestrator.errors import InputError
from orchestrator.tables.locate import shipped_tables
from orchestrator.tables.open import csv_records
from orchestrator.tables.write import write_csv
from worker.families import FAMILIES
from worker.text import and_more, plural
from worker.triton_configs.kinds import Caller, ConfigKind, readers
from worker.triton_configs.resolve import TRITON, ResolveError, Resolver, bucket_for

LIST = "recheck.csv"
Shape = tuple[int | None, int, int, int]
"""(B, N, K, M), B None where the kind has none."""


def resolver_of(root: Path, gfx: str) -> Resolver:
    """The resolver of a user's tree for a chip. Raises InputError where the tree has no loader that is known."""
    try:
        return Resolver(root, gfx)
    except ResolveError as e:
        raise InputError(str(e)) from e


def readers_of(resolver: Resolver, kind: ConfigKind, buckets: Sequence[str], lists: Sequence[Path]) -> list[Shape]:
    """The shapes of AITER's lists of the family and of the user's lists that read these buckets of the default file.

    Raises InputError for a list without columns M, N and K (and B for a batched kind).
    """
    default = resolver.place(kind.config, kind.backend).default
    there = resolver.read(default).buckets
    would = there | {b: {} for b in buckets}
    shapes = {s for path in (*_of_aiter(resolver.root, kind), *lists) for s in _shapes(path, kind)}
    return sorted(
        (b, n, k, m)
        for b, n, k, m in shapes
        if not resolver.file_for(kind.config, n, k, b if kind.batch_in_name else None, kind.backend)[1]
        and bucket_for(would, m, resolver.bounds(kind)) in buckets
    )


def operators(resolver: Resolver, kind: ConfigKind) -> dict[str, bool]:
    """Other operators of the tree that read the kind's files on the resolver's chip, found by their calls of the
    loader; True for one that the tuner can call."""
    place = resolver.place(kind.config, kind.backend)
    known: dict[str, list[Caller]] = {_below_gemm(kind.module): []}
    for c in kind.callers:
        known.setdefault(_below_gemm(c.module), []).append(c)
    out: dict[str, bool] = {}
    for module, backends in readers(resolver.root / TRITON, kind.config).items():
        name = _below_gemm(f"aiter.ops.triton.{module}")
        with suppress(ResolveError):  # what it would read is not there
            if any(resolver.place(kind.config, backend) == place for backend in backends):
                here = [c for c in known.get(name, ()) if c.reads_on(resolver.arch)]
                out |= {c.function: c.given is not None for c in here} if name in known else {name: False}
    return out


def recheck(
    resolver: Resolver, won: WonFile, lists: Sequence[Path], folder: Path, checked: Sequence[str] = ()
) -> list[str]:
    """Measurements that are missing before the default may change: a sentence an operator, [] where all was measured.

    `checked`: operators that the user vouches for. The shapes to measure are written into `recheck.csv` of `folder`,
    which `tune` reads.
    """
    needed = readers_of(resolver, won.kind, list(won.winners), lists)
    done = {(r.caller, (r.b if won.kind.batched else None, r.n, r.k, r.m)) for r in won.rows}
    through = {"": True} | {name: can for name, can in operators(resolver, won.kind).items() if name not in checked}
    missing = {name: some for name in through if (some := [s for s in needed if (name, s) not in done])}
    if not missing:
        return []
    columns = ("B", "M", "N", "K") if won.kind.batched else ("M", "N", "K")
    every = sorted({s for name, some in missing.items() if through[name] for s in some})
    rows = ([*([b] if won.kind.batched else []), m, n, k] for b, n, k, m in every)
    write_csv(folder / LIST, columns, rows)
    out = []
    for name, some in missing.items():
        cost = plural(2 * len(some), "measurement")
        todo = f"tune {folder / LIST} with the same -O default ({cost}, old and new), then merge that run"
        todo += f" (where it cannot run, a slot's log says why; --checked {name} vouches for it)" if name else ""
        by_hand = f"the tuner cannot call it: compare its {cost} yourself, then give --checked {name}"
        out.append(
            f"{won.path.name}: {plural(len(some), 'shape')} of {len(needed)} that read"
            f" {and_more(list(won.winners), 3)} through {name or won.kind.function} not measured again:"
            f" {and_more([f'{m}x{n}x{k}' for _, n, k, m in some], 4)}; {todo if through[name] else by_hand}"
        )
    return out


def _below_gemm(module: str) -> str:
    """A module's name whether or not its tree has the folders of `gemm` (since 2026-01-07)."""
    return re.sub(r"^aiter\.ops\.triton\.(?:gemm\.\w+\.)?", "", module)


def _of_aiter(root: Path, kind: ConfigKind) -> Iterator[Path]:
    """AITER's shipped lists of the kind's family, tuned and untuned, those of models too."""
    family, configs = FAMILIES.get(kind.family), root / "aiter" / "configs"
    if family is None:
        return
    for folder in (configs, configs / "model_configs"):
        yield from shipped_tables(folder, family)
        yield from sorted(folder.glob(f"*{Path(family.untuned_csv).stem}*.csv"))


def _shapes(path: Path, kind: ConfigKind) -> Iterator[Shape]:
    names = ("B", "N", "K", "M") if kind.batched else ("N", "K", "M")
    at: list[int] = []
    for line, _, cells in csv_records(path):
        if not at:
            if lacking := [c for c in names if c not in cells]:
                raise InputError(f"{path}:{line}: lacks {', '.join(lacking)}: no list of shapes of {kind.name}")
            at = [list(cells).index(c) for c in names]
        elif any(cells):
            try:
                numbers = [int(cells[i]) for i in at]
            except (ValueError, IndexError):
                raise InputError(f"{path}:{line}: {', '.join(names)} are no whole numbers") from None
            yield (numbers[0], *numbers[1:]) if kind.batched else (None, *numbers)  # type: ignore[misc]
