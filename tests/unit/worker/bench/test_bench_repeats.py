"""The rule of three runs within 5 %, and the order of rounds."""

from __future__ import annotations

import random

import pytest

from worker.protocol.bench import Rule, mean_of_runs, rounds, spread, wants_more


def test_three_runs_that_agree_are_their_mean() -> None:
    found = mean_of_runs([100.0, 104.0, 102.0])
    assert (found.us, found.used, found.taken, found.status) == (102.0, 3, 3, "ok")
    assert found.spread == pytest.approx(4 / 102)
    assert not wants_more([100.0, 104.0, 102.0])


def test_five_percent_is_the_limit() -> None:
    assert mean_of_runs([97.5, 100.0, 102.5]).status == "ok"
    assert mean_of_runs([97.4, 100.0, 102.6]).status == "unstable"


def test_the_three_of_five_that_agree_best_count() -> None:
    runs = [100.0, 130.0, 101.0]
    assert wants_more(runs)
    assert wants_more([*runs, 150.0])
    assert not wants_more([*runs, 150.0, 170.0])
    found = mean_of_runs([*runs, 150.0, 102.0])
    assert (found.us, found.used, found.taken, found.status) == (101.0, 3, 5, "ok")


def test_runs_that_never_agree_are_unstable_and_fewer_than_three_are_short() -> None:
    assert mean_of_runs([100.0, 120.0, 140.0, 160.0, 180.0]).status == "unstable"
    assert mean_of_runs([100.0, 100.0]).status == "short"
    assert wants_more([100.0, 100.0])
    with pytest.raises(ValueError, match="no run"):
        mean_of_runs([])
    assert spread([]) == 0.0


def test_a_rule_of_one_run_is_content_with_it() -> None:
    assert mean_of_runs([7.0], Rule(1, 0)).status == "ok"
    assert not wants_more([7.0], Rule(1, 0))


def drive(times: dict[str, list[float]], pairs: dict[str, str], rule: Rule, seed: int = 0) -> list[list[str]]:
    taken: dict[str, list[float]] = {name: [] for name in times}
    orders = []
    for order in rounds(taken, pairs, rule, random.Random(seed)):
        orders.append(list(order))
        for name in order:
            taken[name].append(times[name][len(taken[name])])
    return orders


def test_rounds_hold_everyone_once_in_an_order_that_changes() -> None:
    times = {name: [1.0] * 9 for name in "abcd"}
    orders = drive(times, {n: n for n in times}, Rule(8, 0))
    assert len(orders) == 8
    assert all(sorted(o) == list("abcd") for o in orders)
    assert len({tuple(o) for o in orders}) > 3
    assert {o[0] for o in orders} >= set("ab")


def test_only_who_does_not_agree_runs_again_and_its_partner_with_it() -> None:
    steady, loose = [1.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]
    times = {"g:torch": steady, "t:torch": loose, "g:other": steady, "t:other": steady}
    pairs = {name: name[2:] for name in times}
    orders = drive(times, pairs, Rule())
    assert [sorted(o) for o in orders[:3]] == [sorted(times)] * 3
    assert [sorted(o) for o in orders[3:]] == [["g:torch", "t:torch"]] * 2
