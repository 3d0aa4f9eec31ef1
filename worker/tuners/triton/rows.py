"""Rows of Triton candidates, and the line that sums up a ranking. Needs neither torch nor triton."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from worker.protocol import Row
from worker.text import plural
from worker.tuners.common.problem import Problem
from worker.tuners.common.rows import row_of
from worker.tuners.triton import messages
from worker.tuners.triton.kernel_config import KernelConfig


def row(
    c: KernelConfig, p: Problem, status: str, us: float, err: float = 1.0, spread: float = 0.0, samples: int = 0,
    detail: str = "",
) -> Row:  # fmt: skip
    """A candidate's row; `us` is -1 where it has no time. kernelId is a hash of the name, which holds every knob."""
    kernel_id = zlib.crc32(c.name.encode()) & 0x7FFFFFFF
    split = c.split_k if c.split_k > 1 else 0
    return row_of(p, "triton", c.name, kernel_id, split, status, us, err, spread, samples, detail)


def ranking_summary(candidates: Sequence[KernelConfig], ranked: messages.Ranked, tried: int) -> str:
    """Summary of the ranking: rounds, dropped samples, and the times of the others."""
    v = ranked.ranking
    others = sorted(
        (v.us[i], c.name + (" (tied)" if i in v.tied else "")) for i, c in enumerate(candidates) if i != v.winner
    )
    text = f"best of {tried}; ranked {len(candidates)} in {v.rounds} rounds"
    if ranked.dropped:
        text += f", {plural(ranked.dropped, 'sample')} dropped (clock throttled)"
    return text + (": next " + ", ".join(f"{name} {us:.4g} us" for us, name in others) if others else "")
