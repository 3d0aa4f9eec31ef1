"""Ranges of M: the keys of a file, and what they serve."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from worker.triton_configs.m_ranges import USUAL_KEYS, ConfigRange, entries_of, ranges_served

KEYS = st.lists(st.integers(1, 200), min_size=1, max_size=12)


def nearest(keys: dict[int, Any], m: int) -> int:
    """The engine's own rule."""
    return min(keys, key=lambda key: abs(key - m))


@given(KEYS)
def test_a_key_serves_the_m_that_are_nearest_to_it(keys: list[int]) -> None:
    ranges = ranges_served(keys)
    ordered = dict.fromkeys(sorted(keys))
    for m in range(1, 300):
        first, last = ranges[nearest(ordered, m)]
        assert first <= m
        assert last is None or m <= last
    assert list(ranges_served(USUAL_KEYS).items())[3:5] == [(8, (7, 12)), (16, (13, 20))]
    assert ranges_served(USUAL_KEYS)[4096] == (3585, None)


@given(st.lists(st.tuples(st.integers(1, 30), st.sampled_from("abc"), st.integers(0, 99)), min_size=1, max_size=10))
def test_written_keys_give_every_m_what_is_meant_for_it(drawn: list[tuple[int, str, int]]) -> None:
    segments: list[ConfigRange] = []
    first = 1
    for length, values, own in drawn:
        segments.append(ConfigRange(first, first + length - 1, values, first + own % length if own < 80 else own))
        first += length
    start, _, values, own = segments[-1]
    segments[-1] = ConfigRange(start, None, values, own)
    found = entries_of(segments)
    assert list(found) == sorted(found)
    for m in range(1, first + 120):
        wanted = next(v for a, b, v, _ in segments if a <= m and (b is None or m <= b))
        assert found[nearest(found, m)] == wanted


def test_usual_ranges_need_no_further_keys_and_a_part_of_one_needs_a_pair() -> None:
    whole = [ConfigRange(first, last, str(key), key) for key, (first, last) in ranges_served(USUAL_KEYS).items()]
    assert list(entries_of(whole)) == list(USUAL_KEYS)
    parts = [ConfigRange(1, 40, "old", 32), ConfigRange(41, 56, "new", 48), ConfigRange(57, 70, "old", 64)]
    assert list(entries_of([*parts, ConfigRange(71, None, "other", 96)])) == [32, 48, 64, 70, 71, 96]
