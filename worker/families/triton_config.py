"""Configs of our Triton kernels: tile, split-K, pipeline and compiler options, and the name that spells them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from worker.families.backends import TRITON


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """One way to run our kernels. The last three are ROCm's; 0 leaves the choice to the compiler.

    `split_k` programs share a tile's K; `persistent` starts one program a multiprocessor that goes on to further
    tiles; `descriptor` loads through tensor descriptors (TMA); `swap` multiplies W by X^T, so that N lies on the
    matrix instruction's long side (few M); `side` more columns lie beside block_n, so that a tile's width need not be
    a power of two.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    split_k: int = 1
    persistent: bool = False
    descriptor: bool = False
    num_warps: int = 4
    num_stages: int = 3
    waves_per_eu: int = 0
    matrix_instr_nonkdim: int = 0
    kpack: int = 1
    swap: bool = False
    side: int = 0

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return self.block_n + self.side

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Of two that are equally fast the lower one wins."""
        return self.split_k, int(self.persistent), self.num_stages

    @property
    def name(self) -> str:
        """The canonical text: `triton_128x256x64_g8_k1_w8_s3_persistent_tma`. ASCII, no commas."""
        columns = f"{self.block_n}+{self.side}" if self.side else f"{self.block_n}"
        parts = [
            f"{TRITON}{self.block_m}x{columns}x{self.block_k}",
            f"g{self.group_m}_k{self.split_k}_w{self.num_warps}_s{self.num_stages}",
        ]
        flags = [("swap", self.swap), ("persistent", self.persistent), ("tma", self.descriptor)]
        parts += [word for word, on in flags if on]
        knobs = [("eu", self.waves_per_eu), ("mfma", self.matrix_instr_nonkdim)]
        parts += [f"{word}{value}" for word, value in knobs if value]
        if self.kpack != 1:
            parts.append(f"kpack{self.kpack}")
        return "_".join(parts)


_NAME = re.compile(
    r"triton_(\d+)x(\d+)(?:\+(\d+))?x(\d+)_g(\d+)_k(\d+)_w(\d+)_s(\d+)"
    r"(_swap)?(_persistent)?(_tma)?(?:_eu(\d+))?(?:_mfma(\d+))?(?:_kpack(\d+))?"
)


def from_name(text: str) -> KernelConfig:
    """The candidate of a name. Raises ValueError for any other text."""
    found = _NAME.fullmatch(text)
    if not found:
        raise ValueError(f"{text[:80]!r} is no name of a triton candidate")
    m, n, side, k, group, split, warps, stages = (int(g or 0) for g in found.groups()[:8])
    swap, persistent, descriptor = (bool(g) for g in found.groups()[8:11])
    eu, mfma, kpack = (int(g or default) for g, default in zip(found.groups()[11:], (0, 0, 1), strict=True))
    return KernelConfig(m, n, k, group, split, persistent, descriptor, warps, stages, eu, mfma, kpack, swap, side)
