"""A comparison in sentences, and as numbers for people."""

from __future__ import annotations

from collections.abc import Mapping
from math import expm1
from shlex import quote

from orchestrator.analysis.compare.environment import Difference
from orchestrator.analysis.compare.join import Comparison
from orchestrator.analysis.compare.scatter import ASSUMED, ENOUGH_ROWS, MOST_DRIFT
from orchestrator.analysis.compare.verdict import AGAIN_BOUND
from orchestrator.command_hints import command
from worker.text import plural

AGAIN_REPEATS = 7
AGAIN_SIDES = "runs/<id>/golden.csv runs/<id>/tot.csv"
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
    """The verdict in a few sentences."""
    n, j = of.counts, of.judged
    worst = max((r for r in of.rows if r.verdict == "regression"), key=lambda r: r.change or 0.0, default=None)
    found = (
        f"{plural(n['regression'], 'row')} of {len(of.rows)} slower, the worst by {percent(worst.change)}"
        if worst
        else f"No regression in {plural(len(of.rows), 'row')}"
    )
    rest = ", ".join(f"{n[v]} {v}" for v in n if v != "regression" and n[v])
    out = [f"{found}" + (f"; {rest}." if rest else ".")]
    if of.slower:
        out.insert(0, f"The table as a whole is slower by {percent(expm1(float(j.shift.change)))}: a regression.")
    if of.open:
        out.append(f"{plural(len(of.open), 'row')} could not be judged.")
    if of.rule_only:
        return [*out, "Judged by the rule alone, which accuses nearly every table of unchanged stacks."]
    by_rule = sum(r.beyond for r in of.rows)
    return [
        *out,
        f"If nothing had changed, {of.bound:g} rows of such a table would be called a regression by chance"
        f" (the rule alone flags {by_rule} here); the change of the middle row that would have been seen is"
        f" {percent(middle_seen(of), sign=True) or 'none'}, with {plural(int(j.rows), 'row')} judged.",
    ]


def middle_seen(of: Comparison) -> float | None:
    """The median over the rows of the smallest change that would have been called a regression."""
    seen = sorted(r.seen_from for r in of.rows if r.seen_from is not None)
    return seen[len(seen) // 2] if seen else None


def noise_source(of: Comparison) -> str:
    """What the rows' noise was taken from."""
    j = of.judged
    few = int(j.rows) < ENOUGH_ROWS
    if of.rule_only:
        return ""
    if j.averaged:
        return (
            f"no row has repeats and they are too few to show their scatter: {percent(ASSUMED)} of scatter is assumed"
            if few
            else "no row has repeats: judged by the scatter of the table's own changes; a row noisier than the others"
            " looks like a change"
        )
    return "all rows look equally noisy: judged by one noise" if j.alike else "rows of different noise"


def pairing(of: Comparison) -> str:
    """How the sides relate, and what was done about a shift of the whole table."""
    j = of.judged
    change, removed = float(j.shift.change), float(j.shift.removed)
    shift = f"table shift {percent(change, sign=True)}"
    if of.rule_only:
        return f"{shift}, counted as change"
    if j.paired:
        how = "in pairs, which is quieter" if j.in_pairs else "by sides, pairs are no quieter"
        return f"paired (measured in turn; judged {how}); {shift}, counted as change"
    if int(j.rows) < ENOUGH_ROWS:
        return f"unpaired; {shift}, not removed: too few rows to tell it from a change (0.7 % of drift counts as noise)"
    kept = change - removed
    more = f": {percent(removed, sign=True)} removed as drift, the rest counts as change"
    more = more if kept else ", removed as drift"
    loud = "; so much is hardly drift: measure both sides in turn" if abs(change) > MOST_DRIFT else ""
    return f"unpaired; {shift}{more}{loud}"


def next_steps(of: Comparison, listed: str) -> list[str]:
    """How to measure what could not be judged; `listed`: the file that --again wrote, or ""."""
    if not of.open:
        return []
    sides = [" ".join(f"--{s.name} {quote(str(f))}" for f in s.files) for s in (of.golden, of.tot)]
    stacks = [f"--env {s.name}={quote(_interpreter(s.fields))}" for s in (of.golden, of.tot)]
    backends = ",".join(sorted({r.key[0].split("/")[0] for r in of.open if "/" in r.key[0]})) or "BACKEND"
    file = quote(listed) if listed else "again.csv"
    steps = [command(f"compare {' '.join(sides)} --again {file}")] if not listed else []
    return [
        *steps,
        command(f"bench {file} --backend {quote(backends)} {' '.join(stacks)} --repeats {AGAIN_REPEATS}"),
        command(f"compare {AGAIN_SIDES} --bound {AGAIN_BOUND:g}"),
    ]


def _interpreter(fields: Mapping[str, str]) -> str:
    """The interpreter of a side: what its record names, or, of a bench of ours, what stands behind the side's name."""
    named = (fields.get("python", ""), fields.get("env", "").partition(" (")[2].removesuffix(")"))
    return next((x for x in named if x.startswith("/")), "PYTHON")


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
