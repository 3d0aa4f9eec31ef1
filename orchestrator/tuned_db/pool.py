"""The newcomers of a merge and what was measured beside them, whatever order and files they come in. Pure.

A session is what was measured together: an attempt of ours, or one profile CSV of AITER's. In each, the incumbent's
own kernel may have been measured again, which is the fairest figure to judge by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.results.champions import Newcomer, Rejected, newcomer, order
from orchestrator.results.table import Place
from orchestrator.tuned_db.merge_policy import Identity, Time, identity
from worker.families import Family

SESSION = "_session"
"""The file of a row, where its rows may have been measured together."""
SOURCE = "_source"
"""The file or run that a row is from, for its provenance."""
SAME = 1e-3
"""Two texts of one time differ by at most so much, relative."""

Session = tuple[str, str, str, str]
"""(file, attempt, node, slot)"""


@dataclass(slots=True)
class _Measured:
    """Of a place in a session: its lowest row, the row that won there by repeated measurement, and the incumbent's
    kernel."""

    lowest: Newcomer
    winner: Newcomer | None = None
    rival: Time | None = None

    def same(self, new: Newcomer, kernel: Identity | None, family: str) -> Newcomer | None:
        """The row here that the champion is: its kernel with its time."""
        for m in (self.winner, self.lowest):
            if m is not None and abs(m.us - new.us) <= SAME * new.us and identity(m.cells, family) == kernel:
                return m
        return None


class Pool:
    """Takes rows in any order; gives champions and rivals.

    `incumbent` gives the kernel of the table's row of a place. `err_ratio`: the largest share of wrong elements
    allowed; it is not looked at where a table has no column for it (`unchecked` counts those rows).
    """

    def __init__(
        self, family: Family, incumbent: Callable[[Place], Identity | None], err_ratio: float | None = None
    ) -> None:
        self.rejected: list[Rejected] = []
        self.left_out = 0
        self.unchecked = 0
        self._family, self._incumbent, self._err_ratio = family, incumbent, err_ratio
        self._best: dict[Place, Newcomer] = {}
        self._sessions: dict[Place, dict[Session, _Measured]] = {}
        self._profiles: set[Session] = set()

    def take(self, rows: Iterable[Mapping[str, Any]], *, beside: bool = False) -> None:
        """Rows by column name.

        A file is a profile, and so a session, where a key comes twice in it. `beside`: these are profiles of the
        newcomers; their rows are no newcomers themselves. Candidates of profiles without a valid time are counted in
        `left_out`.
        """
        for raw in rows:
            session = _session(raw)
            winner = str(raw.get("winner", "")).strip()
            checked = self._family.err_column in raw
            new = newcomer(raw, self._family, self._err_ratio if checked else None)
            if isinstance(new, Rejected) or (raw.get("status") or "ok") != "ok":
                if beside or winner or not isinstance(new, Rejected):
                    self.left_out += 1
                else:
                    self.rejected.append(new)
                continue
            self.unchecked += not checked and self._err_ratio is not None and self._family.err_column != "err1"
            if session is not None:
                self._note(session, new, winner == "1", beside or bool(session[1]))
            if not beside:
                old = self._best.get(new.place)
                if old is None or new.us < old.us or (new.us == old.us and new.rank() < old.rank()):
                    self._best[new.place] = new

    def champions(self) -> list[Newcomer]:
        """The best newcomer of each place, in the order of the keys."""
        self.rejected.sort(key=lambda r: (tuple(map(str, r.key.values())), r.kernel, r.us or 0.0, r.why))
        return sorted(self._best.values(), key=lambda n: (order(n.key), n.tag))

    def times(self, new: Newcomer) -> tuple[Time, Time | None]:
        """(the champion's time with its spread, the incumbent's kernel in a session that the champion is of or None).

        The lowest of the incumbent's, and the largest of the spreads, were they of several sessions.
        """
        spread, rivals = new.spread, list[Time]()
        together = [m for session, m in self._sessions.get(new.place, {}).items() if session in self._profiles]
        kernel = identity(new.cells, self._family.name) if together else None
        for m in together:
            own = m.same(new, kernel, self._family.name)
            if own is not None:
                spread = max(spread, own.spread)
                rivals += [m.rival] if m.rival else []
        return Time(new.us, spread), min(rivals, key=lambda t: (t.us, t.spread), default=None)

    def is_incumbent(self, new: Newcomer) -> bool:
        """Whether the champion is the kernel that is in the table."""
        old = self._incumbent(new.place)
        return old is not None and old[1] == new.kernel and old == identity(new.cells, self._family.name)

    def notes(self) -> list[str]:
        """What was passed over, as sentences."""
        out = []
        if self.left_out:
            out.append(f"{self.left_out} candidates of profiles have no valid time and were left out")
        if self.unchecked:
            out.append(f"{self.unchecked} rows come from tables without {self._family.err_column}: it was not checked")
        return out

    def _note(self, session: Session, new: Newcomer, won: bool, profile: bool) -> None:
        by = self._sessions.setdefault(new.place, {})
        m = by.get(session)
        if profile or m is not None:
            self._profiles.add(session)
        if m is None:
            m = by[session] = _Measured(new)
        elif new.rank() < m.lowest.rank():
            m.lowest = new
        if won and (m.winner is None or new.rank() < m.winner.rank()):
            m.winner = new
        if self.is_incumbent(new) and (m.rival is None or (new.us, new.spread) < (m.rival.us, m.rival.spread)):
            m.rival = Time(new.us, new.spread)


def _session(raw: Mapping[str, Any]) -> Session | None:
    attempt, node, slot = (str(raw.get(c) or "") for c in ("attempt", "node", "slot"))
    if attempt:
        return "", attempt, node, slot
    file = str(raw.get(SESSION) or "")
    return (file, "", node, slot) if file else None
