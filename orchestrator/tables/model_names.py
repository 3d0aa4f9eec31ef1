"""Names of a model's tables, as AITER finds them.

AITER merges every file of model_configs whose name holds the family's table name and not the word "untuned"
(`get_config_file` in aiter/jit/core.py). Two forms are in use: `<model>_<table>.csv` and `<table>_<model>.csv`; opus
kernels of bf16 are compiled for the first form alone. Each has a twin that lists the shapes, `untuned` for `tuned`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from orchestrator.errors import InputError
from worker.families import FAMILIES, Family

FORMS = ("model-first", "table-first")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}\Z")
_SHORT_TYPES = {"float8": "fp8", "float4": "fp4", "bfloat16": "bf16", "float16": "fp16", "int8": "i8"}
_BITS = {"float8": "8", "int8": "8", "float4": "4", "int4": "4", "bfloat16": "16", "float16": "16"}


def model_names(
    model: str, family: Family, form: str | None, rows: Iterable[Mapping[str, str]] = ()
) -> tuple[str, str]:
    """(name of the tuned table, name of its untuned twin). `form`: None for the one that AITER's own files of the
    family mostly have. `rows`: fmoe tables are also called by their types.

    Raises InputError for another form, and where AITER would not find the name, or take it for another family's.
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
