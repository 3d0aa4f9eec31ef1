"""The kernel of a row: its name, its identity in tables of every date, and whose it is.

AITER stops at a kernel that it does not have, so a kernel is of one of two kinds: AITER's (`aiter`), or of one of our
own tuners (`own`). Its name says which, and if that is of no known pattern, the row's record of provenance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Literal

from orchestrator.tables.keys import number_of
from worker.families import NULLS, backend_of, kernel_of_aiter, tuner_of
from worker.tuners.catalog import recorded_tuner

KERNEL_NAMES = ("kernelName", "kernelName1", "kernelName2")
"""Columns that name a row's kernel (fmoe: one a stage)."""
SPLIT_COLUMNS = ("splitK", "ksplit", "block_m")
"""Columns that say how a kernel is launched; two rows of one name are of one kernel only if these agree, too."""
MAX_NAME = 80
"""Most characters of a kernel's name in a sentence."""

KernelKind = Literal["aiter", "own", ""]
"""The owner of a kernel, "" if that is unknown."""
KIND_FIELD = "kind"
"""The field of a record of provenance that has it."""
OWNER = {"aiter": "AITER's", "own": "gemmfleet's own"}

KernelIdentity = tuple[str, str, str]
"""(backend, names, split and block): `("ck", "a8w8_1x128_...", "4/0/0")`. Two rows have one kernel if it is equal."""


def kernel_of(cells: Mapping[str, str]) -> str:
    """The kernel's name (fmoe: of both stages); "" if the row names none."""
    return kernel_of_stages(cells.get(name, "") for name in KERNEL_NAMES)


def kernel_of_stages(names: Iterable[str]) -> str:
    """The names of a kernel's stages as one text."""
    return " + ".join(name for name in names if name not in NULLS)


def kernel_identity(cells: Mapping[str, str], family: str) -> KernelIdentity | None:
    """The kernel of a row, the same in tables of every date; None where the row names none."""
    name = kernel_of(cells)
    if not name:
        return None
    return backend_of(family, cells), name, split_of(tuple(cells.get(column, "") for column in SPLIT_COLUMNS))


@lru_cache(10_000)
def split_of(texts: tuple[str, ...]) -> str:
    """The cells of SPLIT_COLUMNS, however they are spelled: `4/0/128`."""
    return "/".join(f"{number_of(text) or 0:g}" for text in texts)


@lru_cache(50_000)
def kind_by_names(libtype: str, *names: str) -> KernelKind:
    """The kind by a row's libtype and kernel names, "" where it is unknown."""
    kernels = [name for name in names if name not in NULLS]
    if libtype.lower() == "replay" or any(map(tuner_of, kernels)):
        return "own"
    if any(map(kernel_of_aiter, kernels)):
        return "aiter"
    if kernels and libtype and backend_of("", {"libtype": libtype}):
        return "aiter"
    return ""


def kind_of_row(cells: Mapping[str, str]) -> KernelKind:
    """The kind of a row by its cells."""
    return kind_by_names(cells.get("libtype", ""), *(cells.get(name, "") for name in KERNEL_NAMES))


def kind_of_record(facts: Mapping[str, object]) -> KernelKind:
    """The kind of a row by the fields of its record."""
    kind = facts.get(KIND_FIELD)
    if kind == "own":
        return "own"
    if kind == "aiter":
        return "aiter"
    produced = recorded_tuner(str(facts.get("tuner") or "").partition(" ")[0]).produces
    return "own" if produced == "configs" else produced  # AITER's dispatch has none of these names either


def describe_own(cells: Mapping[str, str]) -> str:
    """The owner of a row of our tuners, for a sentence."""
    for column in KERNEL_NAMES:
        name = cells.get(column, "")
        if tuner := tuner_of(name):
            return f"{name[:MAX_NAME]} is a kernel of gemmfleet's tuner {tuner}"
    return "is a kernel of our own tuners"
