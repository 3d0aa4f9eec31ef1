"""A build of AITER, and for each tuned row whether it loads there, needs a rebuild, or cannot.

Which kernels the tree has is the worker's knowledge (`worker.aiter_tree.kernels`); which of them were compiled
follows from the built modules where they are at hand, else from the tables that lie in the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from orchestrator.errors import InputError
from orchestrator.tables.locate import shipped_tables
from orchestrator.tables.tuned import Key, read_shipped
from orchestrator.tuned_db.kinds import describe_own, kind_of
from worker.aiter_tree.kernels import KernelAvailability, KernelReader
from worker.aiter_tree.locate import NotATreeError, tree_at
from worker.families import Family

Standing = Literal["loads", "rebuild", "cannot", "unread"]
STANDINGS: tuple[Standing, ...] = ("loads", "rebuild", "cannot", "unread")


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


class Build:
    """One build. `name`: how the user called it."""

    def __init__(self, root: Path, name: str = "") -> None:
        """Raises InputError where there is no AITER."""
        self.name = name or str(root)
        try:
            self._kernels = KernelReader(tree_at(root))
        except NotATreeError as e:
            raise InputError(f"--build {self.name}: no AITER tree is there: {e}") from e
        self.configs = self._kernels.tree.package / "configs"
        self._compiled = cache(self._read_compiled)

    @property
    def problems(self) -> Sequence[str]:
        """Parts of the tree that could not be read."""
        return self._kernels.problems

    def answer(self, family: Family, key: Key, cells: Mapping[str, str]) -> Answer:
        """The outcome of a row. `key` begins with its gfx and cu_num."""
        if kind_of(cells) == "own":
            return Answer("cannot", f"{describe_own(cells)}, and AITER has none of that name")
        kernel = self._kernels.kernel(family.name, str(key[0]), cells)
        if kernel.standing == "there":
            return Answer("loads")
        if kernel.standing != "compiled":
            return Answer(kernel.standing, kernel.why)
        built = self._is_built(family, key, cells.get("kernelName", ""), kernel)
        return Answer("loads", opus=kernel.opus) if built else Answer("rebuild", "is not compiled in", kernel.opus)

    def _is_built(self, family: Family, key: Key, name: str, kernel: KernelAvailability) -> bool:
        if kernel.in_module is not None and (kernel.by_name or not kernel.in_module):
            return kernel.in_module
        compiled = self._compiled(family)
        return name in compiled.kernels if kernel.by_name else (key, name) in compiled.shapes

    def _read_compiled(self, family: Family) -> Compiled:
        """The compiled rows from the family's own table and those of model_configs."""
        files = [self.configs / family.tuned_csv, *shipped_tables(self.configs / "model_configs", family)]
        tables = [read_shipped(f, family) for f in files if f.is_file()]
        named = [(r.key, s.cells(r).get("kernelName", "")) for s in tables for r in s.rows]
        return Compiled(frozenset(named), frozenset(k for _, k in named))


def counted(answers: Iterable[Answer]) -> dict[Standing, int]:
    """Number of rows by outcome."""
    some = list(answers)
    return {s: n for s in STANDINGS if (n := sum(a.standing == s for a in some))}
