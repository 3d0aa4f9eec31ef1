"""Shapes to measure again before a default Triton config of AITER changes: all that read a changed bucket of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.tables.locate import shipped_tables
from orchestrator.tables.open import csv_records
from orchestrator.tables.write import write_csv
from orchestrator.triton_configs.winners import WonFile
from worker.families import FAMILIES
from worker.text import and_more, plural
from worker.triton_configs.kinds import ConfigKind
from worker.triton_configs.resolve import Resolver, bucket_for

LIST = "recheck.csv"
Shape = tuple[int | None, int, int, int]
"""(B, N, K, M), B None where the kind has none."""


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


def recheck(resolver: Resolver, won: WonFile, lists: Sequence[Path], folder: Path) -> list[str]:
    """Measurements that are missing before the default may change: a sentence a reader, [] where all was measured.

    The shapes to measure are written into `recheck.csv` of `folder`, which `tune` reads.
    """
    needed = readers_of(resolver, won.kind, list(won.winners), lists)
    done = {(r.caller, (r.b if won.kind.batched else None, r.n, r.k, r.m)) for r in won.rows}
    callers = ["", *(c.function for c in won.kind.callers if c.reads_on(won.gfx))]
    missing = {c: [s for s in needed if (c, s) not in done] for c in callers}
    every = sorted({s for some in missing.values() for s in some})
    if not every:
        return []
    columns = ("B", "M", "N", "K") if won.kind.batched else ("M", "N", "K")
    rows = ([*([b] if won.kind.batched else []), m, n, k] for b, n, k, m in every)
    write_csv(folder / LIST, columns, rows)
    out = []
    for caller, some in missing.items():
        if some:
            todo = f"tune {folder / LIST} ({plural(2 * len(some), 'measurement')}, old and new), then merge that run"
            out.append(
                f"{won.path.name}: {plural(len(some), 'shape')} of {len(needed)} that read"
                f" {and_more(list(won.winners), 3)} through {caller or won.kind.function} not measured again:"
                f" {and_more([f'{m}x{n}x{k}' for _, n, k, m in some], 4)};"
                f" {'the tuner measures no fused operator, so this default stays' if caller else todo}"
            )
    return out


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
