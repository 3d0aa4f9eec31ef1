"""Texts of AITER's tables: tuned ones and lists of shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.files import write_files
from worker.families import FAMILIES, Family

A4W4 = FAMILIES["a4w4_blockscale"]
BLOCKSCALE = FAMILIES["a8w8_blockscale"]


def line(of: Family, **cells: Any) -> str:
    """A row of a tuned table. Cells that are not given get plain defaults."""
    plain = {"gfx": "gfx950", "cu_num": 256, "N": 64, "K": 128, "us": 10.0, "splitK": 0, of.err_column: 0.0}
    full = {**{c.name: c.default or 64 for c in of.columns}, **plain, **cells}
    us = float(full["us"])
    full.setdefault(
        "tflops", round(of.flops({k: v for k, v in full.items() if k in of.key_names}) / us / 1e6, 6) if us > 0 else 0
    )
    return ",".join(str(full.get(n, 0)) for n in of.tuned_header)


def text(of: Family, *lines: str) -> str:
    """A tuned table."""
    return "\n".join((",".join(of.aiter_header), *lines)) + "\n"


def untuned(of: Family, *lines: str) -> str:
    """A list of shapes."""
    return "\n".join((",".join(of.key_names), *lines)) + "\n"


def write_table(path: Path, of: Family, *lines: str) -> Path:
    """Write a tuned table, with the folder above it."""
    write_files(path.parent, {path.name: text(of, *lines)})
    return path
