"""The policy of a merge: newcomers checked and reduced to the fastest of each key, judged against the old row. Pure.

`tune --db`, `db merge` and `publish` share it. The result does not depend on the order of rows and files. A session is
what was measured together: an attempt of ours, or one profile CSV of AITER's. In each, the incumbent's own kernel may
have been measured again, which is the fairest time to judge by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

from orchestrator.files.cells import cell, cell_fault
from orchestrator.files.faults import shown
from orchestrator.tables.tuned import (
    TAG,
    Key,
    KeyFault,
    Place,
    kernel_of,
    key_dict,
    key_of,
    key_order,
    no_gfx,
    number_of,
    place_of,
)
from worker.families import NULLS, Family, backend_of
from worker.text import plural

SOURCE = "_source"
"""The file of a row: for its provenance, and because its rows may have been measured together."""
SAME = 1e-3
"""The largest relative difference of two texts of one time."""

Session = tuple[str, str, str, str]
"""(file, attempt, node, slot)"""


MARGIN = 0.03
"""The relative difference that counts as noise where no spread is known (AITER: --min_improvement_pct 3.0)."""

CLOCKS = 0.15
"""The relative difference of two times of a kernel in one attempt that its clock may cause, without a trace in their
spreads. On an H200 62 of 72 winners of the tuner torch differed by at most 3 %, large problems by up to 13 %."""

Policy = Literal["best", "noise", "replace"]
Action = Literal["added", "replaced", "kept", "rejected", "edited", "refused"]
"""The outcomes of a newcomer; the last two are of `publish`, which edits rows of other files and refuses more."""
ACTIONS: tuple[Action, ...] = ("added", "replaced", "kept", "rejected")
Basis = Literal["", "new key", "same profile", "old figure", "no old time"]
"""The basis of a judgement: its own kernel's time in the newcomer's profile, or the figure in the table."""

Identity = tuple[str, str, str]
"""The identity of a kernel: backend, names, split and block of it."""


@dataclass(frozen=True, slots=True)
class Time:
    """A time in microseconds with its relative spread; 0: not known."""

    us: float
    spread: float = 0.0


class Newcomer(NamedTuple):
    """A row that wants into a table. `us` is the time as it would be written, `spread` its relative spread (or 0)."""

    key: Key
    cells: dict[str, str]
    us: float
    spread: float
    kernel: str
    tag: str
    place: Place

    def rank(self) -> tuple[float, str, float, list[tuple[bool, str, str]]]:
        """Lowest time, then name, spread, whatever else differs, and at last the row's origin: a total order."""
        rest = sorted((name.startswith("_"), name, value) for name, value in self.cells.items())
        return (self.us, self.kernel, self.spread, rest)


@dataclass(frozen=True, slots=True)
class MergeRow:
    """The outcome of a newcomer. `key` holds gfx, cu_num and the family's columns; times are in microseconds.

    `judged` says against what; of `same profile`, `rival_us` is the time of the old kernel there. The key of a row that
    is rejected is as far as it is known.
    """

    action: Action
    key: dict[str, int | str]
    old_us: float | None
    new_us: float | None
    old_kernel: str
    new_kernel: str
    why: str
    judged: Basis = ""
    rival_us: float | None = None

    @property
    def times(self) -> str:
        """The times that were compared, in words: `why` is about these two. One kernel of one profile has one time."""
        before = self.rival_us if self.judged == "same profile" else self.old_us
        if self.judged == "same profile" and self.old_kernel == self.new_kernel:
            before = None
        return " -> ".join(f"{us:g} us" for us in (before, self.new_us) if us is not None)


@cache
def _written(family: Family) -> frozenset[str]:
    """The columns of a newcomer that a merge writes, by our names."""
    return frozenset((*family.tuned_header, TAG))


def _fault_of_cells(cells: Mapping[str, str], family: Family) -> str:
    """The first cell that may not stand in a user's table, "" if there is none."""
    for name, text in cells.items():
        if name in _written(family) and (fault := cell_fault(text)):
            return f"its {name} {fault}: {shown(text)}"
    return ""


def newcomer(raw: Mapping[str, Any], family: Family, err_ratio: float | None) -> Newcomer | MergeRow:
    """A row by column name as a newcomer, or why it cannot be one."""
    cells = {name: value.strip() if type(value) is str else cell(value) for name, value in raw.items()}
    us = number_of(cells.get("us", ""))
    known: dict[str, int | str] = {n: cells.get(n, "") for n in ("gfx", "cu_num", *family.key_names)}
    try:
        key = key_of(cells, family)
    except KeyFault as e:
        return MergeRow("rejected", known, None, us, "", kernel_of(cells), str(e))
    why, column = "", family.err_column
    if fault := _fault_of_cells(cells, family):
        why = fault
    elif fault := no_gfx(key):
        why = f"it {fault}"
    elif us is None or us <= 0:
        why = f"its us is {cells.get('us') or 'missing'}"
    elif err_ratio is not None and column != "err1":
        err = number_of(cells.get(column, ""))
        if err is None or not 0 <= err <= err_ratio:
            why = f"its {column} is {cells.get(column) or 'missing'}, the limit {err_ratio:g}"
    if why or us is None:
        return MergeRow("rejected", key_dict(key, family), None, us, "", kernel_of(cells), why)
    tag = "" if cells.get(TAG, "") in NULLS else cells[TAG]
    spread = number_of(cells.pop("spread", "")) or 0.0
    return Newcomer(key, cells, us, spread, kernel_of(cells), tag, place_of(key, tag))


