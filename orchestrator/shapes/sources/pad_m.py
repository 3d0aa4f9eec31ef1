"""The grid of M that AITER looks rows up on: a row tuned at a grid point serves every M below it to the next one.

AITER asks for the exact M, then for M padded finely, then for M padded coarsely. Source: `getPaddedM` in
csrc/py_itfs_cu/gemm_common.cu at e4048607a5, the same at v0.1.7. The batched families look up the exact M only. fmoe
takes its tokens to the next power of two below 32768 and to 32768 or 131072 from there (`get_padded_M`, fused_moe.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from worker.families import Family
from worker.text import plural

Level = Literal["fine", "coarse"]
_STEPS = ((256, 16), (1024, 32), (4096, 64))
_LAST_STEP = 128
_TOP, _TOP_ABOVE_N = 8192, 4096
_TOKEN_TIERS = (131072, 32768)
Key = tuple[int | str, ...]


def padded(m: int, n: int, level: Level) -> int:
    """The M that AITER looks up for `m` tokens and `n` output features."""
    if level == "fine":
        step = next((s for most, s in _STEPS if m <= most), _LAST_STEP)
        return -(-m // step) * step
    if m > _TOP and n > _TOP_ABOVE_N:
        return _TOP
    return _power(m)


def _power(m: int) -> int:
    return 1 << (m - 1).bit_length()


def grid_point(key: Key, family: Family, level: Level) -> Key:
    """The key with its M on the grid; unchanged where the family is looked up by the exact M."""
    at = family.key_names.index(family.m_column)
    m = int(key[at])
    if family.two_stages:
        m = next((tier for tier in _TOKEN_TIERS if m >= tier), _power(m))
    elif "B" not in family.key_names:
        m = padded(m, int(key[family.key_names.index("N")]), level)
    return (*key[:at], m, *key[at + 1 :])


@dataclass(frozen=True, slots=True)
class Saving:
    """What padding saved, in shapes."""

    before: int
    after: int
    level: Level

    def __str__(self) -> str:
        if self.before == self.after:
            return f"padding M ({self.level}): {plural(self.before, 'shape')}, none saved"
        less = 1 - self.after / self.before
        return f"padding M ({self.level}): {plural(self.before, 'shape')} became {self.after} ({less:.0%} less to tune)"


def pad(keys: Iterable[Key], family: Family, level: Level) -> tuple[dict[Key, int], Saving]:
    """(the distinct grid points in the order of first use, each with how many of `keys` it serves; the saving)."""
    out: dict[Key, int] = {}
    before = 0
    for key in keys:
        before += 1
        point = grid_point(key, family, level)
        out[point] = out.get(point, 0) + 1
    return out, Saving(before, len(out), level)
