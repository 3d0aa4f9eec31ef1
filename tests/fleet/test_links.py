"""Links that break, stall, refuse, lose answers and cut frames, and nodes that go and come back: an ordinary event that
uses up no try, loses nothing and measures nothing twice (laws 3 and 5)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orchestrator import events as ev
from tests.fleet.kit import Controller, Fleet
from tests.fleet.link import REFUSALS
from tests.waiting import wait_until


def troubles(fleet: Fleet, node: str) -> int:
    return len(fleet.of(node, ev.NodeTroubled))


def joins(fleet: Fleet, node: str) -> int:
    return len(fleet.of(node, ev.NodeJoined))


def check_once(fleet: Fleet, run: Controller, n: int) -> None:
    """The run tunes all, no node was given up, and nothing was begun twice."""
    fleet.finish(run, n)
    assert not fleet.journal(ev.NodeLost)
    assert set(fleet.starts().values()) == {1}


def test_a_cut_connection_costs_nothing(fleet: Fleet) -> None:
    n = fleet.shapes(groups=18)
    run = fleet.begun(4)
    for node, state in (("h1", "down"), ("h2", "cut 40")):
        fleet.link(node, state)
        wait_until(lambda node=node: troubles(fleet, node), "it is noticed")  # type: ignore[misc]
        fleet.mend(node)
    wait_until(lambda: joins(fleet, "h1") == joins(fleet, "h2") == 2, "both are there again")
    check_once(fleet, run, n)


@pytest.mark.parametrize("state", ["down", "stalled"])
def test_what_a_node_measures_while_nobody_hears_it_counts(fleet: Fleet, state: str) -> None:
    n = fleet.shapes(groups=24)
    run = fleet.begun(4)
    wait_until(lambda: len(list(fleet.folder("h3").glob("inbox/*.json"))) >= 1, "it has work for itself")
    before = troubles(fleet, "h3")
    fleet.link("h3", state)
    wait_until(lambda: troubles(fleet, "h3") > before, "it is noticed")
    heard = fleet.tuned_by()["h3"]
    fleet.release("h3")
    wait_until(lambda: fleet.measured("h3") >= heard + 2, "its worker goes on")
    assert fleet.tuned_by()["h3"] == heard
    fleet.mend("h3")
    wait_until(lambda: fleet.tuned_by()["h3"] >= heard + 2, "the results that it measured alone are read")
    check_once(fleet, run, n)
    if state == "stalled":
        assert "no word for" in fleet.of("h3", ev.NodeTroubled)[0].detail


def test_a_node_that_stops_answering_is_given_up_and_the_others_do_its_work(fleet: Fleet) -> None:
    n = fleet.shapes(groups=18)
    run = fleet.begun(4, lost_after_s=0.5)
    fleet.power_off("h1")
    wait_until(lambda: fleet.of("h1", ev.NodeLost), "it is given up")
    fleet.finish(run, n)
    assert [r.node for r in fleet.journal(ev.NodeLost)] == ["h1"]
    assert "workers may be left behind on h1" in run.out
    lost = next(t for t, r in fleet.journaled(ev.NodeLost) if r.node == "h1")
    trouble = next(t for t, r in fleet.journaled(ev.NodeTroubled) if r.node == "h1")
    assert lost >= trouble + 0.5


@pytest.mark.parametrize("state", REFUSALS)
def test_a_node_that_cannot_be_reached_costs_itself_only(fleet: Fleet, state: str) -> None:
    n = fleet.shapes(groups=9)
    fleet.link("h2", state)
    done = fleet.tune()
    fleet.check_books(n)
    assert "h2" not in fleet.tuned_by()
    assert REFUSALS[state][1] in done.out


@pytest.mark.parametrize("state", ["another key", "no login"])
def test_a_node_that_is_another_or_lets_us_in_no_more_is_given_up(fleet: Fleet, state: str) -> None:
    n = fleet.shapes(groups=18)
    run = fleet.begun(4, lost_after_s=0.3)
    fleet.link("h1", state)
    wait_until(lambda: fleet.of("h1", ev.NodeLost), "it is given up")
    fleet.power_off("h1")  # nobody else could end its workers
    fleet.finish(run, n)
    (lost,) = fleet.journal(ev.NodeLost)
    assert lost.node == "h1"
    assert REFUSALS[state][1] in lost.detail


def test_a_node_that_was_given_up_comes_back_and_works(fleet: Fleet) -> None:
    n = fleet.shapes(groups=18)
    run = fleet.begun(4, lost_after_s=0.3)
    fleet.link("h2", "stalled")
    wait_until(lambda: fleet.of("h2", ev.NodeLost), "it is given up")
    fleet.mend("h2")
    wait_until(lambda: joins(fleet, "h2") == 2, "it joined again")
    fleet.finish(run, n)
    assert [r.node for r in fleet.journal(ev.NodeLost)] == ["h2"]


@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5, 6, 7])
def test_a_preparation_that_breaks_off_anywhere_is_begun_anew(make_fleet: Callable[..., Fleet], nth: int) -> None:
    fleet = make_fleet(nodes={"h1": 1})
    n = fleet.shapes(groups=4)
    fleet.lose("h1", "run", nth)
    done = fleet.tune()
    check_once(fleet, done, n)
    assert troubles(fleet, "h1")
