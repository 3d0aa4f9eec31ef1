"""The decision of a merge: whether a key's new row replaces the one in the table, by two times and their noise. Pure.

`NewcomerPool.judge` (`newcomers.py`) finds the two times and calls `decide`, once for each key. The result does not
depend on the order of rows and files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

MARGIN = 0.03
"""The relative difference that counts as noise where no spread is known (AITER: --min_improvement_pct 3.0)."""
CLOCKS = 0.15
"""The relative difference of two times of a kernel in one attempt that its clock may cause, without a trace in their
spreads. On an H200 62 of 72 winners of the tuner torch differed by at most 3 %, large problems by up to 13 %."""

MergePolicy = Literal["best", "noise", "replace"]
Action = Literal["added", "replaced", "kept", "rejected", "edited", "refused"]
"""The outcomes of a newcomer; the last two are of `publish`, which edits rows of other files and refuses more."""
ACTIONS: tuple[Action, ...] = ("added", "replaced", "kept", "rejected")
Basis = Literal["", "new key", "same profile", "old figure", "no old time"]
"""The basis of a judgement: its own kernel's time in the newcomer's profile, or the figure in the table."""


@dataclass(frozen=True, slots=True)
class Time:
    """A time in microseconds with its relative spread; 0: not known."""

    us: float
    spread: float = 0.0


def decide(
    old: Time | None,
    new: Time,
    *,
    is_key: bool,
    rival: Time | None,
    policy: MergePolicy,
    same_kernel: bool = False,
) -> tuple[Action, Basis, str]:
    """Judge a key's champion against its incumbent, once: the outcome, by which figure, and why.

    `is_key`: the table has a row of this key. `old`: its figure, None where it has no time. `rival`: its own kernel's
    time in the profile that `new` is of, None where that was not measured. `same_kernel`: the champion is that
    kernel, and there is nothing to win.

    `rival` counts before `old`: in one profile both times are of the same session, and their spreads are the noise. A
    figure of another session is also moved by what no spread shows (clocks, temperature, drivers), so the noise is
    never taken as less than MARGIN there.
    """
    if not is_key:
        return "added", "new key", "the table had no row of this key"
    to_beat = rival or old
    if to_beat is None:
        return "replaced", "no old time", "the old row had no time"
    if rival is not None and old is not None and same_kernel and policy != "replace":
        return "kept", "same profile", "its own kernel is the fastest in the same profile, too"
    basis: Basis = "same profile" if rival else "old figure"
    gain = (to_beat.us - new.us) / to_beat.us
    why = _describe_gain(gain, in_profile=rival is not None)
    if policy == "replace":
        return "replaced", basis, why if gain > 0 else f"{why}; replaced by policy"
    if gain <= 0:
        return "kept", basis, why
    needed, noise_name = noise(new, to_beat, same_session=rival is not None)
    if policy == "noise" and gain <= needed:
        return "kept", basis, f"{why}, which is not more than {noise_name} of {needed:.1%}"
    return "replaced", basis, why


def _describe_gain(gain: float, *, in_profile: bool) -> str:
    if gain > 0:
        text = f"faster by {gain:.1%}"
    elif gain < 0:
        text = f"slower by {-gain:.1%}"
    else:
        text = "as fast as the old kernel" if in_profile else "as fast as the old row"
    return f"{text} in the same profile" if in_profile else text


def noise(new: Time, old: Time, *, same_session: bool) -> tuple[float, str]:
    """(the relative difference that is taken for noise, its name)."""
    both = math.hypot(new.spread, old.spread)
    if same_session and new.spread > 0 and old.spread > 0:
        return both, "the noise of both"
    if both <= MARGIN:
        return MARGIN, "the margin"
    return both, "its own spread" if not old.spread else "the noise of both"


def is_noisy(first: Time, last: Time) -> bool:
    """Return whether a kernel's last time differs from its first by more than the spreads of both explain, and by more
    than CLOCKS."""
    explained = first.us * first.spread + last.us * last.spread
    return abs(last.us - first.us) > max(explained, first.us * CLOCKS)


def spread_of_noisy(first: Time, last: Time) -> float:
    """The spread of a noisy time. It beats another time by more than this if the upper bound of both times does."""
    upper_bound = max(time.us * (1 + time.spread) for time in (first, last))
    return 1 - last.us / upper_bound
