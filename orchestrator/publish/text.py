"""Title and facts of a pull request. Pure.

Reviews of ROCm/aiter want the exact commands, ROCm, GPU model and AITER commit (#5500), and a title that names the data
types of the rows (#3693).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orchestrator.configs.winners import WonFile
from orchestrator.errors import InputError
from orchestrator.publish.part import Part
from orchestrator.publish.rows import Settled
from orchestrator.shapes.model import ELEMENT_TYPES, family_type
from worker.families import Family
from worker.text import plural

FACTS: Mapping[str, str] = {
    "device": "GPU", "rocm": "ROCm", "aiter_commit": "AITER commit when measured", "image": "image digest",
    "tuner": "tuner", "node": "node", "run": "run",
}  # fmt: skip
"""Fields of a row's record, and their names in the text."""
NEEDED = ("device", "rocm", "aiter_commit", "run")
UNKNOWN = "not recorded"
_TYPE_WORD = re.compile(r"(?<![a-z0-9])(?:mx)?(?:fp|bf|int)\d+(?![0-9])", re.I)


def types_of(family: Family, rows: Iterable[Settled]) -> set[str]:
    """The data types of rows as people call them, by their own columns, else by the family."""
    columns = [c for c in ("q_dtype_a", "q_dtype_w", "dtype") if c in family.key_names][:2]
    if not columns:
        return {(family_type(family) or ("fp8",))[0]}
    names = {r.new.cells.get(c, "") for r in rows for c in columns}
    return {ELEMENT_TYPES[n][0] if n in ELEMENT_TYPES else n.removeprefix("torch.") for n in names}


def title_of(wanted: str, model: str, parts: Sequence[Part], won: Sequence[WonFile]) -> str:
    """The title, checked where the user gave one. Raises InputError where that names data types of no row."""
    types = {t for p in parts for t in types_of(p.family, p.written)}
    named = {word.lower().removeprefix("mx") for word in _TYPE_WORD.findall(wanted)}
    if not won and (wrong := named - types):
        raise InputError(f"--title names {', '.join(sorted(wrong))}, and the rows are of {', '.join(sorted(types))}")
    chips = sorted({str(r.new.key[0]) for p in parts for r in p.written} | {w.gfx for w in won})
    what = [f"{p.family.name} ({', '.join(sorted(types_of(p.family, p.written)))})" for p in parts if p.written]
    what += sorted({f"Triton {w.kind.config}" for w in won})
    tags = "[Triton/Gluon] [Config]" if won else "[Config]"
    return wanted or f"{tags} Tune {model} {' and '.join(what)} GEMMs for {', '.join(chips)}"


def summary(facts: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], list[str]]:
    """(what rows were measured with, by its name; the names of what a review needs and some row has no record of)."""
    out, missing = dict[str, str](), list[str]()
    for field, name in FACTS.items():
        values = Counter(str(f.get(field) or UNKNOWN) for f in facts)
        out[name] = "; ".join(f"{v} ({plural(n, 'row')})" if len(values) > 1 else v for v, n in values.most_common())
        missing += [name] if field in NEEDED and (UNKNOWN in values or not values) else []
    clocks = [c for f in facts for c in (f.get("clocks") or {}).values()]
    for field, name in (("clock_mhz", "GPU clock (MHz)"), ("memory_clock_mhz", "memory clock (MHz)")):
        numbers = [c[field] for c in clocks if c.get(field)]
        out[name] = f"{min(numbers):g} to {max(numbers):g}" if numbers else UNKNOWN
    for field, name in (("tried", "candidates tried"), ("failed", "of them without a right result")):
        counts = [f[field] for f in facts if f.get(field) is not None]
        out[name] = f"{sum(counts):,}" if counts else UNKNOWN
    return out, missing
