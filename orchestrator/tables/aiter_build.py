"""One build of AITER, to which tables are held: its kernels and chips, and what it does with tables at its start.

Its Python files are read as text and never imported here; `worker/aiter_tree` reads its lists of kernels.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from orchestrator.errors import InputError, TunedDBError
from orchestrator.files.read import read_head
from orchestrator.tables.keys import CHIP_COLUMNS, Key, key_dict
from orchestrator.tables.row_kernels import describe_own, kind_of
from orchestrator.tables.table import TableRow, read_table
from orchestrator.tables.table_family import shipped_tables
from worker.aiter_tree.kernels import KernelAvailability, KernelLists
from worker.aiter_tree.locate import NotATreeError, read_text, tree_at
from worker.families import NULLS, Family, backend_of

IMPORTED_BACKENDS = {"flydsl": "flydsl", "triton": "", "opus": ""}
"""Backends that dispatch imports from aiter/ops/<backend> when a row names them, with the package that they need."""
HEADER_BYTES = 4096
"""Bytes that are read for a table's header; the longest of AITER's has 300."""

BuiltKernel = tuple[Key | None, str]
"""A shape with its kernel, or (None, a kernel) for any shape: what a module is compiled from."""


@dataclass(frozen=True, slots=True)
class StartMerge:
    """AITER's merge of a family's tables at its start, by what a tree's aiter/jit/core.py says of it."""

    merges_model_configs: bool
    """Since v0.1.7."""
    repeated_key_stops: bool
    """A key that comes twice stops AITER (since 94a6edda3a, 2026-04-01). Before, it silently left out one row."""
    other_columns_stop: bool
    """Tables of different columns stop AITER (until v0.1.12.post2)."""
    key_columns: tuple[str, ...]
    """Those of the family's untuned list, with cu_num (since v0.1.9) and gfx (since v0.1.12.post2)."""
    key_has_tag: bool
    """The key has the column `_tag` too."""

    def place(self, row: TableRow, family: Family) -> tuple[int | str, ...]:
        """The key of a row in this merge."""
        key = key_dict(row.key, family)
        return (*(key[name] for name in self.key_columns), row.tag if self.key_has_tag else "")


class Build:
    """One build. `name`: how the user called it; `whole`: its Python packages lie beside it, as in an image."""

    def __init__(self, root: Path, name: str = "", *, whole: bool = False) -> None:
        """Raises InputError where there is no AITER."""
        self.name = name or str(root)
        try:
            self._kernels = KernelLists(tree_at(root))
        except NotATreeError as e:
            raise InputError(f"--build {self.name}: no AITER tree is there: {e}") from e
        self.tree = self._kernels.tree
        self.configs = self.tree.package / "configs"
        self._whole = whole or self.tree.wheel
        self._compiled = cache(self._read_compiled)
        self._start_merge = cache(self._read_start)

    @property
    def problems(self) -> Sequence[str]:
        """Parts of the tree that could not be read."""
        return tuple(self._kernels.problems)

    def start_merge(self, family: Family) -> StartMerge:
        """AITER's merge of the family's tables at its start; read once."""
        return self._start_merge(family)

    def availability_of(self, family: Family, key: Key, cells: Mapping[str, str]) -> KernelAvailability:
        """The availability of a row's kernel: it loads, needs a rebuild, or cannot be used. `key` begins with the row's
        gfx and cu_num."""
        if kind_of(cells) == "own":
            return KernelAvailability("cannot", f"{describe_own(cells)}, and AITER has none of that name")
        kernel = self._kernels.kernel(family.name, str(key[0]), cells)
        if kernel.standing in ("loads", "compiled") and (why := self._not_importable(family, cells)):
            return KernelAvailability("cannot", why)
        if kernel.standing != "compiled":
            return kernel
        if self._is_built(family, key, cells.get("kernelName", ""), kernel):
            return replace(kernel, standing="loads")
        return replace(kernel, standing="rebuild", why="is not compiled in")

    def tables(self, family: Family) -> list[Path]:
        """The tables that it merges at its start: the family's own, then those of model_configs."""
        files = [self.configs / family.tuned_csv]
        if self.start_merge(family).merges_model_configs:
            files += shipped_tables(self.configs / "model_configs", family)
        return [file for file in files if file.is_file()]

    @cached_property
    def chips(self) -> frozenset[str]:
        """The architectures that it knows; none where they are not readable."""
        utils = self.tree.package / "jit" / "utils"
        texts = [_read_text(utils / name) for name in ("build_targets.py", "chip_info.py")]
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

    def _read_start(self, family: Family) -> StartMerge:
        core = _read_text(self.tree.package / "jit" / "core.py")
        listed = self.header(family, untuned=True)
        names: tuple[str, ...] = (*family.chip_columns, *family.key_names)
        if listed:
            chip = [name for name in CHIP_COLUMNS if f'keys.append("{name}")' in core and name in family.chip_columns]
            names = (*chip, *(name for name in family.key_names if name in listed))
        return StartMerge(
            merges_model_configs="model_configs" in core,
            repeated_key_stops="duplicate shape" in core and bool(listed),  # without a list AITER compares nothing
            other_columns_stop="Column mismatch" in core,
            key_columns=names,
            key_has_tag='"_tag"' in core,
        )

    def _not_importable(self, family: Family, cells: Mapping[str, str]) -> str:
        """The reason for which dispatch cannot import the backend of a row's libtype, "" where it can."""
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
        """Return whether a kernel that is compiled from tables is in the module: by the built module itself where it
        can be read, else by the tables that the module was made from."""
        if kernel.in_module is not None and (kernel.by_name or not kernel.in_module):
            return kernel.in_module
        return (None if kernel.by_name else key, name) in self._compiled(family)

    def _read_compiled(self, family: Family) -> set[BuiltKernel]:
        """The input of the modules' compilation: the rows of the family's own table and of those of model_configs. A
        table that lacks a column of the key names no row: that of a8w8 has no q_dtype_w at v0.1.9."""
        compiled: set[BuiltKernel] = set()
        for file in self.tables(family):
            with suppress(TunedDBError):
                table = read_table(file, family, lenient=True)
                for row in table.rows:
                    name = table.cells(row).get("kernelName", "")
                    compiled |= {(row.key, name), (None, name)}
        return compiled


def _read_text(path: Path) -> str:
    """The text of a file of the tree, "" where it is not readable."""
    try:
        return read_text(path)
    except (OSError, ValueError):
        return ""
