"""The rows that want into a table: checked, reduced to the fastest of each key, and judged against the old row.

`tune --db`, `db merge` and `publish` share it. They add rows to a `NewcomerPool`, ask for its `champions`, and let it
`judge` each (`decision.decide`). A session is what was measured together: an attempt of ours, or one profile CSV of
AITER's. In each, the incumbent's own kernel may have been measured again, which is the fairest time to judge by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from orchestrator.files.cells import cell, cell_fault
from orchestrator.files.faults import shown
from orchestrator.tables.decision import Action, Basis, MergePolicy, Time, decide
from orchestrator.tables.keys import (
    TAG,
    Key,
    KeyFault,
    Place,
    key_dict,
    key_names,
    key_of,
    key_order,
    missing_gfx,
    number_of,
    place_of,
)
from orchestrator.tables.row_kernels import KernelIdentity, kernel_identity, kernel_of
from orchestrator.tables.table import Table, TableRow
from worker.families import NULLS, Family
from worker.text import plural

SOURCE = "_source"
"""The file of a row: for its provenance, and because its rows may have been measured together."""
SAME_TIME = 1e-3
"""The largest relative difference of two texts of one time."""

Session = tuple[str, str, str, str]
"""(file, attempt, node, slot): an attempt of ours has file "", a profile of AITER's has attempt ""."""


class Newcomer(NamedTuple):
    """A row that wants into a table."""

    key: Key
    cells: dict[str, str]
    """Its cells by our column names, with SOURCE."""
    us: float
    """Its time in microseconds, as it would be written."""
    spread: float
    """The relative spread of this time, 0 if it is not known."""
    kernel: str
    """The name of its kernel (fmoe: of both stages)."""
    tag: str
    place: Place

    def rank(self) -> tuple[float, str, float, list[tuple[bool, str, str]]]:
        """Lowest time, then name, spread, whatever else differs, and at last the row's origin: a total order."""
        rest = sorted((name.startswith("_"), name, value) for name, value in self.cells.items())
        return (self.us, self.kernel, self.spread, rest)


@dataclass(frozen=True, slots=True)
class MergeRow:
    """The outcome of a newcomer, as reports and `merge.json` have it. Times are in microseconds."""

    action: Action
    key: dict[str, int | str]
    """gfx, cu_num and the family's key columns. The key of a rejected row is as far as it is known."""
    old_us: float | None
    """The time in the table."""
    new_us: float | None
    old_kernel: str
    new_kernel: str
    why: str
    judged: Basis = ""
    """The time that the newcomer was judged against."""
    rival_us: float | None = None
    """The time of the old kernel in the same profile, if the newcomer was judged by that."""

    @property
    def times(self) -> str:
        """The times that were compared, in words: `why` is about these two. One kernel of one profile has one time."""
        before = self.old_us
        if self.judged == "same profile":
            before = self.rival_us if self.old_kernel != self.new_kernel else None
        return " -> ".join(f"{us:g} us" for us in (before, self.new_us) if us is not None)


def read_newcomer(raw: Mapping[str, Any], family: Family, err_ratio: float | None) -> Newcomer | MergeRow:
    """A row by column name as a newcomer, or why it cannot be one."""
    cells = {name: value.strip() if type(value) is str else cell(value) for name, value in raw.items()}
    us = number_of(cells.get("us", ""))
    kernel = kernel_of(cells)
    try:
        key = key_of(cells, family)
    except KeyFault as e:
        known: dict[str, int | str] = {name: cells.get(name, "") for name in key_names(family)}
        return MergeRow("rejected", known, None, us, "", kernel, str(e))
    fault = (
        _fault_of_cells(cells, family)
        or _fault_of_key(key)
        or _fault_of_time(cells, us)
        or _fault_of_error(cells, family, err_ratio)
    )
    if fault or us is None:
        return MergeRow("rejected", key_dict(key, family), None, us, "", kernel, fault)
    tag = cells.get(TAG, "")
    if tag in NULLS:
        tag = ""
    spread = number_of(cells.pop("spread", "")) or 0.0
    return Newcomer(key, cells, us, spread, kernel, tag, place_of(key, tag))


@cache
def _written_columns(family: Family) -> frozenset[str]:
    """The columns of a newcomer that a merge writes, by our names."""
    return frozenset((*family.tuned_header, TAG))


