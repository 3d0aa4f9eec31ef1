"""A build of AITER, and for each tuned row whether it loads there, needs a rebuild, or cannot.

Which kernels the tree has is the worker's knowledge (`worker.aiter_tree.kernels`); which of them were compiled
follows from the built modules where they are at hand, else from the tables that lie in the tree.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

from orchestrator.errors import InputError
from orchestrator.tables.kinds import describe_own, kind_of
from orchestrator.tables.locate import shipped_tables
from orchestrator.tables.open import read_head
from orchestrator.tables.tuned import NULLS, Key, TableRow, key_dict, read_table
from worker.aiter_tree.kernels import KernelAvailability, KernelReader
from worker.aiter_tree.locate import NotATreeError, read_text, tree_at
from worker.families import Family, backend_of

Standing = Literal["loads", "rebuild", "cannot", "unread"]
STANDINGS: tuple[Standing, ...] = ("loads", "rebuild", "cannot", "unread")


_IMPORTED = {"flydsl": "flydsl", "triton": "", "opus": ""}
"""Backends that dispatch imports from aiter/ops/<backend> when a row names them, with the package that they need."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Outcome of one row. `unread`: the list of kernels cannot be read, so that nothing is known."""

    standing: Standing
    why: str = ""
    opus: bool = False


@dataclass(frozen=True, slots=True)
class Compiled:
    """The rows that a tree's modules are compiled from: shapes with their kernels, and kernels alone."""

    shapes: frozenset[tuple[Key, str]]
    kernels: frozenset[str]


@dataclass(frozen=True, slots=True)
class StartMerge:
    """AITER's merge of a family's tables at its start, by what a tree's aiter/jit/core.py says of it.

    `folder`: model_configs is merged (since v0.1.7). `stops`: a key that comes twice stops it (since 94a6edda3a,
    2026-04-01); before, AITER silently left out one of the rows. `one_header`: so do tables of different
    columns (until v0.1.12.post2). `names`: the columns of the key, those of the family's untuned list with cu_num
    (since v0.1.9) and gfx (since v0.1.12.post2); `tag`: and `_tag`.
    """

    folder: bool
    stops: bool
    one_header: bool
    names: tuple[str, ...]
    tag: bool

    def place(self, row: TableRow, family: Family) -> tuple[int | str, ...]:
        """The key of a row in this merge."""
        key = key_dict(row.key, family)
        return (*(key[n] for n in self.names), row.tag if self.tag else "")


class Build:
    """One build. `name`: how the user called it; `whole`: its Python packages lie beside it, as in an image."""

    def __init__(self, root: Path, name: str = "", *, whole: bool = False) -> None:
        """Raises InputError where there is no AITER."""
        self.name = name or str(root)
        try:
            self._kernels = KernelReader(tree_at(root))
        except NotATreeError as e:
            raise InputError(f"--build {self.name}: no AITER tree is there: {e}") from e
        self.tree = self._kernels.tree
        self.configs = self.tree.package / "configs"
        self._whole = whole or self.tree.wheel
        self._compiled = cache(self._read_compiled)
        self.start = cache(self._read_start)

    @property
    def problems(self) -> Sequence[str]:
        """Parts of the tree that could not be read."""
        return self._kernels.problems

    def answer(self, family: Family, key: Key, cells: Mapping[str, str]) -> Answer:
        """The outcome of a row. `key` begins with its gfx and cu_num."""
        if kind_of(cells) == "own":
            return Answer("cannot", f"{describe_own(cells)}, and AITER has none of that name")
        kernel = self._kernels.kernel(family.name, str(key[0]), cells)
        if kernel.standing in ("there", "compiled") and (why := self._not_importable(family, cells)):
            return Answer("cannot", why)
        if kernel.standing == "there":
            return Answer("loads")
        if kernel.standing != "compiled":
            return Answer(kernel.standing, kernel.why)
        built = self._is_built(family, key, cells.get("kernelName", ""), kernel)
        return Answer("loads", opus=kernel.opus) if built else Answer("rebuild", "is not compiled in", kernel.opus)

    def tables(self, family: Family) -> list[Path]:
        """The tables that it merges at its start: the family's own, then those of model_configs."""
        files = [self.configs / family.tuned_csv]
        if self.start(family).folder:
            files += shipped_tables(self.configs / "model_configs", family)
        return [f for f in files if f.is_file()]

    @cached_property
    def chips(self) -> frozenset[str]:
        """The architectures that it knows; none where they are not readable."""
        texts = (_text(self.tree.package / "jit" / "utils" / f) for f in ("build_targets.py", "chip_info.py"))
        return frozenset(re.findall(r"[\"'](gfx[0-9a-f]+)[\"']", "".join(texts)))

    def header(self, family: Family, *, untuned: bool = False) -> tuple[str, ...]:
        """The columns of the family's own table, or of its untuned list, by our names; () if the tree has none."""
        try:
            text = read_head(self.configs / (family.untuned_csv if untuned else family.tuned_csv), 4096, InputError)
        except InputError:
            return ()
        return family.from_aiter(c.strip() for c in next(csv.reader(text.splitlines()[:1]), []))

    def _read_start(self, family: Family) -> StartMerge:
        core = _text(self.tree.package / "jit" / "core.py")
        listed = self.header(family, untuned=True)
        chip = [n for n in ("gfx", "cu_num") if f'keys.append("{n}")' in core and n in family.chip_columns]
        names = (*chip, *(n for n in family.key_names if n in listed))
        return StartMerge(
            "model_configs" in core,
            "duplicate shape" in core and bool(listed),  # without a list AITER compares nothing
            "Column mismatch" in core,
            names if listed else (*family.chip_columns, *family.key_names),
            '"_tag"' in core,
        )

    def _not_importable(self, family: Family, cells: Mapping[str, str]) -> str:
        """The reason for which dispatch cannot import the backend of a row's libtype, "" where it can."""
        backend = backend_of(family.name, cells)
        if backend not in _IMPORTED or cells.get("libtype", "") in NULLS:
            return ""
        if not (self.tree.package / "ops" / backend).is_dir():
            return f"libtype {backend} is not importable: there is no aiter/ops/{backend}"
        package = _IMPORTED[backend]
        if package and self._whole and not (self.tree.root / package).is_dir():
            return f"libtype {backend} is not importable: the package {package} is not installed"
        return ""

    def _is_built(self, family: Family, key: Key, name: str, kernel: KernelAvailability) -> bool:
        if kernel.in_module is not None and (kernel.by_name or not kernel.in_module):
            return kernel.in_module
        compiled = self._compiled(family)
        return name in compiled.kernels if kernel.by_name else (key, name) in compiled.shapes

    def _read_compiled(self, family: Family) -> Compiled:
        """The compiled rows from the family's own table and those of model_configs."""
        tables = [read_table(f, family, lenient=True) for f in self.tables(family)]
        named = [(r.key, s.cells(r).get("kernelName", "")) for s in tables for r in s.rows]
        return Compiled(frozenset(named), frozenset(k for _, k in named))


def _text(path: Path) -> str:
    """The text of a file of the tree, "" where it is not readable."""
    try:
        return read_text(path)
    except (OSError, ValueError):
        return ""
