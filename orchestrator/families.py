"""Families as the controller knows them: by the name that a user typed, their element types, the M of a lookup.

AITER asks for the exact M, then for M padded finely, then for M padded coarsely. Source: `getPaddedM` in
csrc/py_itfs_cu/gemm_common.cu at e4048607a5, the same at v0.1.7. The batched families look up the exact M only. fmoe
takes its tokens to the next power of two below 32768 and to 32768 or 131072 from there (`get_padded_M`, fused_moe.py).
"""

from __future__ import annotations

import difflib
from typing import Literal

from orchestrator.errors import InputError
from worker.families import FAMILIES, Family


def get_family(name: str) -> Family:
    """The family of that name. Raises InputError with the nearest name if no family has it."""
    if name in FAMILIES:
        return FAMILIES[name]
    near = [f for f in FAMILIES if name and f.startswith(name.lower())]
    near = near or difflib.get_close_matches(name.lower(), FAMILIES, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise InputError(f"unknown family {name[:40]!r}{hint} (families: {', '.join(FAMILIES)})")


ELEMENT_TYPES = {
    "torch.bfloat16": ("bf16", 2.0), "torch.float16": ("fp16", 2.0), "torch.float32": ("fp32", 4.0),
    "torch.int8": ("int8", 1.0), "torch.float8_e4m3fn": ("fp8", 1.0), "torch.float8_e4m3fnuz": ("fp8", 1.0),
}  # fmt: skip
FORMAT_TYPES = {"mx4": ("fp4", 0.5), "block8": ("fp8", 1.0), "row8": ("int8", 1.0), "row16": ("bf16", 2.0)}
"""Types of families whose key names none."""


def family_type(family: Family) -> tuple[str, float] | None:
    """(type, bytes an element) of a family whose shapes are all of one type, None where the key names it."""
    return None if {"q_dtype_w", "dtype"} & set(family.key_names) else FORMAT_TYPES.get(family.format)


PadLevel = Literal["fine", "coarse"]
_STEPS = ((256, 16), (1024, 32), (4096, 64))
_LAST_STEP = 128
_TOP, _TOP_ABOVE_N = 8192, 4096
_TOKEN_TIERS = (131072, 32768)


def padded(m: int, n: int, level: PadLevel) -> int:
    """The M that AITER looks up for `m` tokens and `n` output features."""
    if level == "fine":
        step = next((s for most, s in _STEPS if m <= most), _LAST_STEP)
        return -(-m // step) * step
    if m > _TOP and n > _TOP_ABOVE_N:
        return _TOP
    return _power(m)


def _power(m: int) -> int:
    return 1 << (m - 1).bit_length()


def grid_point(key: tuple[int | str, ...], family: Family, level: PadLevel) -> tuple[int | str, ...]:
    """The key with its M on the grid; unchanged where the family is looked up by the exact M."""
    at = family.key_names.index(family.m_column)
    m = int(key[at])
    if family.two_stages:
        m = next((tier for tier in _TOKEN_TIERS if m >= tier), _power(m))
    elif not family.aiter.exact_m:
        m = padded(m, int(key[family.key_names.index("N")]), level)
    return (*key[:at], m, *key[at + 1 :])
