"""Readers of a default file of AITER's: the shapes that a changed bucket moves, and the operators that compute them.

A shape without a file of its own reads the default. So a default file may change only if each of these shapes was
measured through each of these operators: `merge.py` asks `missing_measurements`, and refuses if there are some.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from orchestrator.configs.winners import WinnerFile
from orchestrator.errors import InputError
from orchestrator.files.read import csv_records
from orchestrator.files.write import write_csv
from orchestrator.tables.table_names import shipped_tables
from worker.families import FAMILIES
from worker.text import and_more, plural
from worker.triton_configs.kinds import Caller, ConfigKind
from worker.triton_configs.loader_calls import find_readers
from worker.triton_configs.resolve import TRITON, ResolveError, Resolver, bucket_for

RECHECK_LIST = "recheck.csv"
"""The list of shapes that have to be measured; `tune` reads it."""


class ShapeSizes(NamedTuple):
    """A shape; `b` is None where the kind has none."""

    b: int | None
    n: int
    k: int
    m: int


def other_operators(resolver: Resolver, kind: ConfigKind) -> dict[str, bool]:
    """Other operators of the tree that read the kind's files on its chip, found by their calls of the loader; True for
    one that the tuner can call."""
    folder = resolver.folder_of(kind)
    known_callers: dict[str, list[Caller]] = {_below_gemm(kind.module): []}
    for caller in kind.callers:
        known_callers.setdefault(_below_gemm(caller.module), []).append(caller)
    operators: dict[str, bool] = {}
    for module, backends in find_readers(resolver.root / TRITON, kind.config).items():
        reads_folder = False
        with suppress(ResolveError):  # the tree has no file for it
            reads_folder = any(resolver.folder(kind.config, backend) == folder for backend in backends)
        if not reads_folder:
            continue
        name = _below_gemm(f"aiter.ops.triton.{module}")
        if name not in known_callers:
            operators[name] = False
            continue
        for caller in known_callers[name]:
            if caller.reads_on(resolver.arch):
                operators[caller.function] = caller.is_callable
    return operators


def _below_gemm(module: str) -> str:
    """A module's name whether or not its tree has the folders of `gemm` (since 2026-01-07)."""
    return re.sub(r"^aiter\.ops\.triton\.(?:gemm\.\w+\.)?", "", module)


def shapes_reading_default(
    resolver: Resolver, kind: ConfigKind, buckets: Sequence[str], lists: Sequence[Path]
) -> list[ShapeSizes]:
    """The shapes of AITER's lists of the family and of the user's lists that read these buckets of the default.

    Raises InputError for a list without columns M, N and K (and B for a batched kind).
    """
    default = resolver.folder_of(kind).default
    buckets_after = resolver.read(default).buckets | {name: {} for name in buckets}
    bounds = resolver.bounds(kind)
    shapes: set[ShapeSizes] = set()
    for path in (*_lists_of_aiter(resolver.root, kind), *lists):
        shapes |= set(_shapes_in(path, kind))
    reading: list[ShapeSizes] = []
    for shape in shapes:
        _, has_own_file = resolver.file_for(kind, shape.n, shape.k, shape.b)
        if not has_own_file and bucket_for(buckets_after, shape.m, bounds) in buckets:
            reading.append(shape)
    return sorted(reading)


def missing_measurements(
    resolver: Resolver, winner_file: WinnerFile, lists: Sequence[Path], checked: Sequence[str]
) -> list[str]:
    """Measurements that are missing before the default may change: a sentence an operator.

    `lists`: the user's lists of shapes. `checked`: operators that the user vouches for. The shapes to measure are
    written into `recheck.csv` beside the winners, which `tune` reads.
    """
    kind = winner_file.place.kind
    needed = shapes_reading_default(resolver, kind, list(winner_file.winners), lists)
    measured = {
        (row.caller, ShapeSizes(row.b if kind.batched else None, row.n, row.k, row.m)) for row in winner_file.measured
    }
    can_call = {"": True}  # by operator; "" is the kind's own wrapper
    can_call |= {name: can for name, can in other_operators(resolver, kind).items() if name not in checked}
    missing: dict[str, list[ShapeSizes]] = {}
    for operator in can_call:
        shapes = [shape for shape in needed if (operator, shape) not in measured]
        if shapes:
            missing[operator] = shapes
    if not missing:
        return []
    to_measure = {shape for operator, shapes in missing.items() if can_call[operator] for shape in shapes}
    recheck_list = winner_file.path.with_name(RECHECK_LIST)
    _write_shapes(recheck_list, kind, sorted(to_measure))
    buckets = and_more(list(winner_file.winners), 3)
    sentences: list[str] = []
    for operator, shapes in missing.items():
        names = and_more([f"{s.m}x{s.n}x{s.k}" for s in shapes], 4)
        todo = _what_to_do(operator, len(shapes), can_call[operator], recheck_list)
        sentences.append(
            f"{winner_file.path.name}: {plural(len(shapes), 'shape')} of {len(needed)} that read {buckets} through"
            f" {operator or kind.function} not measured again: {names}; {todo}"
        )
    return sentences


def _what_to_do(operator: str, shapes: int, can_call: bool, path: Path) -> str:
    cost = plural(2 * shapes, "measurement")
    if not can_call:
        return f"the tuner cannot call it: compare its {cost} yourself, then give --checked {operator}"
    text = f"tune {path} with the same -O default ({cost}, old and new), then merge that run"
    if operator:
        text += f" (where it cannot run, a slot's log says why; --checked {operator} vouches for it)"
    return text


def _write_shapes(path: Path, kind: ConfigKind, shapes: Sequence[ShapeSizes]) -> None:
    if kind.batched:
        write_csv(path, ("B", "M", "N", "K"), ([s.b, s.m, s.n, s.k] for s in shapes))
    else:
        write_csv(path, ("M", "N", "K"), ([s.m, s.n, s.k] for s in shapes))


def _lists_of_aiter(root: Path, kind: ConfigKind) -> Iterator[Path]:
    """AITER's shipped lists of the kind's family, tuned and untuned, those of models too."""
    family = FAMILIES.get(kind.family)
    if family is None:
        return
    configs = root / "aiter" / "configs"
    for folder in (configs, configs / "model_configs"):
        yield from shipped_tables(folder, family)
        yield from sorted(folder.glob(f"*{Path(family.untuned_csv).stem}*.csv"))


def _shapes_in(path: Path, kind: ConfigKind) -> Iterator[ShapeSizes]:
    columns = ("B", "N", "K", "M") if kind.batched else ("N", "K", "M")
    places: list[int] = []  # of the columns
    for line, _, cells in csv_records(path):
        if not places:
            lacking = [column for column in columns if column not in cells]
            if lacking:
                raise InputError(f"{path}:{line}: lacks {', '.join(lacking)}: no list of shapes of {kind.name}")
            places = [list(cells).index(column) for column in columns]
            continue
        if not any(cells):
            continue
        try:
            *batch, n, k, m = (int(cells[place]) for place in places)
        except (ValueError, IndexError):
            raise InputError(f"{path}:{line}: {', '.join(columns)} are not whole numbers") from None
        yield ShapeSizes(batch[0] if batch else None, n, k, m)
