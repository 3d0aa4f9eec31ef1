"""AITER's preference for CK over ASM kernels with split-K, for the sentences about a choice that it would change. Pure.

Split-K zeroes the output before a call and adds into it. In 155fb2134d (2026-07-22) AITER's maintainers tuned 15 such
rows of a shipped table again with CK alone, and took CK wherever it was faster or within 1 us (9 of them were slower,
by up to 0.96 us). No script of AITER's has the rule at e4048607a5: its tuner takes the fastest, and so does gemmfleet.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.tables.tuned import number_of
from worker.families import Family, backend_of

COMMIT = "155fb2134d"
CK = ("ck", "cktile")


def is_split(family: Family, cells: Mapping[str, str]) -> bool:
    """True for a row of an ASM kernel that splits K, or could (splitK 1)."""
    return backend_of(family.name, cells) == "asm" and (number_of(cells.get("splitK", "")) or 0) >= 1


def remark(family: Family, old: Mapping[str, str], old_us: float, new: Mapping[str, str], new_us: float) -> str:
    """The end of a sentence on a CK row that gives way to an ASM kernel where AITER would keep it; else ""."""
    limit = family.aiter.ck_within_us
    if not 0 < old_us - new_us <= limit or backend_of(family.name, old) not in CK or not is_split(family, new):
        return ""
    return f"; AITER's maintainers keep CK within {limit:g} us of ASM with split-K ({COMMIT})"
