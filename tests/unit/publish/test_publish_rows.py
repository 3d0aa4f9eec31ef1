"""The policy of a publication and the texts that follow from it."""

from __future__ import annotations

from typing import Any

from orchestrator.publish.rows import Owner, Settled, misses, settle
from orchestrator.tables.tuned import Key
from orchestrator.tuned_db.merge_policy import Newcomer, NewcomerPool, identity
from tests.support.aiterbuild import ASM, CK
from tests.support.aitercheckout import A4W4, line

HEADER = A4W4.tuned_header


def cells(**more: Any) -> dict[str, str]:
    return dict(zip(HEADER, line(A4W4, **{"M": 1, "kernelName": ASM, **more}).split(","), strict=True))


def settled(
    *rows: dict[str, str],
    owner: dict[str, str] | None = None,
    profile: tuple[dict[str, str], ...] = (),
    refused: str = "",
) -> Settled:
    owners = {}
    if owner is not None:
        us = float(owner["us"]) or None
        owners["gfx950,256,1,64,128"] = Owner("aiter/configs/x.csv", 7, owner, us)
    incumbent = {place: identity(o.cells, A4W4.name) for place, o in owners.items()}.get
    pool = NewcomerPool(A4W4, incumbent, 0.05)
    pool.take(rows)
    pool.take(profile, beside=True)
    (found,) = settle(pool, owners, lambda new: (refused, True))
    return found


def test_times_of_one_session_decide_where_there_are_some() -> None:
    """The owner's kernel was measured beside the newcomer: its figure in the table does not count."""
    mine = cells(us=9.0) | {"attempt": "a1", "spread": "0.01"}
    beside = (mine | {"winner": "1"}, cells(us=9.5, kernelName=CK) | {"attempt": "a1", "spread": "0.01"})
    found = settled(mine, owner=cells(us=6.0, kernelName=CK), profile=beside)
    assert (found.outcome, found.paired) == ("edited", True)
    assert found.before is not None
    assert (found.before.us, found.before.spread, found.after.spread) == (9.5, 0.01, 0.01)
    slower = settled(mine, owner=cells(us=60.0, kernelName=CK), profile=(beside[0], beside[1] | {"us": "8.9"}))
    assert (slower.outcome, slower.paired) == ("kept", True)


def test_what_stays_out() -> None:
    same = settled(cells(us=1.0), owner=cells(us=10.0))
    assert (same.outcome, same.why) == ("kept", "its kernel is the row's already")
    untimed = settled(cells(us=1.0), owner=cells(us=0.0, kernelName=CK))
    assert (untimed.outcome, untimed.why) == ("kept", "aiter/configs/x.csv:7 has the key, and no time to compare with")
    bad = settled(cells(us=1.0), owner=cells(us=10.0, kernelName=CK), refused="no list has it")
    assert (bad.outcome, bad.why) == ("refused", "no list has it")


def test_lookups_that_find_a_row_by_a_padded_m_are_no_misses() -> None:
    there: set[Key] = {("gfx950", 256, 32, 64, 128), ("gfx950", 256, 1024, 64, 128)}
    keys: list[Key] = [("gfx950", 256, m, 64, 128) for m in (32, 17, 600, 33, 5000)]
    assert misses(keys, there, A4W4) == 2  # 17 pads to 32, 600 to 1024
    assert misses([("gfx942", 256, 32, 64, 128)], there, A4W4) == 1


def newcomer(m: int, n: int) -> tuple[Key, dict[str, str]]:
    key: Key = ("gfx950", 256, m, n, 128)
    return key, Newcomer(key, cells(M=m, N=n), 1.0, 0.0).cells
