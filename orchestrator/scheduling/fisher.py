"""Fisher's exact test, one-sided: whether more of one sample went wrong than of another, beyond chance."""

from __future__ import annotations

from math import exp, lgamma


def fisher(bad: int, of: int, bad_elsewhere: int, of_elsewhere: int) -> float:
    """How likely so many bad ones here (or more) would be if here and elsewhere were alike."""
    total, all_bad = of + of_elsewhere, bad + bad_elsewhere
    whole = _log_choose(total, of)
    most = min(of, all_bad)
    tail = (
        exp(_log_choose(all_bad, k) + _log_choose(total - all_bad, of - k) - whole)
        for k in range(max(bad, of - (total - all_bad)), most + 1)
    )
    return min(1.0, sum(tail))


def _log_choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)
