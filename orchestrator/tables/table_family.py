"""The family of a table, which follows from the file's name, the run that the file lies in, its columns, or the names
of its kernels; and AITER's own tables in a folder."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from orchestrator.errors import TunedDBError
from orchestrator.families import get_family
from orchestrator.files.read import read_head
from orchestrator.tables.run_folders import provenance_of
from worker.families import FAMILIES, Family

HEAD_BYTES = 64 * 1024
"""Bytes of a table that are read to find its family by its content."""
HEAD_ROWS = 200
OTHERS = ("tuned_fhmoe", "tuned_grouped_fmoe", "chunk_gdn_h_opt_tuned", "asm_a8w8_gemm")
"""Tables of AITER's that nothing here tunes."""

# the longest first, since one stem can be part of another
_STEMS = sorted(((Path(f.tuned_csv).stem, f) for f in FAMILIES.values()), key=lambda pair: -len(pair[0]))
# families with the columns M,N,K are distinguished by kernel names
_KERNELS = (
    (re.compile(r"f4gemm_|.*f4gemm_bf16|a4w4_blockscale"), "a4w4_blockscale"),
    (re.compile(r"a8w8_blockscale_bpreshuffle"), "a8w8_blockscale_bpreshuffle"),
    (re.compile(r"a8w8_blockscale"), "a8w8_blockscale"),
)


def shipped_tables(folder: Path, family: Family | None = None) -> list[Path]:
    """AITER's tuned tables in a folder, of all families or of one, found by AITER's rule for their names."""
    stem = Path(family.tuned_csv).stem if family else "tuned"
    return sorted(path for path in folder.glob(f"*{stem}*.csv") if path.is_file() and "untuned" not in path.name)


def table_of_others(path: Path) -> str:
    """The table of AITER's in a file's name, or its untuned list, that nothing here tunes; "" if it is none."""
    return next((name for name in OTHERS if name in path.name), "")


def family_in_name(name: str) -> Family | None:
    """The family whose table's name is in a file name, as AITER looks for it; that of the FP4 guide's files."""
    for stem, family in _STEMS:
        if stem in name:
            return family
    return FAMILIES["a4w4_blockscale"] if name.startswith("fp4_") else None


def families_by_content(header: Sequence[str], rows: Iterable[Mapping[str, str]]) -> list[Family]:
    """The families that a table may be of by its columns and, where these fit several, by its kernels."""
    fitting = [f for f in FAMILIES.values() if {*f.to_aiter(f.key_names), f.err_column} <= set(header)]
    most_columns = max((len(family.key_names) for family in fitting), default=0)
    fitting = [family for family in fitting if len(family.key_names) == most_columns]
    if len(fitting) < 2:
        return fitting
    names = set[str]()
    for row in rows:
        kernel = row.get("kernelName", "")
        names.update(name for pattern, name in _KERNELS if pattern.match(kernel))
    if len(names) != 1:
        return fitting
    return [family for family in fitting if family.name in names]


def family_of(path: Path, wanted: str | None = None) -> Family:
    """The family of the table at `path`: `wanted` where it is given, else by name, run, columns and kernels.

    Raises TunedDBError where none of them is conclusive, InputError for an unknown `wanted`.
    """
    if wanted is not None:
        return get_family(wanted)
    if "untuned" in path.name:
        raise TunedDBError(f"{path}: by its name a list of shapes, not a tuned table; tune it first")
    family = family_in_name(path.name) or FAMILIES.get(str(provenance_of(path.parent).get("family")))
    if family is not None:
        return family
    records = list(csv.reader(io.StringIO(read_head(path, HEAD_BYTES, TunedDBError))))[:HEAD_ROWS]
    header = [name.strip() for name in records[0]] if records else []
    fitting = families_by_content(header, (dict(zip(header, cells, strict=False)) for cells in records[1:]))
    if len(fitting) == 1:
        return fitting[0]
    could = ""
    if fitting:
        could = f"; it could be of {', '.join(family.name for family in fitting)}"
    raise TunedDBError(f"{path}: neither name nor columns show the family of this table{could}: name it with --family")
