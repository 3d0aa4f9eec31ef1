"""The outcome of each row that is published: added, edited where another file owns its key, or left out. Pure.

AITER merges all tables of a family, and a key may be there once. So a newcomer whose key a file has already edits that
row, if it is faster by more than the noise, and is left out otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from orchestrator.shapes.writing import PadLevel, grid_point
from orchestrator.tables.tuned import Key, Place
from orchestrator.tuned_db.merge_policy import MARGIN, Action, Newcomer, NewcomerPool, Time, decide
from worker.families import Family

Outcome = Literal["added", "edited", "kept", "refused"]
PADS: tuple[PadLevel, ...] = ("fine", "coarse")
_OUTCOMES: Mapping[Action, Outcome] = {"added": "added", "replaced": "edited", "kept": "kept", "rejected": "refused"}


@dataclass(frozen=True, slots=True)
class Owner:
    """The row that has a newcomer's key: its file below the checkout, its line, its cells by our names."""

    file: str
    line: int
    cells: Mapping[str, str]
    us: float | None


@dataclass(frozen=True, slots=True)
class Settled:
    """A row's outcome. `before`: the time to beat, None where none is known; `paired`: it was measured in turn with
    `after`, and is not the figure of the owner's row. `rebuild`: an image built without the row has to be rebuilt."""

    new: Newcomer
    outcome: Outcome
    why: str
    after: Time
    before: Time | None = None
    paired: bool = False
    owner: Owner | None = None
    rebuild: bool = False

    @property
    def speedup(self) -> float:
        """Time before over time after, 0 where the former is not known."""
        return self.before.us / self.after.us if self.before else 0.0


def settle(
    pool: NewcomerPool, owners: Mapping[Place, Owner], held: Callable[[Newcomer], tuple[str, bool]]
) -> list[Settled]:
    """The outcome of every champion, in the order of the keys.

    `held`: the reason for which the build must not get a row, "" where it may, and True where it then needs a rebuild.
    """
    out = []
    for new in pool.champions():
        owner, (refused, rebuild), (after, rival) = owners.get(new.place), held(new), pool.times(new)
        figure = Time(owner.us) if owner and owner.us is not None else None
        outcome: Outcome = "refused"
        before, why = rival or figure, refused
        if not refused and pool.is_incumbent(new):
            why, outcome = "its kernel is the row's already", "kept"
        elif not refused and owner is not None and before is None:
            why, outcome = f"{owner.file}:{owner.line} has the key, and no time to compare with", "kept"
        elif not refused:
            found = decide(figure, after, is_key=owner is not None, rival=rival, policy="noise", margin=MARGIN)
            why, outcome = found.why, _OUTCOMES[found.action]
        out.append(Settled(new, outcome, why, after, before, rival is not None, owner, rebuild))
    return out


def misses(keys: Iterable[Key], there: set[Key], family: Family) -> int:
    """Number of keys for which AITER's lookup finds no row: neither the exact M nor its two paddings."""
    padded = [(key, *((*key[:2], *grid_point(key[2:], family, level)) for level in PADS)) for key in keys]
    return sum(there.isdisjoint(tried) for tried in padded)
