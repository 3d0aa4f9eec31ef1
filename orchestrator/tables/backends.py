"""Backends by their owner: `aiter-triton`, `aiter-gluon`, `own-triton`.

In the guide and in tables of AITER's, Triton and Gluon mean AITER's; 0.1.0's bench called our own kernels so.
"""

from __future__ import annotations

from worker.bench.options import OWN

THEIRS = {"triton": "aiter-triton", "gluon": "aiter-gluon"}
"""What the guide's columns and AITER's libtype are called by."""
TOLD = "triton_backend"
"""A column of 0.1.0's bench.csv: whose its `triton_*` columns are."""
NOTE = (
    "triton means our own kernels there, as bench called them before 0.2.0: read as own-triton (AITER's: aiter-triton)"
)


def owned(name: str, told: str = "") -> str:
    """A backend of a column or a libtype by its owner; `told`: the cell of TOLD, where the file has one."""
    return OWN if name == told == "triton" else THEIRS.get(name, name)
