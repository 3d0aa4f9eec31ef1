"""Fisher's exact test against the sum of all tables, and against numbers that are known."""

from __future__ import annotations

from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orchestrator.policy.state import fisher

tables = st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12), st.integers(0, 12))


@given(tables)
def test_it_is_the_sum_over_all_tables_at_least_so_bad(table: tuple[int, int, int, int]) -> None:
    bad, good, bad2, good2 = table
    n, m, k = bad + good, bad2 + good2, bad + bad2
    ways = sum(comb(k, i) * comb(n + m - k, n - i) for i in range(bad, min(n, k) + 1) if n - i <= n + m - k)
    assert fisher(bad, n, bad2, m) == pytest.approx(ways / comb(n + m, n))


def test_the_lady_tasting_tea() -> None:
    assert fisher(4, 4, 0, 4) == pytest.approx(1 / 70)
    assert fisher(3, 4, 1, 4) == pytest.approx(17 / 70)


def test_large_tables_do_not_overflow() -> None:
    assert fisher(30, 100_000, 10, 1_000_000) < 1e-6
    assert fisher(30, 100_000, 300, 1_000_000) == pytest.approx(0.525, abs=0.05)
