"""The noise of each row, learned from the whole table: one noise for all rows where nothing speaks against it, else
empirical Bayes on a grid of noise levels.

Three repeats a side tell little of a row's noise: 4 degrees of freedom, so that a noisy row often looks quiet. What
all rows say together narrows it down. Where the rows' scatter is what one common noise would give (a likelihood ratio
against the mixture below), the pooled variance judges all rows, nearly as well as if the noise were known. Else the
share of rows at each noise level is fitted to the table by maximum likelihood (Kiefer and Wolfowitz 1956; EM), and a
row's own repeats weigh the levels (Robbins 1956); limma's moderated t (Smyth 2004) is the same with a fixed family of
distributions. A row's own share is taken out of the fit before its repeats weigh it: they must not count twice.

Arrays may have further axes before the rows: a benchmark judges thousands of tables at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import erfc, sqrt

import numpy as np

from orchestrator.analysis.compare.repeats import AGREE, Bools, Floats

_FARTHEST = 37.0
"""Standard deviations beyond which the tail is no longer a normal number."""


def above(z: Floats) -> Floats:
    """The share of a standard normal above `z`, to 5 digits: the logarithm of erfc, interpolated."""
    at, log = _tail()
    return np.asarray(np.exp(np.interp(z, at, log)))


@cache
def _tail() -> tuple[Floats, Floats]:
    at = np.linspace(-_FARTHEST, _FARTHEST, 40_001)
    return at, np.log([erfc(z / sqrt(2)) / 2 for z in at.tolist()])


LEVELS: Floats = np.geomspace(0.0005, 0.32, 52)
"""Noise levels that are told apart: standard deviations of the logarithm of one repeat, 0.05 % to 32 %."""
UNKNOWN_ROWS = 2.0
"""The fit sees so many rows more, spread evenly over all levels: a table cannot be sure that no other row is noisy."""
UNKNOWN_ROWS_ALIKE = 0.3
"""The same where all rows look equally noisy."""
ALIKE = 1.0
"""Rows are taken to be equally noisy where the mixture's likelihood exceeds the pooled one's by less: twice the
difference of the logarithms. Tables of equal rows stay below it in nine cases of ten."""
STRAYS = 0.02
"""So many repeats stray for reasons of their own."""
ROUNDS = 100
_STEPS = np.linspace(-6.0, 6.0, 41)


@dataclass(frozen=True, slots=True)
class Noise:
    """`weights` (rows, levels): how likely each row is at each of `levels` (1, levels); `alike`: one noise for all."""

    levels: Floats
    weights: Floats
    alike: Bools

    @property
    def by_row(self) -> Floats:
        """Each row's noise: root of the mean variance."""
        return np.asarray(np.sqrt((self.weights * self.levels**2).sum(axis=-1)))


def learn(squares: Floats, degrees: Floats, strays: Floats) -> Noise:
    """Noise of rows with sums of squares `squares` of `degrees` degrees of freedom (0: the row says nothing).

    `strays` is how many repeats of each row were left out for being more than 5 % from the middle. They are evidence
    too: a noisy row has more of them, and what is kept of it looks quieter than it is.
    """
    says = degrees > 0
    exponent = (
        -degrees[..., None] * np.log(LEVELS) - squares[..., None] / (2 * LEVELS**2) + strays[..., None] * _stray(LEVELS)
    )
    exponent = np.where(says[..., None], exponent, 0.0)
    highest = exponent.max(axis=-1, keepdims=True)
    likelihood = np.exp(exponent - highest)
    rows = says.sum(axis=-1)[..., None]
    shares = np.full((*rows.shape[:-1], len(LEVELS)), 1 / len(LEVELS))
    unknown = UNKNOWN_ROWS / len(LEVELS)
    said = likelihood * says[..., None]
    for _ in range(ROUNDS):
        there = (likelihood @ shares[..., None])[..., 0]
        shares = (shares * ((1 / there)[..., None, :] @ said)[..., 0, :] + unknown) / (rows + UNKNOWN_ROWS)
    there = (likelihood * shares[..., None, :]).sum(axis=-1, keepdims=True)
    own = np.where(says[..., None], likelihood * shares[..., None, :] / there, 0.0)
    others = np.maximum(shares[..., None, :] * (rows + UNKNOWN_ROWS)[..., None] - own, unknown)
    mixed = likelihood * others
    mixed /= mixed.sum(axis=-1, keepdims=True)
    return _alike_or_mixed(squares, degrees, strays, (np.log(there) + highest)[..., 0], exponent, mixed)


