"""File names under which AITER finds a model's tables in aiter/configs/model_configs.

AITER merges every file there whose name holds the family's table name and not the word "untuned" (`get_config_file` in
aiter/jit/core.py). Two forms are in use: `<model>_<table>.csv` and `<table>_<model>.csv`; opus kernels of bf16 are
compiled for the first form alone. Each has a twin that lists the shapes, `untuned` instead of `tuned`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from orchestrator.errors import InputError
from worker.families import FAMILIES, Family

Form = Literal["model-first", "table-first"]
FORMS: tuple[Form, ...] = ("model-first", "table-first")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}\Z")
_BITS = {"float8": "8", "int8": "8", "float4": "4", "int4": "4", "bfloat16": "16", "float16": "16"}


def usual_form(family: Family) -> Form:
    """The form that AITER's own files of the family mostly have."""
    return "table-first" if family.aiter.model_last else "model-first"


def model_names(model: str, family: Family, form: Form, rows: Iterable[Mapping[str, str]] = ()) -> tuple[str, str]:
    """(name of the tuned table, name of its untuned twin). `rows`: fmoe tables are also called by their types.

    Raises InputError where AITER would not find the name, or take it for another family's.
    """
    if not _MODEL.match(model):
        raise InputError(f"--model {model[:80]!r}: write letters, digits, '.', '_' and '-' only, such as llama70B")
    stem = Path(family.tuned_csv).stem
    if family.two_stages:
        model = f"{model}_{_types(rows)}" if form == "model-first" else model
    tuned = f"{model}_{stem}.csv" if form == "model-first" else f"{stem}_{model}.csv"
    if "untuned" in tuned:
        raise InputError(f"--model {model!r}: AITER passes over names with 'untuned' in them")
    takers = [f.name for f in FAMILIES.values() if Path(f.tuned_csv).stem in tuned]
    if takers != [family.name]:
        others = ", ".join(t for t in takers if t != family.name)
        raise InputError(
            f"--model {model!r}: AITER would take {tuned} for a table of {others}, too; choose another name"
        )
    return tuned, tuned.replace(stem, "untuned".join(stem.rsplit("tuned", 1)))


def _types(rows: Iterable[Mapping[str, str]]) -> str:
    """fp8, fp4, bf16, i4 or aXwY, as AITER's fmoe files are called."""
    kinds = Counter((r.get("q_dtype_a", ""), r.get("q_dtype_w", "")) for r in rows)
    if not kinds:
        return "bf16"
    a, w = (name.removeprefix("torch.").split("_")[0] for name in kinds.most_common(1)[0][0])
    if a == w:
        return {"float8": "fp8", "float4": "fp4", "bfloat16": "bf16", "float16": "fp16", "int8": "i8"}.get(a, a)
    return f"a{_BITS.get(a, '16')}w{_BITS.get(w, '16')}"