def _fault_of_cells(cells: Mapping[str, str], family: Family) -> str:
    """The first cell that may not stand in a user's table, "" if there is none."""
    written = _written_columns(family)
    for name, text in cells.items():
        if name in written and (fault := cell_fault(text)):
            return f"its {name} {fault}: {shown(text)}"
    return ""


def _fault_of_key(key: Key) -> str:
    fault = missing_gfx(key)
    return f"it {fault}" if fault else ""


def _fault_of_time(cells: Mapping[str, str], us: float | None) -> str:
    if us is not None and us > 0:
        return ""
    return f"its us is {cells.get('us') or 'missing'}"


def _fault_of_error(cells: Mapping[str, str], family: Family, limit: float | None) -> str:
    """A sentence on a share of wrong elements that is too large; that of each stage of fmoe is not looked at."""
    column = family.err_column
    if limit is None or column == "err1":
        return ""
    error = number_of(cells.get(column, ""))
    if error is not None and 0 <= error <= limit:
        return ""
    return f"its {column} is {cells.get(column) or 'missing'}, the limit {limit:g}"


@dataclass(frozen=True, slots=True)
class Incumbent:
    """The row of a table that has a newcomer's key."""

    cells: Mapping[str, str]
    """By our names."""
    kernel: KernelIdentity | None
    """None if the row names no kernel."""
    time: Time | None
    """None if the row has no time."""
    file: str
    line: int


def make_incumbent(table: Table, row: TableRow, file: str, spread: float = 0.0) -> Incumbent:
    """A row of a table as a newcomer meets it. `file`: the table's name for messages; `spread`: of its record."""
    cells = table.cells(row)
    time = Time(row.us, spread) if row.us else None
    return Incumbent(cells, kernel_identity(cells, table.family.name), time, file, row.line)


@dataclass(frozen=True, slots=True)
class Judged:
    """A key's champion, judged once against the row that has its key."""

    new: Newcomer
    """The champion."""
    old: Incumbent | None
    """The row that has its key, None if no row has."""
    after: Time
    """The champion's time, with the largest spread of the sessions that it is of."""
    rival: Time | None
    """The time of the old kernel in the champion's session, None if it was not measured there."""
    action: Action
    basis: Basis
    why: str
    """The reason in words: `faster by 12.0% in the same profile`."""
    rebuild: bool = False
    """An image that was built without the row has to be rebuilt for it (`publish` sets this)."""

    @property
    def old_time(self) -> Time | None:
        """The time in the table."""
        return self.old.time if self.old else None

    @property
    def before(self) -> Time | None:
        """The time to beat."""
        return self.rival or self.old_time

    @property
    def speedup(self) -> float:
        """Time before over time after, 0 where the former is not known."""
        return self.before.us / self.after.us if self.before else 0.0


@dataclass(slots=True)
class SessionRows:
    """The rows of one key in one session, as far as a judgement needs them."""

    lowest: Newcomer
    """The row of the lowest time."""
    winner: Newcomer | None = None
    """The row that won there."""
    rival: Newcomer | None = None
    """The row of the incumbent's kernel."""


