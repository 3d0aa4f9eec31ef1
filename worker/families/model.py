"""A GEMM family as data: key columns, limits, formats, and how AITER tunes it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Cell = int | float | str
Format = Literal["", "row16", "row8", "block8", "mx4"]
"""Operands: 16 or 32 bits; 8 bits with a scale a row; 8 bits with scales of 1 x 128 and 128 x 128; MXFP4."""

_NUMBER = re.compile(r"[0-9]{1,10}\Z")


BOOLEANS = ("True", "False")


@dataclass(frozen=True, slots=True)
class Column:
    """A key column.

    `int` columns hold whole numbers from 1 to 2^31-1, or one of `legal` where it names some (0 and 1 of a
    switch). `text` columns hold one of `legal`, spelled exactly so. `default` None: the column is required.
    `aiter`: the column's name in AITER's tables, where it differs.
    """

    name: str
    kind: Literal["int", "text"] = "int"
    default: str | None = None
    legal: tuple[str, ...] = ()
    aiter: str = ""

    @property
    def required(self) -> bool:
        """True where a shapes file must have the column."""
        return self.default is None


@dataclass(frozen=True, slots=True)
class Limit:
    """A column must be a multiple of a number, or no kernel of the family can take the shape."""

    column: str
    multiple_of: int
    why: str


@dataclass(frozen=True, slots=True)
class Risk:
    """Shapes with a column that is no multiple of a number: AITER's kernels may fault on them. No refusal.

    17 rows that AITER ships have an N that is no multiple of 128, and the K layout depends on the image.
    """

    columns: tuple[str, ...]
    multiple_of: int

    def of(self, key: Mapping[str, int | str]) -> str:
        """The risk in words, "" where the shape is aligned."""
        if all(int(key[c]) % self.multiple_of == 0 for c in self.columns):
            return ""
        return f"{' or '.join(self.columns)} is no multiple of {self.multiple_of}"


@dataclass(frozen=True, slots=True)
class Aiter:
    """AITER's way with a family. What differs by version (flags, gfx as a key) is read from its files instead.

    `scripts`: tuners below a tree's root, the newest first; in a wheel they lie below `aiter_meta/`. `flags`: what
    the script needs for this family and no other. `gfx`: chips that it can be tuned on, empty for any.
    `only_backend`: where rows have no libtype and all kernels are of one backend. `ck_kernels`: candidates are
    numbered from 0, at most so many CK kernels before the ASM ones. `pads_k_to`: scales are padded to a K that is a
    multiple of this, 0 where they are not (older images lay padded ones out wrongly). `always_has_candidates`: every
    shape has a kernel; elsewhere one without ends its whole batch (an assertion, 2025-12-30 on), so each has a
    process of its own. `hand_written`: AITER ships rows without a time. `model_last`: model tables are mostly called
    `<table>_<model>.csv`. `exact_m`: the lookup rounds no M up.
    `operator`: (module, name) of what looks a shape up in the tuned table. `triton_ops`, `gluon_op`: wrappers of its
    Triton and Gluon kernels, the newest first.
    """

    scripts: tuple[str, ...] = ()
    err_ratio: float = 0.05
    flags: tuple[str, ...] = ()
    gfx: tuple[str, ...] = ()
    only_backend: str = ""
    ck_kernels: int = 0
    pads_k_to: int = 0
    always_has_candidates: bool = False
    hand_written: bool = False
    model_last: bool = False
    exact_m: bool = False
    operator: tuple[str, str] = ("", "")
    triton_ops: tuple[str, ...] = ()
    gluon_op: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """One GEMM format. `columns` are the key columns without gfx and cu_num, in AITER's order.

    `renames` maps the worker's row names to result columns that AITER calls differently in this family. `format`: the
    operands' format, "" where only AITER computes the family.
    `own_tuners`: which of our own tuners have candidates for it. `chip_columns`: what names the chip in its tables.
    """

    name: str
    columns: tuple[Column, ...]
    result_columns: tuple[str, ...]
    tuned_csv: str
    untuned_csv: str
    env: str
    aiter: Aiter = Aiter()
    format: Format = ""
    own_tuners: tuple[str, ...] = ()
    risks: tuple[Risk, ...] = ()
    limits: tuple[Limit, ...] = ()
    m_column: str = "M"
    err_column: str = "errRatio"
    renames: tuple[tuple[str, str], ...] = ()
    chip_columns: tuple[str, ...] = ("gfx", "cu_num")
    key_names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """The names of the key columns; `Shape.key` is aligned with them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key_names", tuple(c.name for c in self.columns))

    @property
    def tuned_header(self) -> tuple[str, ...]:
        """The columns of the family's tuned table, by our names."""
        return (*self.chip_columns, *self.key_names, *self.result_columns)

    @property
    def aiter_header(self) -> tuple[str, ...]:
        """The header of the family's tuned table as AITER writes it."""
        return self.to_aiter(self.tuned_header)

    def to_aiter(self, names: Iterable[str]) -> tuple[str, ...]:
        """Column names as AITER's tables of the family have them; others are left as they are."""
        theirs = {c.name: c.aiter for c in self.columns if c.aiter}
        return tuple(theirs.get(n, n) for n in names)

    def from_aiter(self, names: Iterable[str]) -> tuple[str, ...]:
        """Column names of a table of AITER's by our names; others are left as they are."""
        ours = {c.aiter: c.name for c in self.columns if c.aiter}
        return tuple(ours.get(n, n) for n in names)

    def chip(self, gfx: str, cu_num: int) -> tuple[str, int]:
        """A chip as keys of the family's rows have it: cu_num is 0 where its tables have no such column."""
        return gfx, cu_num if "cu_num" in self.chip_columns else 0

    @property
    def batched(self) -> bool:
        """True where a shape is `B` products of one size."""
        return "B" in self.key_names

    @property
    def two_stages(self) -> bool:
        """True where a row times two kernels, one after the other (a mixture of experts)."""
        return self.m_column == "token"

    def column(self, name: str) -> Column:
        """The key column of that name; KeyError where the family has none."""
        for c in self.columns:
            if c.name == name:
                return c
        raise KeyError(name)

    def flops(self, key: Mapping[str, int | str]) -> float:
        """Floating-point operations of one shape, as AITER counts them for its tflops column.

        GEMM: 2*M*N*K, times B where there is one. fmoe: both stages, 2*token*topk*model_dim*inter_dim for
        each weight matrix: three with use_g1u1 (gate, up, down), else two; source: `FmoeTuner.calculate` in
        AITER's gemm_moe_tune.py. The shipped tuned_fmoe.csv agrees to rounding from 16 tokens on; most of its
        rows below count 16 tokens.
        """
        if self.two_stages:
            one = 2.0 * int(key["token"]) * int(key["topk"]) * int(key["model_dim"]) * int(key["inter_dim"])
            return one * (3 if int(key["use_g1u1"]) else 2)
        return 2.0 * int(key["M"]) * int(key["N"]) * int(key["K"]) * int(key.get("B", 1))

    def row_to_columns(self, row: Mapping[str, object]) -> dict[str, Cell]:
        """A worker's row as the family's result columns, all of them and in order; "" for what the row lacks.

        What AITER has no column for (status, spread, samples, ...) is left out. fmoe's err1 becomes AITER's
        text in percent ("0.3%").
        """
        source = {theirs: ours for ours, theirs in self.renames}
        out: dict[str, Cell] = {}
        for name in self.result_columns:
            value = row.get(name, row.get(source.get(name, name), ""))
            if name == "err1" and isinstance(value, (int, float)):
                value = f"{value:.1%}"
            out[name] = value if isinstance(value, (int, float, str)) else str(value)
        return out


def legal_cells(family: Family, key: Mapping[str, int | str]) -> dict[str, str]:
    """The key as cells of an untuned CSV. Raises ValueError where one is not legal: AITER evaluates some as Python."""
    out: dict[str, str] = {}
    for column in family.columns:
        if column.name not in key:
            raise ValueError(f"the shape has no {column.name}")
        cell = str(key[column.name])
        if column.kind == "int" and not _NUMBER.match(cell):
            raise ValueError(f"{column.name} is {cell[:40]!r}, not a whole number")
        if column.legal and cell not in column.legal:
            raise ValueError(f"{column.name} is {cell[:40]!r}, not one of {', '.join(column.legal)}")
        out[column.name] = cell
    return out
