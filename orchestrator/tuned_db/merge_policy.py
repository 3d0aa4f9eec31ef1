"""The rule by which a newcomer replaces a row of the tuned DB, one for `tune --db` and `db merge`. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from orchestrator.tables.tuned import kernel_of, number_of
from worker.families import backend_of

MARGIN = 0.03
"""What counts as noise where no spread is known (AITER: --min_improvement_pct 3.0)."""

Policy = Literal["best", "noise", "replace"]
Action = Literal["added", "replaced", "kept", "rejected"]
ACTIONS: tuple[Action, ...] = ("added", "replaced", "kept", "rejected")
Basis = Literal["", "new key", "same profile", "old figure", "no old time"]
"""How a row was judged: against its own kernel's time in the newcomer's profile, or against the figure in the table."""

Identity = tuple[str, str, str]
"""What makes a kernel the same one: backend, names, split and block of it."""


@dataclass(frozen=True, slots=True)
class Time:
    """A time in microseconds with its relative spread; 0: not known."""

    us: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    action: Action
    judged: Basis
    why: str


NUMBERS = ("splitK", "ksplit", "block_m")


def identity(cells: Mapping[str, str], family: str) -> Identity | None:
    """The kernel of a row, the same in tables of every date; None where the row names none."""
    name = kernel_of(cells)
    if not name:
        return None
    return backend_of(family, cells), name, split_of(tuple(cells.get(n, "") for n in NUMBERS))


@lru_cache(10_000)
def split_of(texts: tuple[str, ...]) -> str:
    """The cells of NUMBERS, however they are spelled."""
    return "/".join(f"{number_of(t) or 0:g}" for t in texts)


def decide(
    old: Time | None,
    new: Time,
    *,
    is_key: bool,
    rival: Time | None,
    policy: Policy,
    margin: float,
    same_kernel: bool = False,
) -> Decision:
    """Judge a key's champion against its incumbent, once.

    `is_key`: the table has a row of this key. `old`: its figure, None where it has no time. `rival`: its own kernel's
    time in the profile that `new` is of, None where that was not measured. `same_kernel`: the champion is that
    kernel, and there is nothing to win. Of one profile both times are of the same
    session, and their spreads are the noise; a figure of another session is also moved by what no spread tells
    (clocks, temperature, drivers), so that the noise is never taken as less than `margin` there.
    """
    if not is_key:
        return Decision("added", "new key", "the table had no row of this key")
    if rival is None and old is None:
        return Decision("replaced", "no old time", "the old row had no time")
    if rival is not None and old is not None and same_kernel and policy != "replace":
        return Decision("kept", "same profile", "its own kernel is the fastest in the same profile, too")
    judged: Basis = "old figure" if rival is None else "same profile"
    against = rival or old
    assert against is not None
    gain = (against.us - new.us) / against.us
    where = " in the same profile" if rival else ""
    if gain <= 0:
        why = (
            f"slower by {-gain:.1%}{where}" if gain < 0 else f"as fast as the old {'kernel' if rival else 'row'}{where}"
        )
    else:
        why = f"faster by {gain:.1%}{where}"
    if policy == "replace":
        return Decision("replaced", judged, why if gain > 0 else f"{why}; replaced as asked")
    needed, what = noise(new, against, margin, same_session=rival is not None)
    if policy == "best" or gain <= 0:
        return Decision("replaced" if gain > 0 else "kept", judged, why)
    if gain > needed:
        return Decision("replaced", judged, why)
    return Decision("kept", judged, f"{why}, which is not more than {what} of {needed:.1%}")


def noise(new: Time, old: Time, margin: float, *, same_session: bool) -> tuple[float, str]:
    """(the relative difference that is taken for noise, its name)."""
    both = math.hypot(new.spread, old.spread)
    if same_session and new.spread > 0 and old.spread > 0:
        return both, "the noise of both"
    if both <= margin:
        return margin, "the margin"
    return both, "its own spread" if not old.spread else "the noise of both"