class NewcomerPool:
    """The rows of a merge, added in any order; gives the best of each key, judged.

    `incumbents` gives the row that has a place. `err_ratio` is the largest share of wrong elements allowed. It is not
    looked at where a table has no column for it; `unchecked` counts those rows.
    """

    def __init__(
        self, family: Family, incumbents: Callable[[Place], Incumbent | None], err_ratio: float | None = None
    ) -> None:
        self.rejected: list[MergeRow] = []
        self.unchecked = 0
        self._family = family
        self._incumbent = cache(incumbents)
        self._err_ratio = err_ratio
        self._best: dict[Place, Newcomer] = {}
        self._sessions: dict[Place, dict[Session, SessionRows]] = {}
        self._profiles: set[Session] = set()
        """The sessions in which several kernels of a key were measured."""

    def add_rows(self, rows: Iterable[Mapping[str, Any]], *, beside: bool = False) -> None:
        """Rows by column name.

        A file is a profile, and so a session, where a key comes twice in it. `beside`: these are profiles of the
        newcomers; their rows do not want into the table. Candidates of profiles without a valid time are left out.
        """
        for raw in rows:
            winner = str(raw.get("winner", "")).strip()
            has_error = self._family.err_column in raw
            new = read_newcomer(raw, self._family, self._err_ratio if has_error else None)
            if isinstance(new, MergeRow):
                is_candidate = beside or winner
                if not is_candidate:
                    self.rejected.append(new)
                continue
            if (raw.get("status") or "ok") != "ok":
                continue
            if not has_error and self._err_ratio is not None and self._family.err_column != "err1":
                self.unchecked += 1
            session = _session_of(raw)
            if session is not None:
                self._note_session(session, new, won=winner == "1", is_profile=beside or bool(session[1]))
            if not beside:
                self._best[new.place] = _lower(self._best.get(new.place), new)

    def champions(self) -> list[Newcomer]:
        """The best newcomer of each place, in the order of the keys."""
        self.rejected.sort(key=lambda r: (tuple(map(str, r.key.values())), r.new_kernel, r.new_us or 0.0, r.why))
        return sorted(self._best.values(), key=lambda new: (key_order(new.key), new.tag))

    def judge(self, new: Newcomer, policy: MergePolicy = "noise") -> Judged:
        """The verdict on a champion."""
        old = self._incumbent(new.place)
        after, rival = self._times(new)
        action, basis, why = decide(
            old.time if old else None,
            after,
            is_key=old is not None,
            rival=rival,
            policy=policy,
            same_kernel=self.is_incumbent(new),
        )
        return Judged(new, old, after, rival, action, basis, why)

    def is_incumbent(self, new: Newcomer) -> bool:
        """True where a newcomer has the kernel of the row that has its key."""
        old = self._incumbent(new.place)
        if old is None or old.kernel is None or old.kernel[1] != new.kernel:
            return False
        return old.kernel == kernel_identity(new.cells, self._family.name)

    def notes(self) -> list[str]:
        """Sentences on the rows that were passed over."""
        if not self.unchecked:
            return []
        rows = plural(self.unchecked, "row")
        return [f"{rows} of tables without {self._family.err_column}: it was not checked"]

    def _note_session(self, session: Session, new: Newcomer, *, won: bool, is_profile: bool) -> None:
        sessions = self._sessions.setdefault(new.place, {})
        if is_profile or session in sessions:
            self._profiles.add(session)
        rows = sessions.setdefault(session, SessionRows(new))
        if rows.lowest is not new:
            rows.lowest = _lower(rows.lowest, new)
        if won:
            rows.winner = _lower(rows.winner, new)
        if self.is_incumbent(new):
            rows.rival = _lower(rows.rival, new)

    def _times(self, new: Newcomer) -> tuple[Time, Time | None]:
        """(the champion's time with its spread, the incumbent's kernel in a session that the champion is of or None).

        The champion is of a session that has its kernel with its time, by the row that won there or by the lowest. If
        there are several, the lowest time of the incumbent counts and the largest spread.
        """
        spread = new.spread
        rivals: list[Time] = []
        for session, rows in self._sessions.get(new.place, {}).items():
            if session not in self._profiles:
                continue
            measured = next((row for row in (rows.winner, rows.lowest) if row and self._is_same_row(row, new)), None)
            if measured is None:
                continue
            spread = max(spread, measured.spread)
            if rows.rival:
                rivals.append(Time(rows.rival.us, rows.rival.spread))
        return Time(new.us, spread), min(rivals, key=lambda rival: (rival.us, rival.spread), default=None)

    def _is_same_row(self, row: Newcomer, new: Newcomer) -> bool:
        """True where two rows are of one kernel with one time."""
        if abs(row.us - new.us) > SAME_TIME * new.us:
            return False
        return kernel_identity(row.cells, self._family.name) == kernel_identity(new.cells, self._family.name)


def _lower(old: Newcomer | None, new: Newcomer) -> Newcomer:
    """The newcomer of lower rank. Rows come one at a time, since a profile may be of any size."""
    if old is None or new.us < old.us or (new.us == old.us and new.rank() < old.rank()):
        return new
    return old


def _session_of(raw: Mapping[str, Any]) -> Session | None:
    attempt, node, slot = (str(raw.get(column) or "") for column in ("attempt", "node", "slot"))
    if attempt:
        return "", attempt, node, slot
    file = str(raw.get(SOURCE) or "")
    return (file, "", node, slot) if file else None
