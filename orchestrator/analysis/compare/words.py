"""A comparison in sentences, and as numbers for people."""

from __future__ import annotations

from orchestrator.analysis.compare.environment import Difference
from orchestrator.analysis.compare.join import Comparison, Row
from orchestrator.analysis.compare.verdict import ENOUGH_ROWS, MOST_DRIFT

_OF_KIND = {
    "machine": "another machine",
    "method": "measured differently",
    "other": "differs too",
    "test": "under test",
    "name": "",
}


def percent(share: float | None, *, sign: bool = False) -> str:
    """A share as `+1.2 %`; "" for none."""
    if share is None:
        return ""
    text = f"{100 * share:{'+' if sign else ''}.{1 if abs(share) >= 0.0995 else 2}f} %"
    return text.replace("+0.00", "0.00").replace("-0.00", "0.00") if sign else text


def chance(p: float | None) -> str:
    """A probability with two digits."""
    return "" if p is None else f"{p:.2g}" if p >= 1e-12 else "<1e-12"


def us(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 1000 else f"{value:.1f}"


def sentences(of: Comparison) -> list[str]:
    """The verdict in two sentences."""
    n, j = of.counts, of.judged
    worst = max((r for r in of.rows if r.verdict == "regression"), key=lambda r: r.change or 0.0, default=None)
    found = (
        f"{_rows(n['regression'])} of {len(of.rows)} slower, the worst by {percent(worst.change)}"
        if worst
        else f"No regression in {_rows(len(of.rows))}"
    )
    rest = ", ".join(f"{n[v]} {v}" for v in n if v != "regression" and n[v])
    by_rule = sum(r.beyond for r in of.rows)
    return [
        f"{found}" + (f"; {rest}." if rest else "."),
        f"If nothing had changed, {of.bound:g} rows of such a table would be called a regression by chance"
        f" (the rule alone flags {by_rule} here); the change of the middle row that would have been seen is"
        f" {percent(middle_seen(of), sign=True) or 'none'}, with {j.rows} rows judged.",
    ]


def middle_seen(of: Comparison) -> float | None:
    """The median over the rows of the smallest change that would have been called a regression."""
    seen = sorted(r.seen_from for r in of.rows if r.seen_from is not None)
    return seen[len(seen) // 2] if seen else None


def pairing(of: Comparison) -> str:
    """How the sides relate, and what was done about a shift of the whole table."""
    j = of.judged
    shift = f"table shift {percent(float(j.shift[0]), sign=True)}"
    if j.paired:
        how = "in pairs, which is quieter" if j.in_pairs else "by sides, pairs are no quieter"
        return f"paired (measured in turn; judged {how}); {shift}, counted as change"
    if j.rows < ENOUGH_ROWS:
        return f"unpaired; {shift}, not removed: too few rows to tell it from a change (0.7 % of drift counts as noise)"
    kept = float(j.shift[0]) - j.removed
    more = (
        f": {percent(j.removed, sign=True)} removed as drift, the rest counts as change"
        if kept
        else ", removed as drift"
    )
    loud = "; so much is hardly drift: measure both sides in turn" if abs(float(j.shift[0])) > MOST_DRIFT else ""
    return f"unpaired; {shift}{more}{loud}"


def again(of: Comparison) -> list[Row]:
    """The rows that deserve a second look, as they stand."""
    return [r for r in of.rows if r.suspect]


def differs(d: Difference) -> str:
    """What a difference of the environments means."""
    return _OF_KIND[d.kind]


def caveat(of: Comparison) -> str:
    """What else than the stack under test differs, or ""."""
    other = [d.name for d in of.differences if d.kind == "other"]
    if not other:
        return ""
    names = ", ".join(other[:8]) + (", ..." if len(other) > 8 else "")
    return f"{names} {'differs' if len(other) == 1 else 'differ'} too: a change may come from there"


def _rows(n: int) -> str:
    return f"{n} row" if n == 1 else f"{n} rows"
