"""Noise and shift of a table, estimated from its own changes."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
import numpy.typing as npt

from orchestrator.analysis.compare.noise import LEVELS, Noise, above, pooled_levels
from orchestrator.analysis.compare.repeats import Bools, Floats

DRIFT = 0.007
"""What two sessions differ by for reasons of their own: 0.5 % each, so 0.7 % between the two."""
MOST_DRIFT = 0.02
"""A larger shift of the whole table is not taken for drift beyond this."""
ENOUGH_ROWS = 10
"""From so many rows on shift and scatter of the table are estimated; with fewer, DRIFT and ASSUMED count."""
ASSUMED = 0.05
"""The scatter of a change between two single times, where too few rows show it."""

_MAD = 1.4826
_TRIMMED = 0.9733
"""The variance of a standard normal cut at three standard deviations."""
_WORTH = 0.7
"""So many degrees of freedom a row is worth in the trimmed variance: the benchmark holds the rate of false alarms."""


@dataclass(frozen=True, slots=True)
class Shift:
    """A table's common shift, one entry a table: the median change and its standard error, what of it is `removed` as
    drift, the standard deviation `extra` that a row's change keeps of it, and how likely a table without a change
    shows as much beyond what is removed."""

    change: Floats
    error: Floats
    removed: Floats
    extra: Floats
    p: Floats


def masked_median(x: Floats, where: Bools) -> Floats:
    """The median along the last axis of what is marked; 0 where nothing is."""
    ordered = np.sort(np.where(where, x, np.inf), axis=-1)
    n = np.maximum(where.sum(axis=-1), 1)[..., None]
    two = np.concatenate([np.take_along_axis(ordered, (n - 1) // 2, -1), np.take_along_axis(ordered, n // 2, -1)], -1)
    return np.asarray(np.where(where.any(axis=-1), np.where(np.isfinite(two), two, 0.0).mean(axis=-1), 0.0))


def noise_of_changes(change: Floats, rows: Bools) -> Noise:
    """The noise of one time in a table without repeats: the variance of the changes within three robust standard
    deviations (1.4826 MAD) of their median, or ASSUMED."""
    n = rows.sum(axis=-1)
    around = change - masked_median(change, rows)[..., None]
    scale = np.maximum(_MAD * masked_median(np.abs(around), rows), LEVELS[0])
    kept = rows & (np.abs(around) <= 3 * scale[..., None])
    count = np.maximum(kept.sum(axis=-1), 1)
    variance = (np.where(kept, around, 0.0) ** 2).sum(axis=-1) / np.maximum(count - 1, 1) / _TRIMMED
    few = n < ENOUGH_ROWS
    variance = np.where(few, ASSUMED**2, np.maximum(variance, 2 * LEVELS[0] ** 2)) / 2  # of the two times one
    levels, weights = pooled_levels(variance, np.where(few, 1e9, _WORTH * (count - 1)))
    return Noise(levels[..., None, :], weights[..., None, :], ~few)


def shift_of(change: Floats, deviation: Floats, rows: Bools, paired: bool) -> Shift:
    """The shift of tables whose rows' changes have standard deviations `deviation`.

    Its standard error is that of a median: of the robust spread (1.4826 MAD) of the changes or of what their noise
    makes expected, the larger. Paired sides have no drift.
    """
    n = rows.sum(axis=-1)
    shift = masked_median(change, rows)
    seen = _MAD * masked_median(np.abs(change - shift[..., None]), rows)
    expected = masked_median(deviation, rows)
    enough = n >= ENOUGH_ROWS
    error = np.where(enough, np.maximum(seen, expected), expected) * median_error(n)
    removed, extra, own = np.zeros_like(shift), np.zeros_like(shift), error
    if not paired:
        removed = np.where(enough, np.clip(shift, -MOST_DRIFT, MOST_DRIFT), 0.0)
        extra = np.where(enough, error, DRIFT)
        own = np.where(enough, error, np.hypot(error, DRIFT))
    return Shift(shift, error, removed, extra, above((shift - removed) / np.maximum(own, 1e-9)))


def median_error(rows: npt.NDArray[np.int64]) -> Floats:
    """The standard error of the median of so many standard normal numbers."""
    return np.asarray(sqrt(np.pi) / np.sqrt(2 * np.maximum(rows, 1) + np.pi - 2))