@dataclass(frozen=True, slots=True)
class Incumbent:
    """The row that has a newcomer's key: its cells by our names, its kernel, its time with the spread that is known,
    its file and line."""

    cells: Mapping[str, str]
    kernel: Identity | None
    time: Time | None
    file: str
    line: int


def incumbent(
    cells: Mapping[str, str], us: float | None, family: str, file: str, line: int, spread: float = 0.0
) -> Incumbent:
    """A row of a table as a newcomer meets it. `spread`: what its record knows."""
    return Incumbent(cells, identity(cells, family), Time(us, spread) if us else None, file, line)


@dataclass(frozen=True, slots=True)
class Judged:
    """A key's champion, judged once against the row that has its key (`old`; None if no row has it).

    `after` is the champion's time. `rival` is the time of the old kernel in the champion's session, None where it was
    not measured there. `rebuild`: an image that was built without the row has to be rebuilt for it.
    """

    new: Newcomer
    old: Incumbent | None
    after: Time
    rival: Time | None
    action: Action
    judged: Basis
    why: str
    rebuild: bool = False

    @property
    def before(self) -> Time | None:
        """The time to beat."""
        return self.rival or (self.old.time if self.old else None)

    @property
    def speedup(self) -> float:
        """Time before over time after, 0 where the former is not known."""
        return self.before.us / self.after.us if self.before else 0.0


class NewcomerPool:
    """The rows of a merge, taken in any order; gives the best of each key, judged.

    `incumbents` gives the row that has a place. `err_ratio` is the largest share of wrong elements allowed. It is not
    looked at where a table has no column for it; `unchecked` counts those rows.
    """

    def __init__(
        self, family: Family, incumbents: Callable[[Place], Incumbent | None], err_ratio: float | None = None
    ) -> None:
        self.rejected: list[MergeRow] = []
        self.unchecked = 0
        self._family, self._incumbent, self._err_ratio = family, cache(incumbents), err_ratio
        self._best: dict[Place, Newcomer] = {}
        self._sessions: dict[Place, dict[Session, dict[str, Newcomer]]] = {}
        self._profiles: set[Session] = set()

    def take(self, rows: Iterable[Mapping[str, Any]], *, beside: bool = False) -> None:
        """Rows by column name.

        A file is a profile, and so a session, where a key comes twice in it. `beside`: these are profiles of the
        newcomers; their rows do not want into the table. Candidates of profiles without a valid time are left out.
        """
        for raw in rows:
            session, winner = _session(raw), str(raw.get("winner", "")).strip()
            checked = self._family.err_column in raw
            new = newcomer(raw, self._family, self._err_ratio if checked else None)
            if isinstance(new, MergeRow) or (raw.get("status") or "ok") != "ok":
                if isinstance(new, MergeRow) and not (beside or winner):
                    self.rejected.append(new)
                continue
            self.unchecked += not checked and self._err_ratio is not None and self._family.err_column != "err1"
            if session is not None:
                self._note(session, new, won=winner == "1", profile=beside or bool(session[1]))
            if not beside:
                _keep(self._best, new.place, new)

    def champions(self) -> list[Newcomer]:
        """The best newcomer of each place, in the order of the keys."""
        self.rejected.sort(key=lambda r: (tuple(map(str, r.key.values())), r.new_kernel, r.new_us or 0.0, r.why))
        return sorted(self._best.values(), key=lambda n: (key_order(n.key), n.tag))

    def judge(self, new: Newcomer, policy: Policy = "noise") -> Judged:
        """The verdict on a champion."""
        old, (after, rival) = self._incumbent(new.place), self._times(new)
        figure, same = old.time if old else None, self.is_incumbent(new)
        found = decide(figure, after, is_key=old is not None, rival=rival, policy=policy, same_kernel=same)
        return Judged(new, old, after, rival, *found)

    def is_incumbent(self, new: Newcomer) -> bool:
        """True where a newcomer has the kernel of the row that has its key."""
        old = self._incumbent(new.place)
        kernel = old.kernel if old else None
        return kernel is not None and kernel[1] == new.kernel and kernel == identity(new.cells, self._family.name)

    def notes(self) -> list[str]:
        """Sentences on the rows that were passed over."""
        note = f"{plural(self.unchecked, 'row')} of tables without {self._family.err_column}: it was not checked"
        return [note] if self.unchecked else []

    def _note(self, session: Session, new: Newcomer, *, won: bool, profile: bool) -> None:
        """Keep of a place and session the lowest row, the one that won there, and the incumbent's kernel."""
        kept = self._sessions.setdefault(new.place, {}).setdefault(session, {})
        if profile or kept:
            self._profiles.add(session)
        for role, is_it in (("winner", won), ("lowest", True), ("rival", self.is_incumbent(new))):
            if is_it:
                _keep(kept, role, new)

    def _times(self, new: Newcomer) -> tuple[Time, Time | None]:
        """(the champion's time with its spread, the incumbent's kernel in a session that the champion is of or None).

        The champion is of a session that has its kernel with its time, by the row that won there or by the lowest. If
        there are several, the lowest time of the incumbent counts and the largest spread.
        """
        spread, rivals = new.spread, list[Time]()
        together = [kept for s, kept in self._sessions.get(new.place, {}).items() if s in self._profiles]
        kernel = identity(new.cells, self._family.name) if together else None
        for kept in together:
            for m in (kept[role] for role in ("winner", "lowest") if role in kept):
                if abs(m.us - new.us) <= SAME * new.us and identity(m.cells, self._family.name) == kernel:
                    spread = max(spread, m.spread)
                    rivals += [Time(r.us, r.spread) for r in (kept.get("rival"),) if r]
                    break
        return Time(new.us, spread), min(rivals, key=lambda t: (t.us, t.spread), default=None)


