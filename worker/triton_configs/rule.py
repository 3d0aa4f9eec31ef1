"""Limits of a bucket: no measured M may become slower, and its tiles must fit into a chip's LDS."""

from __future__ import annotations

FACTOR = 1.005
SLACK_US = 0.5
IGNORED_US = 4.0
LDS_BYTES = {"gfx942": 65536, "gfx950": 163840, "gfx1250": 327680}
"""LDS of a compute unit; source: `_LDS_CAP_BYTES` in aiter/ops/triton/utils/_triton/arch_info.py at e4048607a5."""


def slower(old_us: float, new_us: float) -> bool:
    """True where an M counts as made slower: above 1.005 x old + 0.5 us. Below 4 us, timer noise decides, so nothing
    counts."""
    return max(old_us, new_us) >= IGNORED_US and new_us > FACTOR * old_us + SLACK_US
