"""The policy of a publication and the texts that follow from it."""

from __future__ import annotations

from typing import Any

from orchestrator.tables.policy import Incumbent, Judged, NewcomerPool, Time, identity
from orchestrator.tables.publish import misses, settle
from orchestrator.tables.rules import RowRules
from orchestrator.tables.tuned import Key
from tests.support.aiterbuild import ASM, CK
from tests.support.aitercheckout import A4W4, line

HEADER = A4W4.tuned_header


def cells(**more: Any) -> dict[str, str]:
    return dict(zip(HEADER, line(A4W4, **{"M": 1, "kernelName": ASM, **more}).split(","), strict=True))


def settled(
    *rows: dict[str, str], owner: dict[str, str] | None = None, profile: tuple[dict[str, str], ...] = ()
) -> Judged:
    def incumbent(place: str) -> Incumbent | None:
        if owner is None or place != "gfx950,256,1,64,128":
            return None
        us = float(owner["us"])
        return Incumbent(owner, identity(owner, A4W4.name), Time(us) if us else None, "aiter/configs/x.csv", 7)

    pool = NewcomerPool(A4W4, incumbent, 0.05)
    pool.take(rows)
    pool.take(profile, beside=True)
    (found,) = settle(pool, RowRules(A4W4, HEADER))
    return found


def test_times_of_one_session_decide_where_there_are_some() -> None:
    """The owner's kernel was measured beside the newcomer: its figure in the table does not count."""
    mine = cells(us=9.0) | {"attempt": "a1", "spread": "0.01"}
    beside = (mine | {"winner": "1"}, cells(us=9.5, kernelName=CK) | {"attempt": "a1", "spread": "0.01"})
    found = settled(mine, owner=cells(us=6.0, kernelName=CK), profile=beside)
    assert (found.action, found.rival is not None) == ("edited", True)
    assert found.before is not None
    assert (found.before.us, found.before.spread, found.after.spread) == (9.5, 0.01, 0.01)
    slower = settled(mine, owner=cells(us=60.0, kernelName=CK), profile=(beside[0], beside[1] | {"us": "8.9"}))
    assert (slower.action, slower.rival is not None) == ("kept", True)


def test_what_stays_out() -> None:
    same = settled(cells(us=1.0), owner=cells(us=10.0))
    assert (same.action, same.why) == ("kept", "its kernel is the row's already")
    untimed = settled(cells(us=1.0), owner=cells(us=0.0, kernelName=CK))
    assert (untimed.action, untimed.why) == ("kept", "aiter/configs/x.csv:7 has the key, and no time to compare with")
    bad = settled(cells(us=1.0, kernelName=""), owner=cells(us=10.0, kernelName=CK))
    assert (bad.action, bad.why) == ("refused", "kernelName is empty: AITER has nothing to call")


def test_lookups_that_find_a_row_by_a_padded_m_are_no_misses() -> None:
    there: set[Key] = {("gfx950", 256, 32, 64, 128), ("gfx950", 256, 1024, 64, 128)}
    keys: list[Key] = [("gfx950", 256, m, 64, 128) for m in (32, 17, 600, 33, 5000)]
    assert misses(keys, there, A4W4) == 2  # 17 pads to 32, 600 to 1024
    assert misses([("gfx942", 256, 32, 64, 128)], there, A4W4) == 1