def _stray(level: Floats) -> Floats:
    """The logarithm of the chance that a repeat strays: for reasons of its own, or by noise of this level."""
    return np.asarray(np.log(STRAYS + (1 - STRAYS) * 2 * above(np.log(AGREE) / level)))


def _pooled(squares: Floats, degrees: Floats, strays: Floats) -> Floats:
    """The common variance by maximum likelihood: that of the squares, or more where repeats strayed."""
    seen = np.sqrt(np.maximum(squares / np.maximum(degrees, 1), LEVELS[0] ** 2))
    levels = seen[..., None] * np.exp(np.linspace(0.0, 0.4, 41))
    likely = -degrees[..., None] * np.log(levels) - squares[..., None] / (2 * levels**2)
    at = (likely + strays[..., None] * _stray(levels)).argmax(axis=-1)
    return np.asarray(np.take_along_axis(levels, at[..., None], axis=-1)[..., 0] ** 2)


def _alike_or_mixed(
    squares: Floats, degrees: Floats, strays: Floats, fitted: Floats, exponent: Floats, mixed: Floats
) -> Noise:
    """The mixture, or the pooled variance (and UNKNOWN_ROWS_ALIKE) where the rows look alike."""
    says, total = degrees > 0, degrees.sum(axis=-1)
    of_rows = (np.where(says, x, 0.0).sum(axis=-1) for x in (squares, degrees, strays))
    variance = _pooled(*of_rows)
    pooled = -degrees / 2 * np.log(variance)[..., None] - squares / (2 * variance[..., None])
    pooled += strays * _stray(np.sqrt(variance))[..., None]
    gained = 2 * np.where(says, fitted - pooled, 0.0).sum(axis=-1)
    alike = (gained <= ALIKE) & (total > 0)
    around, known = pooled_levels(variance, total)
    rows = says.sum(axis=-1)
    doubt = (UNKNOWN_ROWS_ALIKE / (rows + UNKNOWN_ROWS_ALIKE))[..., None, None] / len(LEVELS)
    at_levels = doubt * np.exp(np.minimum(exponent - pooled[..., None], 300.0))
    at_pooled = (1 - doubt * len(LEVELS)) * known[..., None, :]
    together = np.concatenate([at_levels, np.broadcast_to(at_pooled, (*squares.shape, len(_STEPS)))], axis=-1)
    together /= together.sum(axis=-1, keepdims=True)
    apart = np.concatenate([mixed, np.zeros((*squares.shape, len(_STEPS)))], axis=-1)
    levels = np.concatenate([np.broadcast_to(LEVELS, (*variance.shape, len(LEVELS))), around], axis=-1)[..., None, :]
    return Noise(levels, np.where(alike[..., None, None], together, apart), alike)


def pooled_levels(variance: Floats, degrees: Floats) -> tuple[Floats, Floats]:
    """(levels, weights): a common noise of which a variance of so many degrees of freedom is known.

    Weighed so, normal tails make Student's t.
    """
    n = np.maximum(degrees, 1)[..., None]
    steps = _STEPS / np.sqrt(2 * n)
    exponent = -n * steps - n / 2 * np.exp(-2 * steps)
    weights = np.exp(exponent - exponent.max(axis=-1, keepdims=True))
    return np.sqrt(variance)[..., None] * np.exp(steps), weights / weights.sum(axis=-1, keepdims=True)


def chance(noise: Noise, change: Floats, spread: Floats, extra: Floats) -> Floats:
    """Probability that a row without a change shows `change` (of the logarithm) or more.

    `spread` is the standard deviation of the difference of the two means, in units of the row's noise; `extra` (one a
    table) a standard deviation that comes on top: the drift that could not be removed.
    """
    deviation = np.sqrt((spread[..., None] * noise.levels) ** 2 + extra[..., None, None] ** 2)
    return np.asarray((noise.weights * above(change[..., None] / deviation)).sum(axis=-1))