def _keep(best: dict[str, Newcomer], at: str, new: Newcomer) -> None:
    """Keep the newcomer of lowest rank. Rows come one at a time, since a profile may be of any size."""
    old = best.get(at)
    if old is None or new.us < old.us or (new.us == old.us and new.rank() < old.rank()):
        best[at] = new


def _session(raw: Mapping[str, Any]) -> Session | None:
    attempt, node, slot = (str(raw.get(c) or "") for c in ("attempt", "node", "slot"))
    if attempt:
        return "", attempt, node, slot
    file = str(raw.get(SOURCE) or "")
    return (file, "", node, slot) if file else None


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
    same_kernel: bool = False,
) -> tuple[Action, Basis, str]:
    """Judge a key's champion against its incumbent, once: the outcome, by which figure, and why.

    `is_key`: the table has a row of this key. `old`: its figure, None where it has no time. `rival`: its own kernel's
    time in the profile that `new` is of, None where that was not measured. `same_kernel`: the champion is that
    kernel, and there is nothing to win. Of one profile both times are of the same
    session, and their spreads are the noise; a figure of another session is also moved by what no spread shows
    (clocks, temperature, drivers), so that the noise is never taken as less than MARGIN there.
    """
    if not is_key:
        return "added", "new key", "the table had no row of this key"
    against = rival or old
    if against is None:
        return "replaced", "no old time", "the old row had no time"
    if rival is not None and old is not None and same_kernel and policy != "replace":
        return "kept", "same profile", "its own kernel is the fastest in the same profile, too"
    judged: Basis = "same profile" if rival else "old figure"
    where = " in the same profile" if rival else ""
    gain = (against.us - new.us) / against.us
    equal = f"as fast as the old {'kernel' if rival else 'row'}"
    why = (f"faster by {gain:.1%}" if gain > 0 else f"slower by {-gain:.1%}" if gain < 0 else equal) + where
    if policy == "replace":
        return "replaced", judged, why if gain > 0 else f"{why}; replaced by policy"
    needed, what = noise(new, against, same_session=rival is not None)
    if policy == "best" or gain <= 0 or gain > needed:
        return "replaced" if gain > 0 else "kept", judged, why
    return "kept", judged, f"{why}, which is not more than {what} of {needed:.1%}"


def is_noisy(first: Time, last: Time) -> bool:
    """Return whether a kernel's last time differs from its first by more than the spreads of both explain, and by more
    than CLOCKS."""
    explained = first.us * first.spread + last.us * last.spread
    return abs(last.us - first.us) > max(explained, first.us * CLOCKS)


def spread_of_noisy(first: Time, last: Time) -> float:
    """The spread of a noisy time. It beats another time by more than this if the upper bound of both times does."""
    upper_bound = max(time.us * (1 + time.spread) for time in (first, last))
    return 1 - last.us / upper_bound


def noise(new: Time, old: Time, *, same_session: bool) -> tuple[float, str]:
    """(the relative difference that is taken for noise, its name)."""
    both = math.hypot(new.spread, old.spread)
    if same_session and new.spread > 0 and old.spread > 0:
        return both, "the noise of both"
    if both <= MARGIN:
        return MARGIN, "the margin"
    return both, "its own spread" if not old.spread else "the noise of both"
