"""A comparison in sentences, and as CSV, Markdown and JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import expm1
from pathlib import Path
from shlex import quote
from typing import Any

from orchestrator.analysis.compare import config_sets
from orchestrator.analysis.compare.join import Comparison, Row
from orchestrator.analysis.compare.sides import Difference, Side
from orchestrator.analysis.compare.statistics import ASSUMED, ENOUGH_ROWS, MOST_DRIFT
from orchestrator.analysis.compare.verdict import AGAIN_BOUND
from orchestrator.command_hints import command
from orchestrator.tables.faults import escaped
from orchestrator.tables.write import no_formula, write_csv
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
        f" (the rule alone flags {by_rule} here); the median of the smallest changes that would be called one is"
        f" {percent(median_seen(of), sign=True) or 'none'}, with {plural(int(j.rows), 'row')} judged.",
    ]


def median_seen(of: Comparison) -> float | None:
    """The median over the rows of the smallest change that would have been called a regression."""
    seen = sorted(r.seen_from for r in of.rows if r.seen_from is not None)
    return seen[len(seen) // 2] if seen else None


def noise_source(of: Comparison) -> str:
    """The source of the rows' noise, in words."""
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
    """The pairing of the sides, and the treatment of a shift of the whole table, in words."""
    j = of.judged
    change, removed = float(j.shift.change), float(j.shift.removed)
    shift = f"table shift {percent(change, sign=True)}"
    if of.rule_only:
        return f"{shift}, counted as change"
    if j.paired:
        how = "in pairs, which is quieter" if j.in_pairs else "by sides, pairs are no quieter"
        return f"paired (measured in turn; judged {how}); {shift}, counted as change"
    if int(j.rows) < ENOUGH_ROWS:
        return f"unpaired; {shift}, not removed: too few rows to know it from a change (0.7 % of drift counts as noise)"
    kept = change - removed
    more = f": {percent(removed, sign=True)} removed as drift, the rest counts as change"
    more = more if kept else ", removed as drift"
    loud = "; so much is hardly drift: measure both sides in turn" if abs(change) > MOST_DRIFT else ""
    return f"unpaired; {shift}{more}{loud}"


def next_steps(of: Comparison, listed: str) -> list[str]:
    """Commands that measure the rows again that could not be judged; `listed`: the file that --again wrote, or ""."""
    if not of.open:
        return []
    sides = [" ".join(f"--{s.name} {quote(str(f))}" for f in s.files) for s in (of.golden, of.tot)]
    stacks = dict.fromkeys(word for s in (of.golden, of.tot) for word in _stack_options(s))
    backends = ",".join(sorted({r.key[0].split("/")[0] for r in of.open if "/" in r.key[0]})) or "BACKEND"
    file = quote(listed) if listed else "again.csv"
    steps = [command(f"compare {' '.join(sides)} --again {file}")] if not listed else []
    return [
        *steps,
        command(f"bench {file} --backend {quote(backends)} {' '.join(stacks)} --repeats {AGAIN_REPEATS}"),
        command(f"compare {AGAIN_SIDES} --bound {AGAIN_BOUND:g}"),
    ]


def _stack_options(side: Side) -> list[str]:
    """Options of `bench` that give a side again: its stack with the variables set for it, its config set."""
    fields = side.fields
    # what the record names, or, of a bench of ours, what stands behind the side's name
    named = (fields.get("python", ""), fields.get("env", "").partition(" (")[2].removesuffix(")"))
    python = next((x for x in named if x.startswith("/")), named[1])
    given = [n for n in fields.get("under_test", "").split() if n in fields]
    settings = "".join(f",{n.removeprefix('switches.')}={fields[n]}" for n in given)
    if "configs" not in fields:
        return [f"--env {side.name}={quote((python or ('' if given else 'PYTHON')) + settings)}"]
    stack = [f"--env stack={quote(python + settings)}"] if python or settings else []
    folder = fields["configs"].rpartition(" (")[0]
    return [*stack, f"--config-set {quote(f'{side.name}={folder}')}"]


def differs(d: Difference) -> str:
    """The meaning of a difference of the environments."""
    return _OF_KIND[d.kind]


def caveat(of: Comparison) -> str:
    """The differences beside the stack under test in a sentence, or ""."""
    other = [d.name for d in of.differences if d.kind == "other"]
    if not other:
        return ""
    names = ", ".join(other[:8]) + (", ..." if len(other) > 8 else "")
    return f"{names} {'differs' if len(other) == 1 else 'differ'} too: a change may come from there"


RESULTS = (
    "golden_us", "tot_us", "change_pct", "verdict", "p", "noise_pct", "seen_from_pct", "rule", "golden_repeats",
    "tot_repeats", "note",
)  # fmt: skip
MOST_ROWS = 60


def write_joined(of: Comparison, path: Path) -> None:
    """Write the joined table as CSV, every row, the worst first."""
    write_csv(path, (*of.columns, *RESULTS), ((*map(no_formula, r.key), *_cells(r)) for r in of.rows))


def write_again(of: Comparison, path: Path) -> int:
    """Write the kernels and shapes that need a second look, for a benchmark. Return how many."""
    write_csv(path, of.columns, (r.key for r in of.open))
    return len(of.open)


