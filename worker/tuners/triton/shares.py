"""How the stream kernel shares a problem's steps along K out: whole tiles first, then one row of steps in equal parts.

    whole tiles    max(0, tiles // programs - 1) programs: each program has the same number of them
    streamed       the tiles after them, `steps` of K in all; program p begins with step p steps // programs

so step s belongs to program ((s + 1) programs - 1) // steps, and no tile in parts is followed by a whole one.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.tuners.triton.candidate import Candidate
from worker.tuners.triton.problem import Problem
from worker.tuners.triton.resources import occupancy
from worker.tuners.triton.target import Target

TWO = 2
"""Programs a multiprocessor at most: more of them make more parts."""


@dataclass(frozen=True, slots=True)
class Shares:
    """`blocks` steps a tile; the first `whole` tiles are not streamed."""

    programs: int
    tiles: int
    whole: int
    blocks: int

    @property
    def steps(self) -> int:
        """Streamed steps of all programs."""
        return (self.tiles - self.whole) * self.blocks

    @property
    def longest(self) -> int:
        """Steps of the program that has most, whole tiles included."""
        return self.whole // self.programs * self.blocks + -(-self.steps // self.programs)

    @property
    def parts(self) -> int:
        """Parts beyond one a tile: cuts that fall inside a tile."""
        inside = (p * self.steps // self.programs % self.blocks for p in range(1, self.programs))
        return sum(1 for at in inside if at)

    def owners(self, tile: int) -> range:
        """Programs that have steps of a streamed tile, counted from the first streamed one."""
        head = ((tile * self.blocks + 1) * self.programs - 1) // self.steps
        return range(head, ((tile + 1) * self.blocks * self.programs - 1) // self.steps + 1)


def shares(p: Problem, c: Candidate, target: Target) -> Shares:
    """The shares of a stream candidate."""
    tiles = p.b * -(-p.m // c.block_m) * -(-p.n // c.block_n)
    blocks = -(-p.k // c.block_k)
    slots = target.sms * min(TWO, occupancy(p, c, target))
    whole = max(0, tiles // slots - 1) * slots
    return Shares(min(slots, (tiles - whole) * blocks), tiles, whole, blocks)
