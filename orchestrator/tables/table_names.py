"""Tables by their names: which family a file is a table of, which tables AITER ships, and how those of a model are
called.

AITER merges every file of model_configs whose name holds the family's table name and not the word "untuned"
(`get_config_file` in aiter/jit/core.py), so a name decides what a table is. If it says nothing, `family_of` looks at
the run that the file lies in, at the columns, and at the kernels' names.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from orchestrator.errors import InputError, TunedDBError
from orchestrator.families import get_family
from orchestrator.files.read import read_head
from orchestrator.tables.run_folders import provenance_of
from worker.families import FAMILIES, Family

HEAD_BYTES = 64 * 1024
"""Bytes of a table that are read to find its family by its content."""
HEAD_ROWS = 200
"""Most rows that are looked at in them."""
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


FORMS = ("model-first", "table-first")
"""The two forms of the names of a model's tables: `<model>_<table>.csv` and `<table>_<model>.csv`. Opus kernels of bf16
are compiled for the first form alone."""
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}\Z")
_SHORT_TYPES = {"float8": "fp8", "float4": "fp4", "bfloat16": "bf16", "float16": "fp16", "int8": "i8"}
_BITS = {"float8": "8", "int8": "8", "float4": "4", "int4": "4", "bfloat16": "16", "float16": "16"}


def shipped_tables(folder: Path, family: Family | None = None) -> list[Path]:
    """AITER's tuned tables in a folder, of all families or of one, found by AITER's rule for their names."""
    stem = Path(family.tuned_csv).stem if family else "tuned"
    return sorted(path for path in folder.glob(f"*{stem}*.csv") if path.is_file() and "untuned" not in path.name)


def table_of_others(path: Path) -> str:
    """The table of AITER's in a file's name, or its untuned list, that nothing here tunes; "" for other files."""
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


def model_names(
    model: str, family: Family, form: str | None, rows: Iterable[Mapping[str, str]] = ()
) -> tuple[str, str]:
    """(name of a model's tuned table, name of the list of its shapes beside it, which has `untuned` for `tuned`).

    `form`: None for the one that AITER's own files of the family mostly have. `rows`: fmoe tables are also called by
    the types of their rows. Raises InputError for another form, and where AITER would not find the name, or take it for
    another family's.
    """
    if not form:
        form = "table-first" if family.aiter.model_last else "model-first"
    if form not in FORMS:
        raise InputError(f"--form {form[:40]!r}: give {' or '.join(FORMS)}")
    if not _MODEL.match(model):
        raise InputError(f"--model {model[:80]!r}: write letters, digits, '.', '_' and '-' only, such as llama70B")
    stem = Path(family.tuned_csv).stem
    if form == "table-first":
        tuned = f"{stem}_{model}.csv"
    elif family.two_stages:
        model = f"{model}_{_types_in_name(rows)}"
        tuned = f"{model}_{stem}.csv"
    else:
        tuned = f"{model}_{stem}.csv"
    if "untuned" in tuned:
        raise InputError(f"--model {model!r}: AITER passes over names with 'untuned' in them")
    takers = [other.name for other in FAMILIES.values() if Path(other.tuned_csv).stem in tuned]
    if takers != [family.name]:
        others = ", ".join(name for name in takers if name != family.name)
        raise InputError(
            f"--model {model!r}: AITER would take {tuned} for a table of {others}, too; choose another name"
        )
    return tuned, tuned.replace(stem, "untuned".join(stem.rsplit("tuned", 1)))


def _types_in_name(rows: Iterable[Mapping[str, str]]) -> str:
    """fp8, fp4, bf16, i4 or aXwY, as AITER's fmoe files are called: by the types that most rows have."""
    counts = Counter((row.get("q_dtype_a", ""), row.get("q_dtype_w", "")) for row in rows)
    if not counts:
        return "bf16"
    most_common, _ = counts.most_common(1)[0]
    activation, weight = (name.removeprefix("torch.").split("_")[0] for name in most_common)
    if activation == weight:
        return _SHORT_TYPES.get(activation, activation)
    return f"a{_BITS.get(activation, '16')}w{_BITS.get(weight, '16')}"