def _cells(r: Row) -> Sequence[str]:
    return (
        _figure(r.golden_us, 4), _figure(r.tot_us, 4), _figure(r.change, 3, 100), r.verdict,
        "" if r.p is None else f"{r.p:.3g}", _figure(r.noise, 3, 100), _figure(r.seen_from, 3, 100),
        "beyond" if r.beyond else "within", r.golden_repeats, r.tot_repeats, r.note,
    )  # fmt: skip


def _figure(x: float | None, digits: int, times: float = 1.0) -> str:
    return "" if x is None else f"{x * times:.{digits}f}"


def document(of: Comparison) -> dict[str, Any]:
    """The JSON document: `rows` with key, times and verdict, `counts` by verdict, and how they were judged."""
    j = of.judged
    return {
        "counts": of.counts,
        "rows": [
            {
                "key": dict(zip(of.columns, r.key, strict=True)),
                "golden_us": r.golden_us, "tot_us": r.tot_us, "change": r.change, "verdict": r.verdict, "p": r.p,
                "noise": r.noise, "seen_from": r.seen_from, "beyond_rule": r.beyond, "second_look": r.suspect,
                "golden_repeats": r.golden_repeats, "tot_repeats": r.tot_repeats, "note": r.note,
            }
            for r in of.rows
        ],
        "rule": {"rel": of.rule.rel, "abs_us": of.rule.abs_us, "ignore_below_us": of.rule.ignore_below},
        "expected_false_regressions": of.bound,
        "threshold": float(j.threshold),
        "judged": int(j.rows),
        "exit_code": of.exit_code,
        "rule_only": of.rule_only,
        "averaged": j.averaged,
        "same_noise": bool(j.alike),
        "paired": j.paired,
        "in_pairs": j.in_pairs,
        "table_shift": float(j.shift.change),
        "shift_removed": float(j.shift.removed),
        "table_slower": of.slower,
        "table_p": float(j.shift.p),
        "seen_from": median_seen(of),
        "environment": {
            "golden": of.golden.fields,
            "tot": of.tot.fields,
            "differences": [
                {"field": d.name, "golden": d.golden, "tot": d.tot, "kind": d.kind} for d in of.differences
            ],
        },
        "config_files": config_sets.changed_files(of),
        "files": {s.name: [str(f) for f in s.files] for s in (of.golden, of.tot)},
        "summary": sentences(of),
        "warnings": of.warnings,
    }  # fmt: skip


def markdown(of: Comparison) -> str:
    """Markdown for a pull request: verdict, environments, the rows that need a look, all others folded."""
    seen = [r for r in of.rows if r.verdict not in ("ok", "ignored")]
    rest = [r for r in of.rows if r.verdict in ("ok", "ignored")]
    head = "Regression" if of.regression else "Not all could be judged" if of.open else "No regression"
    lines = [f"### {head}: golden against tot", "", *sentences(of), "", *_environments(of)]
    notes = [*config_sets.sentences(of), pairing(of), noise_source(of), caveat(of), *of.warnings]
    lines += [f"- {_safe(n)}" for n in notes if n] + [""]
    if seen:
        lines += _table(of, seen)
    if rest:
        lines += [
            "<details>",
            f"<summary>{plural(len(rest), 'row')} ok or ignored</summary>",
            "",
            *_table(of, rest),
            "</details>",
        ]
    rule = of.rule
    suspected = f"tot > {rule.rel:g} * golden + {rule.abs_us:g} us; golden below {rule.ignore_below:g} us is ignored"
    lines += ["", f"Suspected where {suspected}. p: how likely a row without a change shows one of this size."]
    return "\n".join(lines) + "\n"


def _environments(of: Comparison) -> list[str]:
    golden, tot = of.golden.fields, of.tot.fields
    names = list(dict.fromkeys((*golden, *tot)))
    if not names:
        return []
    means = {d.name: differs(d) for d in of.differences}
    rows = [
        f"| {_safe(n)} | {_safe(golden.get(n, ''))} | {_safe(tot.get(n, ''))} | {means.get(n, '')} |" for n in names
    ]
    return ["| environment | golden | tot | |", "|---|---|---|---|", *rows, ""]


def _table(of: Comparison, rows: Sequence[Row]) -> list[str]:
    head = [*map(_safe, of.columns), "golden us", "tot us", "change", "verdict", "p", "seen from", "note"]
    right = len(of.columns)
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * right + "---:|" * 3 + "---|" + "---:|" * 2 + "---|"]
    for r in rows[:MOST_ROWS]:
        bold = "**" if r.verdict == "regression" else ""
        cells = [
            *map(_safe, r.key), us(r.golden_us), us(r.tot_us), percent(r.change, sign=True),
            f"{bold}{r.verdict}{bold}", chance(r.p), percent(r.seen_from, sign=True), _safe(r.note),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    if len(rows) > MOST_ROWS:
        lines += ["", f"... and {len(rows) - MOST_ROWS} more"]
    return [*lines, ""]


def _safe(text: str) -> str:
    """Text of a file as plain text in a Markdown table: neither markup, links, mentions nor HTML."""
    text = re.sub(r"([\\`*_{}\[\]()#|~!])", r"\\\1", escaped(text))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", "@&#8203;")
