"""The policy of a publication and the texts that follow from it."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.publish.files import edited, line_of, untuned, with_rows
from orchestrator.publish.rows import Owner, Settled, misses, settle
from orchestrator.tables.tuned import Key, read_shipped
from orchestrator.tuned_db.merge_policy import Newcomer, NewcomerPool, identity
from tests.support.aiterbuild import ASM, CK
from tests.support.aitercheckout import A4W4, line, text

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


def test_a_new_key_is_added_and_its_fastest_row_counts() -> None:
    found = settled(cells(us=9.0), cells(us=8.0))
    assert (found.outcome, found.after.us, found.before, found.speedup, found.rebuild) == (
        "added",
        8.0,
        None,
        0.0,
        True,
    )


@pytest.mark.parametrize(
    ("us", "outcome", "why"),
    [
        (5.0, "edited", "faster by 50.0%"),
        (9.9, "kept", "which is not more than the margin of 3.0%"),
        (11.0, "kept", "slower by 10.0%"),
    ],
)
def test_a_key_that_a_file_has_is_edited_there_if_it_is_faster_by_more_than_the_noise(
    us: float, outcome: str, why: str
) -> None:
    found = settled(cells(us=us), owner=cells(us=10.0, kernelName=CK))
    assert (found.outcome, found.paired) == (outcome, False)
    assert why in found.why


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


def test_a_new_table_is_in_aiters_order_with_the_exact_header() -> None:
    rows = [newcomer(2, 128), newcomer(9, 64), newcomer(1, 128)]
    written = with_rows("", None, HEADER, rows, A4W4)
    lines = written.split("\n")
    assert lines[0] == "gfx,cu_num,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
    assert [x.split(",")[2:4] for x in lines[1:-1]] == [["9", "64"], ["1", "128"], ["2", "128"]]
    assert written.endswith("\n")
    assert "\r" not in written


def test_a_table_that_is_there_keeps_its_lines(tmp_path: Any) -> None:
    old = text(A4W4, line(A4W4, M=1, kernelName=CK, us="10.50"), line(A4W4, M=5, kernelName=CK)).replace("\n", "\r\n")
    path = tmp_path / A4W4.tuned_csv
    path.write_text(old.rstrip(), newline="")
    written = with_rows(old.rstrip(), read_shipped(path, A4W4), HEADER, [newcomer(3, 64)], A4W4)
    first, second = old.replace("\r", "").split("\n")[1:3]
    assert written.split("\n")[1:] == [first, line(A4W4, M=3, kernelName=ASM), second, ""]


def test_an_edit_changes_one_line() -> None:
    old = text(A4W4, line(A4W4, M=1, kernelName=CK), line(A4W4, M=5, kernelName=CK))
    new = edited(old, HEADER, {3: cells(M=5, us=2.0)})
    assert [a == b for a, b in zip(old.split("\n"), new.split("\n"), strict=True)] == [True, True, False, True]
    assert new.split("\n")[2] + "\n" == line_of(HEADER, cells(M=5, us=2.0))


def test_shapes_are_listed_once_beside_the_table() -> None:
    keys: list[Key] = [("gfx950", 256, 2, 128, 1), ("gfx950", 256, 7, 64, 1), ("gfx942", 80, 7, 64, 1)]
    assert untuned("", ("M", "N", "K"), keys, A4W4) == "M,N,K\n7,64,1\n2,128,1\n"
    assert untuned("M, N ,K\r\n7, 64,1", ("M", "N", "K"), keys, A4W4) == "M, N ,K\n7, 64,1\n2,128,1\n"
