"""Element types and operand bytes of shapes."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.shapes.model import Key
from worker.families import Family

ELEMENT_TYPES = {
    "torch.bfloat16": ("bf16", 2.0), "torch.float16": ("fp16", 2.0), "torch.float32": ("fp32", 4.0),
    "torch.int8": ("int8", 1.0), "torch.float8_e4m3fn": ("fp8", 1.0), "torch.float8_e4m3fnuz": ("fp8", 1.0),
}  # fmt: skip
FORMAT_TYPES = {"mx4": ("fp4", 0.5), "block8": ("fp8", 1.0), "row8": ("int8", 1.0), "row16": ("bf16", 2.0)}
"""Types of families whose key names none."""


def family_type(family: Family) -> tuple[str, float] | None:
    """(type, bytes an element) of a family whose shapes are all of one type, None where the key names it."""
    return None if {"q_dtype_w", "dtype"} & set(family.key_names) else FORMAT_TYPES.get(family.format)


def element_type(family: Family) -> Callable[[Key], tuple[str, float] | None]:
    """A function from a key to (type, bytes an element) of its operands; to None where the family does not say."""
    fixed, names = family_type(family), family.key_names
    at = next((names.index(c) for c in ("q_dtype_w", "dtype") if c in names and family.m_column == "M"), None)
    if fixed is not None or at is None:
        return lambda key: fixed
    return lambda key: ELEMENT_TYPES.get(str(key[at]))


def operand_bytes(family: Family) -> Callable[[Key], float]:
    """A function from a key to the bytes of A, B and the result, without scales; 0 where they are not known (fmoe)."""
    typed, names = element_type(family), family.key_names
    if not {"M", "N", "K"} <= set(names):
        return lambda key: 0.0
    at_m, at_n, at_k = (names.index(c) for c in ("M", "N", "K"))
    at_b = names.index("B") if "B" in names else None
    at_out = names.index("outdtype") if "outdtype" in names else None

    def size(key: Key) -> float:
        kind = typed(key)
        if kind is None:
            return 0.0
        m, n, k = int(key[at_m]), int(key[at_n]), int(key[at_k])
        out = ELEMENT_TYPES.get(str(key[at_out]), ("", 2.0))[1] if at_out is not None else 2.0
        return (int(key[at_b]) if at_b is not None else 1) * (kind[1] * (m * k + n * k) + out * m * n)

    return size
