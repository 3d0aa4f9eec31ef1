"""How noisy each row is, learned from the whole table: empirical Bayes on a grid of noise levels.

Three repeats a side tell little of a row's noise: 4 degrees of freedom, so that a noisy row often looks quiet. What
all rows say together narrows it down: the share of rows at each noise level is fitted to all of them by maximum
likelihood (Kiefer and Wolfowitz 1956; EM), and a row's own repeats then weigh those levels (Robbins 1956). The same
idea with a fixed family of distributions is the moderated t statistic of limma (Smyth 2004).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import erfc, sqrt

import numpy as np

from orchestrator.analysis.compare.repeats import AGREE, ENOUGH, Floats

LEVELS: Floats = np.geomspace(0.0005, 0.08, 40)
"""Noise levels that are told apart: standard deviations of the logarithm of one repeat, 0.05 % to 8 %."""
UNKNOWN_ROWS = 6.0
"""The fit sees so many rows more, spread evenly over all levels: a small table cannot be sure that none is noisy."""
ROUNDS = 60

_FARTHEST = 37.0
"""Standard deviations beyond which the tail is no longer a normal number."""


@dataclass(frozen=True, slots=True)
class Noise:
    """`shares` (levels,) of rows at each level; `weights` (rows, levels): how likely each row is at each."""

    shares: Floats
    weights: Floats

    @property
    def typical(self) -> float:
        """The noise of the middle row, as a share of its time."""
        at = int(np.searchsorted(np.cumsum(self.shares), 0.5))
        return float(LEVELS[min(at, len(LEVELS) - 1)])

    @property
    def by_row(self) -> Floats:
        """Each row's noise: root of the mean variance."""
        return np.sqrt(self.weights @ LEVELS**2)


@cache
def _three_agree() -> Floats:
    """How likely three repeats agree, by level: P(range of three normals <= r) = 3 int phi(x) (Phi(x+r) - Phi(x))^2 dx.

    Rows that disagree are not judged, so those that are look quieter than they are, the more so the noisier they are:
    the likelihood of a level is that of repeats of which the disagreeing are never seen.
    """
    x = np.linspace(-8, 8, 801)
    density = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    within = _above(x) - _above(x + np.log(AGREE) / LEVELS[:, None])
    return np.asarray(ENOUGH * (density * within ** (ENOUGH - 1)).sum(axis=1) * (x[1] - x[0]))


@cache
def _near_the_middle() -> Floats:
    """How likely a repeat is within 5 % of the middle, by level."""
    return 1 - 2 * _above(np.log(AGREE) / LEVELS)


def learn(squares: Floats, degrees: Floats, threes: Floats, others: Floats) -> Noise:
    """Noise of rows with sums of squares `squares` of `degrees` degrees of freedom (0: the row says nothing).

    `threes` is how many sides of each row had three repeats only, all of which had to agree; `others` how many repeats
    the other sides kept, each of which had to be within 5 % of the middle.
    """
    exponent = -degrees[:, None] * np.log(LEVELS) - squares[:, None] / (2 * LEVELS**2)
    exponent -= threes[:, None] * np.log(_three_agree()) + others[:, None] * np.log(_near_the_middle())
    exponent = np.where(degrees[:, None] > 0, exponent, 0.0)
    likelihood = np.exp(exponent - exponent.max(axis=1, keepdims=True))
    said = likelihood[degrees > 0]
    shares = np.full(len(LEVELS), 1 / len(LEVELS))
    unknown = UNKNOWN_ROWS / len(LEVELS)
    for _ in range(ROUNDS):
        rows_at = shares * (said.T @ (1 / (said @ shares)))  # how many rows are at each level, were `shares` right
        shares = (rows_at + unknown) / (len(said) + UNKNOWN_ROWS)
    weights = likelihood * shares
    return Noise(shares, weights / weights.sum(axis=1, keepdims=True))


def chance(noise: Noise, change: Floats, spread: Floats, extra: float) -> Floats:
    """How likely each row shows `change` (of the logarithm) or more though nothing changed.

    `spread` is the standard deviation of the difference of the two means, in units of the row's noise; `extra` a
    standard deviation that comes on top: the drift that could not be removed.
    """
    deviation = np.sqrt((spread[:, None] * LEVELS) ** 2 + extra**2)
    return np.asarray((noise.weights * _above(change[:, None] / deviation)).sum(axis=1))


def _above(z: Floats) -> Floats:
    """The share of a standard normal above `z`, to 5 digits: the logarithm of erfc, interpolated."""
    at, log = _tail()
    return np.asarray(np.exp(np.interp(z, at, log)))


@cache
def _tail() -> tuple[Floats, Floats]:
    at = np.linspace(-_FARTHEST, _FARTHEST, 40_001)
    return at, np.log([erfc(z / sqrt(2)) / 2 for z in at.tolist()])
