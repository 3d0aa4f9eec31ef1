"""One AITER, as a checkout or as it is installed in an image, asked two things: can it run the kernels of a table's
rows, and what does it do with the table when it starts?

`db check --build`, `db export --build` and `publish` make a `Build` of a folder. `availability_of` answers the first
question for a row, `merge_rules` the second for a family; `tables`, `header` and `chips` say what the build itself has.
Nothing of it is imported here, its Python files are read as text. `worker/aiter_tree/kernels.py` judges kernels by
the lists of the tree; this module adds what depends on tables.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from orchestrator.errors import InputError, TunedDBError
from orchestrator.files.read import read_head
from orchestrator.tables.keys import CHIP_COLUMNS, Key, key_dict
from orchestrator.tables.row_kernels import describe_own, kind_of_row
from orchestrator.tables.table import TableRow, read_table
from orchestrator.tables.table_names import shipped_tables
from worker.aiter_tree.kernel_lists import KernelLists
from worker.aiter_tree.kernels import KernelAvailability, availability
from worker.aiter_tree.locate import NotATreeError, tree_at
from worker.families import NULLS, Family, backend_of

IMPORTED_BACKENDS = {"flydsl": "flydsl", "triton": "", "opus": ""}
"""Backends that dispatch imports from aiter/ops/<backend> if a row's libtype names them; and the Python package that
such a backend needs beside AITER, "" for none."""
HEADER_BYTES = 4096
"""Bytes that are read for a table's header; the longest of AITER's has 300."""


@dataclass(frozen=True, slots=True)
class MergeRules:
    """A build's way to merge the tables of a family into one when it starts, by the text of its aiter/jit/core.py."""

    merges_model_configs: bool
    """It merges the tables in model_configs too (since v0.1.7)."""
    stops_at_repeated_key: bool
    """It stops if two rows have one key (since 94a6edda3a, 2026-04-01). Before, it silently left out one of them."""
    stops_at_other_columns: bool
    """It stops if two tables have different columns (until v0.1.12.post2)."""
    key_columns: tuple[str, ...]
    """The columns by which it compares rows: those of the family's untuned list, with cu_num (since v0.1.9) and gfx
    (since v0.1.12.post2)."""
    key_has_tag: bool
    """It compares rows by the column `_tag` too."""

    def key_of(self, row: TableRow, family: Family) -> tuple[int | str, ...]:
        """The part of a row that the build compares: if two rows have the same, they have one key."""
        key = key_dict(row.key, family)
        return (*(key[name] for name in self.key_columns), row.tag if self.key_has_tag else "")


class CompiledKernels(NamedTuple):
    """The kernels that the tables of a build name, so that they are compiled into its modules."""

    names: set[str]
    shapes: set[tuple[Key, str]]
    """Each kernel's name with the key of the row that names it."""


