"""Which family a tuned table is of, where nobody says it."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

from orchestrator.errors import TunedDBError
from orchestrator.families import get_family
from worker.families import FAMILIES, Family

_STEMS = sorted(((Path(f.tuned_csv).stem, f) for f in FAMILIES.values()), key=lambda pair: -len(pair[0]))
_PEEK = 64 * 1024
# a kernel's name tells the families with the columns M,N,K apart
_KERNELS = (
    (re.compile(r"f4gemm_|.*f4gemm_bf16|a4w4_blockscale"), "a4w4_blockscale"),
    (re.compile(r"a8w8_blockscale_bpreshuffle"), "a8w8_blockscale_bpreshuffle"),
    (re.compile(r"a8w8_blockscale"), "a8w8_blockscale"),
)


def stem_in(name: str) -> Family | None:
    """The family whose table's name is in a file name, as AITER looks for it."""
    return next((family for stem, family in _STEMS if stem in name), None)


def family_of(path: Path, asked: str | None = None) -> Family:
    """The family of the table at `path`: the one asked for, else by its name, its run, its columns, its kernels.

    Raises TunedDBError where nothing tells.
    """
    if asked is not None:
        return get_family(asked)
    if "untuned" in path.name:
        raise TunedDBError(f"{path}: by its name a list of shapes, not a tuned table; tune it first")
    by_name = stem_in(path.name)
    if by_name is not None:
        return by_name
    by_run = _run_of(path)
    if by_run is not None:
        return by_run
    header, rows = _peek(path)
    fitting = [f for f in FAMILIES.values() if {*f.key_names, f.err_column} <= set(header)]
    most = max((len(f.key_names) for f in fitting), default=0)
    fitting = [f for f in fitting if len(f.key_names) == most]
    if len(fitting) > 1:
        names = {name for row in rows for pattern, name in _KERNELS if pattern.match(row.get("kernelName", ""))}
        fitting = [f for f in fitting if f.name in names] if len(names) == 1 else fitting
    if len(fitting) == 1:
        return fitting[0]
    could = f"; it could be of {', '.join(f.name for f in fitting)}" if fitting else ""
    raise TunedDBError(f"{path}: neither name nor columns tell the family of this table{could}: say it with --family")


def _run_of(path: Path) -> Family | None:
    """The family of the run that a tuned.csv lies in."""
    try:
        found = json.loads((path.parent / "provenance.json").read_text())["family"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return FAMILIES.get(str(found))


def _peek(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    try:
        with path.open("rb") as f:
            text = f.read(_PEEK).decode("utf-8", "replace")
    except OSError as e:
        raise TunedDBError(f"{path}: cannot be read: {e.strerror or e}") from e
    records = list(csv.reader(io.StringIO(text.removeprefix("\ufeff"))))[:200]
    header = [c.strip() for c in records[0]] if records else []
    return header, [dict(zip(header, r, strict=False)) for r in records[1:]]
