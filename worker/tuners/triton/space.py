"""Legal candidates of a problem on a device, and the reason why another config is illegal.

The list is made from tiles that fit the device's matrix instructions, with a few depths, pipelines and splits each;
whatever cannot run is dropped unmeasured. A kernel compiles once for all splits, group orders and M.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from worker.families.triton_config import KernelConfig
from worker.tuners.common.problem import MX_GROUP, SCALE_BLOCK, Problem
from worker.tuners.search.target import Target
from worker.tuners.triton.launch import COUNTERS
from worker.tuners.triton.model import MAX_REGISTERS, occupancy, registers, shared_bytes

MAX_SPLIT = 32
MAX_BATCH = 65535
"""Programs that a grid can have along its second and third axis."""

_CUDA_TILES = (
    (16, 32, 4), (16, 64, 4), (16, 128, 4), (32, 32, 4), (32, 64, 4), (32, 128, 4), (64, 32, 4), (64, 64, 4),
    (64, 128, 4), (64, 256, 4), (64, 256, 8), (128, 64, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8), (256, 64, 8),
    (256, 128, 8),
)  # fmt: skip
_CUDA_SIDES = ((64, 128, 32, 4), (128, 128, 32, 4), (128, 128, 32, 8), (128, 128, 64, 8))
"""(block_m, block_n, side, num_warps): for outputs that the tiles above cut into a little more or far less than there
are multiprocessors."""
_HIP_TILES = (
    (16, 32, 4), (16, 64, 4), (16, 128, 4), (32, 32, 4), (32, 64, 4), (32, 128, 4), (64, 64, 4), (64, 128, 4),
    (128, 64, 4), (128, 128, 4), (128, 256, 8), (256, 128, 8), (256, 256, 8),
)  # fmt: skip
"""(block_m, block_n, num_warps)."""


def candidates(p: Problem, target: Target) -> list[KernelConfig]:
    """All legal candidates, without duplicates; empty where the device lacks the format (see why_unsupported)."""
    drafts = _cuda(p, target) if target.backend == "cuda" else _hip(p, target)
    found = (c for draft in drafts for c in _orders(p, draft, target))
    return list(dict.fromkeys(c for c in found if why_illegal(p, c, target) is None))


def why_unsupported(p: Problem, target: Target) -> str | None:
    """Reason that no candidate of this problem can run there, or None."""
    if p.dtype == "float8_e4m3fnuz" and target.arch != "gfx942":
        return f"{p.dtype} is gfx942's; {target.gfx} multiplies {target.fp8}"
    if p.dtype == "float8_e4m3fn" and (target.arch == "gfx942" or (target.backend == "cuda" and int(target.arch) < 89)):
        return f"{target.gfx} does not multiply {p.dtype}"
    return f"B is {p.b}; a grid takes {MAX_BATCH}" if p.b > MAX_BATCH else None


def why_illegal(p: Problem, c: KernelConfig, target: Target) -> str | None:
    """Reason that a candidate cannot run on a problem, or None."""
    return why_unsupported(p, target) or _form(p, c) or _descriptor(p, c, target) or _resources(p, c, target)


def _form(p: Problem, c: KernelConfig) -> str | None:
    sizes = (c.block_m, c.block_n, c.block_k, c.num_warps)
    if any(s < 1 or s & (s - 1) for s in sizes) or min(sizes[:3]) < 16 or c.group_m < 1 or c.num_stages < 1:
        return "blocks and warps must be powers of two, blocks at least 16"
    if c.block_k * p.bits < 256:
        return f"a step of {c.block_k} along K is shorter than the matrix instruction's 32 bytes"
    if c.side and (c.side & (c.side - 1) or not 16 <= c.side < c.block_n):
        return f"columns beside a tile must be a power of two from 16 on and fewer than block_n, not {c.side}"
    if c.side and (not c.descriptor or c.persistent or c.swap or p.scale in ("block", "mx")):
        return "columns beside a tile are the tiled kernel's, with descriptors and without swap or scales along K"
    tiles = _tiles(p, c)
    if tiles >= 2**31:
        return f"{tiles} tiles are more than a grid takes"
    blocks = -(-p.k // c.block_k)
    if not 1 <= c.split_k <= blocks:
        return f"split_k is {c.split_k}; K has {blocks} blocks"
    if c.split_k > 1 and tiles * p.b > COUNTERS:
        return f"split-K counts {COUNTERS} tiles, here are {tiles * p.b}"
    if c.persistent and (c.split_k > 1 or c.swap or p.scale in ("block", "mx")):
        return "the persistent kernel has no split_k, no swap and no scales along K"
    if p.scale == "block" and (c.block_k != SCALE_BLOCK or SCALE_BLOCK % c.block_n):
        return f"blocks of scales need block_k {SCALE_BLOCK} and a block_n that divides {SCALE_BLOCK}"
    if p.scale == "mx" and (c.swap or c.block_k < 2 * MX_GROUP):
        return f"the kernel for scales per {MX_GROUP} has no swap, and steps of at least {2 * MX_GROUP}"
    return None


def _descriptor(p: Problem, c: KernelConfig, target: Target) -> str | None:
    """StopRules of tensor maps: CUDA driver API, cuTensorMapEncodeTiled (strides of 16 bytes, boxes up to 256)."""
    if not c.descriptor:
        return None
    if not target.descriptors:
        return f"{target.gfx} has no tensor descriptors in hardware"
    if p.scale == "mx":
        return "the kernel for scales along K loads without descriptors"
    if p.k * p.bits // 8 % 16:
        return f"a row of {p.k * p.bits // 8} bytes is no multiple of 16, as descriptors need"
    return "a descriptor's block has at most 256 rows" if max(c.block_m, c.block_n) > 256 else None


def _resources(p: Problem, c: KernelConfig, target: Target) -> str | None:
    need = shared_bytes(p, c, target)
    if need > target.shared_bytes:
        return f"takes up to {need} bytes of shared memory, {target.shared_bytes} are there"
    lanes, each = c.num_warps * target.warp_size, registers(p, c, target)
    if lanes > 1024:
        return f"{lanes} lanes are more than a program may have"
    if each > MAX_REGISTERS[target.backend] or each * lanes > target.registers:
        return f"takes {each} registers a lane or more"
    return None


def _cuda(p: Problem, target: Target) -> Iterator[KernelConfig]:
    for m, n, warps in _fitting(p, _CUDA_TILES):
        for step in _steps(p, (128, 256)):
            for stages in (2, 3, 4, 6) if p.scale == "mx" else (3, 4, 6):
                c = KernelConfig(m, n, step, num_warps=warps, num_stages=stages)
                loads = replace(c, descriptor=True)
                direct = _descriptor(p, loads, target) is not None
                if direct or m < 64:
                    yield c
                if not direct:
                    yield loads
                    yield replace(loads, persistent=True)
                if m < 64 <= n and p.scale != "mx":
                    yield replace(c if direct else loads, swap=True)
    for m, n, side, warps in _CUDA_SIDES:
        for stages in (4, 6) if p.m > m // 2 and p.n > n else ():
            step = 1024 // p.bits
            yield KernelConfig(m, n, step, num_warps=warps, num_stages=stages, descriptor=True, side=side)


def _hip(p: Problem, target: Target) -> Iterator[KernelConfig]:
    for m, n, warps in _fitting(p, _HIP_TILES):
        for step in _steps(p, (128, 256)):
            for stages in (2, 3):
                for units in (0, 2) if m * n >= 128 * 128 else (0,):
                    for instruction in (16, 32) if min(m, n) >= 32 else (16,):
                        c = KernelConfig(m, n, step, num_warps=warps, num_stages=stages)
                        c = replace(c, waves_per_eu=units, matrix_instr_nonkdim=instruction)
                        yield c
                        yield replace(c, persistent=True)
                        if target.arch == "gfx942":
                            yield replace(c, kpack=2)


def _fitting(p: Problem, tiles: tuple[tuple[int, int, int], ...]) -> Iterator[tuple[int, int, int]]:
    """Tiles that are not twice as large as the output, nor tiny where it is large."""
    for m, n, warps in tiles:
        wasted = m >= 2 * max(16, p.m) or n >= 2 * max(32, p.n)
        tiny = (m < 64 and p.m > 4 * 64) or (m * n < 64 * 64 and p.b * p.m * p.n > 4096 * 4096)
        if not (wasted or tiny):
            yield m, n, warps


def _steps(p: Problem, row_bytes: tuple[int, ...]) -> Iterator[int]:
    """block_k by the bytes of a row that one step loads."""
    if p.scale == "block":
        yield SCALE_BLOCK
        return
    for size in row_bytes:
        step = 8 * size // p.bits
        if p.scale == "mx":
            step //= 2  # scales and codes of the full step would take most of the registers
        if size == row_bytes[0] or step < 2 * p.k:
            yield step


def _orders(p: Problem, c: KernelConfig, target: Target) -> Iterator[KernelConfig]:
    """A draft with the splits and group orders that make sense for the problem."""
    tiles, rows = _tiles(p, c) * p.b, -(-p.m // c.block_m)
    if c.persistent:
        if tiles > target.sms:
            yield from (replace(c, group_m=g) for g in ((4, 8, 16) if rows > 8 else (8,)))
        return
    for split in _splits(p, c, tiles, target):
        for group in (4, 8) if rows > 8 and split == 1 else (8,):
            yield replace(c, split_k=split, group_m=group)


def _splits(p: Problem, c: KernelConfig, tiles: int, target: Target) -> list[int]:
    """1, and where tiles leave multiprocessors idle, splits that fill them once or as often as programs fit."""
    blocks = -(-p.k // c.block_k)
    fit = occupancy(p, c, target)
    found = {1}
    for filled in {1, 2, fit} if fit > 1 else {1}:
        split = filled * target.sms // tiles
        if split > 1:
            found.add(max(1, min(split, blocks // 2, MAX_SPLIT)))
    return sorted(found)


def _tiles(p: Problem, c: KernelConfig) -> int:
    return -(-p.m // c.block_m) * -(-p.n // c.width)