class Build:
    """One AITER in a folder."""

    def __init__(self, root: Path, name: str = "", *, whole: bool = False) -> None:
        """`name`: how the user called it. `whole`: the Python packages that it needs would lie beside it, as in an
        image. Raises InputError where there is no AITER."""
        self.name = name or str(root)
        try:
            self._lists = KernelLists(tree_at(root))
        except NotATreeError as e:
            raise InputError(f"--build {self.name}: no AITER tree is there: {e}") from e
        self.tree = self._lists.tree
        self.configs = self.tree.package / "configs"
        self._whole = whole or self.tree.wheel
        # by family; each is read once
        self.merge_rules = cache(self._read_merge_rules)
        self._compiled = cache(self._read_compiled)

    @property
    def problems(self) -> Sequence[str]:
        """Parts of the tree that could not be read."""
        return tuple(self._lists.problems)

    def availability_of(self, family: Family, key: Key, cells: Mapping[str, str]) -> KernelAvailability:
        """Judge the kernel of a row: it `loads`, needs a `rebuild`, or `cannot` be used, and why.

        `key` is the row's, `cells` are its cells by column name. A kernel of a list that was compiled from tables loads
        if the built module has it, and needs a rebuild otherwise.
        """
        if kind_of_row(cells) == "own":
            return KernelAvailability("cannot", f"{describe_own(cells)}, and AITER has none of that name")
        kernel = availability(self._lists, family.name, str(key[0]), cells)
        if kernel.standing in ("loads", "compiled") and (why := self._import_fault(family, cells)):
            return KernelAvailability("cannot", why)
        if kernel.standing != "compiled":
            return kernel
        if self._is_built(family, key, cells.get("kernelName", ""), kernel):
            return replace(kernel, standing="loads")
        return replace(kernel, standing="rebuild", why="is not compiled in")

    def tables(self, family: Family) -> list[Path]:
        """The tables that it merges when it starts: the family's own, then those of model_configs."""
        files = [self.configs / family.tuned_csv]
        if self.merge_rules(family).merges_model_configs:
            files += shipped_tables(self.configs / "model_configs", family)
        return [file for file in files if file.is_file()]

    @cached_property
    def chips(self) -> frozenset[str]:
        """The architectures that it knows (`gfx942`, ...); none where they are not readable."""
        utils = self.tree.package / "jit" / "utils"
        texts = [self._lists.files.text(utils / name) for name in ("build_targets.py", "chip_info.py")]
        return frozenset(re.findall(r"[\"'](gfx[0-9a-f]+)[\"']", "".join(texts)))

    def header(self, family: Family, *, untuned: bool = False) -> tuple[str, ...]:
        """The columns of the family's own table, or of its untuned list, by our names; () if the tree has none."""
        name = family.untuned_csv if untuned else family.tuned_csv
        try:
            text = read_head(self.configs / name, HEADER_BYTES, InputError)
        except InputError:
            return ()
        columns = next(csv.reader(text.splitlines()[:1]), [])
        return family.from_aiter(column.strip() for column in columns)

    def _read_merge_rules(self, family: Family) -> MergeRules:
        core = self._lists.files.text(self.tree.package / "jit" / "core.py")
        untuned_columns = self.header(family, untuned=True)
        key_columns: tuple[str, ...] = (*family.chip_columns, *family.key_names)
        if untuned_columns:
            chip = [name for name in CHIP_COLUMNS if f'keys.append("{name}")' in core and name in family.chip_columns]
            key_columns = (*chip, *(name for name in family.key_names if name in untuned_columns))
        return MergeRules(
            merges_model_configs="model_configs" in core,
            # AITER compares nothing without an untuned list
            stops_at_repeated_key="duplicate shape" in core and bool(untuned_columns),
            stops_at_other_columns="Column mismatch" in core,
            key_columns=key_columns,
            key_has_tag='"_tag"' in core,
        )

    def _import_fault(self, family: Family, cells: Mapping[str, str]) -> str:
        """The reason why dispatch cannot import the backend that a row's libtype names, "" if it can."""
        backend = backend_of(family.name, cells)
        if backend not in IMPORTED_BACKENDS or cells.get("libtype", "") in NULLS:
            return ""
        if not (self.tree.package / "ops" / backend).is_dir():
            return f"libtype {backend} is not importable: there is no aiter/ops/{backend}"
        package = IMPORTED_BACKENDS[backend]
        if package and self._whole and not (self.tree.root / package).is_dir():
            return f"libtype {backend} is not importable: the package {package} is not installed"
        return ""

    def _is_built(self, family: Family, key: Key, name: str, kernel: KernelAvailability) -> bool:
        """Return whether a kernel that is compiled from tables is in its module for this shape.

        The bytes of the built module count if they decide it: a name that they lack is not built, and if AITER calls
        kernels by their names, one that they have is. Else the tables count that the module was compiled from.
        """
        if kernel.in_module is False:
            return False
        if kernel.by_name:
            return kernel.in_module is True or name in self._compiled(family).names
        return (key, name) in self._compiled(family).shapes

    def _read_compiled(self, family: Family) -> CompiledKernels:
        """The kernels that `tables` name. A table that lacks a column of the key counts for nothing: that of a8w8 has
        no q_dtype_w at v0.1.9."""
        compiled = CompiledKernels(set(), set())
        for file in self.tables(family):
            with suppress(TunedDBError):
                table = read_table(file, family, lenient=True)
                for row in table.rows:
                    name = table.cells(row).get("kernelName", "")
                    compiled.names.add(name)
                    compiled.shapes.add((row.key, name))
        return compiled
