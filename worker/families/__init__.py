"""The one table of GEMM families: columns, limits, formats, AITER's files and names. Standard library only.

A new family is an entry of `table.py`; both sides read it.
"""

from __future__ import annotations

from worker.families.backends import BACKENDS, backend_of, kernel_of_aiter
from worker.families.model import Aiter, Cell, Column, Family, Format, Limit, Risk, legal_cells
from worker.families.table import DEFAULT_FAMILY, FAMILIES, computed_by, fp8_cell

__all__ = [
    "BACKENDS",
    "DEFAULT_FAMILY",
    "FAMILIES",
    "Aiter",
    "Cell",
    "Column",
    "Family",
    "Format",
    "Limit",
    "Risk",
    "backend_of",
    "computed_by",
    "fp8_cell",
    "kernel_of_aiter",
    "legal_cells",
]
