"""A comparison in sentences, and as CSV, Markdown and JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from math import expm1
from pathlib import Path
from shlex import quote
from typing import Any

from orchestrator.analysis.compare import config_sets
from orchestrator.analysis.compare.join import Comparison, Row
from orchestrator.analysis.compare.reading import Side
from orchestrator.analysis.compare.sides import fields_of
from orchestrator.analysis.compare.statistics import ENOUGH_ROWS, MOST_DRIFT
from orchestrator.analysis.compare.verdict import AGAIN_BOUND
from orchestrator.command_hints import command
from orchestrator.tables.faults import escaped
from orchestrator.tables.write import no_formula, write_csv
from worker.text import plural

AGAIN_REPEATS = 7
RESULTS = (
    "golden_us", "tot_us", "change_pct", "verdict", "p", "noise_pct", "seen_from_pct", "rule", "golden_repeats",
    "tot_repeats", "note",
)  # fmt: skip
MOST_ROWS = 60
MEANS = {
    "machine": "another machine", "method": "measured differently", "other": "differs too", "test": "under test",
    "name": "",
}  # fmt: skip


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
    """A time with two decimals, one from 1,000 us on."""
    return "" if value is None else f"{value:.2f}" if value < 1000 else f"{value:.1f}"


def sentences(of: Comparison) -> list[str]:
    """The verdict in a few sentences."""
    n, j, rows = of.counts, of.judged, plural(len(of.rows), "row")
    worst = max((r.change or 0.0 for r in of.rows if r.verdict == "regression"), default=None)
    slower = f"{plural(n['regression'], 'row')} of {len(of.rows)} slower, the worst by {percent(worst)}"
    rest = "".join(f"{', ' if i else '; '}{n[v]} {v}" for i, v in enumerate(v for v in n if v != "regression" and n[v]))
    out = [f"{f'No regression in {rows}' if worst is None else slower}{rest}."]
    if of.slower:
        out.insert(0, f"The table as a whole is slower by {percent(expm1(float(j.shift.change)))}: a regression.")
    if of.open:
        out.append(f"{plural(len(of.open), 'row')} could not be judged.")
    if of.rule_only:
        return [*out, "Judged by the rule alone, which accuses nearly every table of unchanged stacks."]
    return [
        *out,
        f"If nothing had changed, {of.bound:g} rows of such a table would be called a regression by chance"
        f" (the rule alone flags {sum(r.beyond_rule for r in of.rows)} here); the median of the smallest changes that"
        f" would be called one is {percent(median_seen(of), sign=True) or 'none'}, with {plural(int(j.rows), 'row')}"
        " judged.",
    ]


def median_seen(of: Comparison) -> float | None:
    """The median over the rows of the smallest change that would have been called a regression."""
    seen = sorted(r.seen_from for r in of.rows if r.seen_from is not None)
    return seen[len(seen) // 2] if seen else None


def remarks(of: Comparison) -> list[str]:
    """Sentences on pairing and drift, on the noise, and on what else differs."""
    j = of.judged
    change, removed = float(j.shift.change), float(j.shift.removed)
    shift = f"table shift {percent(change, sign=True)}"
    if of.rule_only:
        out = [f"{shift}, counted as change"]
    elif j.paired:
        how = "in pairs, which is quieter" if j.noise.in_pairs else "by sides, pairs are no quieter"
        out = [f"paired (measured in turn; judged {how}); {shift}, counted as change"]
    elif int(j.rows) < ENOUGH_ROWS:
        why = "too few rows to know it from a change (0.7 % of drift counts as noise)"
        out = [f"unpaired; {shift}, not removed: {why}"]
    else:
        part = f": {percent(removed, sign=True)} removed as drift, the rest counts as change"
        loud = "; so much is hardly drift: measure both sides in turn" if abs(change) > MOST_DRIFT else ""
        out = [f"unpaired; {shift}{part if change != removed else ', removed as drift'}{loud}"]
    if j.averaged and not of.rule_only:
        out.append("no row has repeats: nothing shows their noise, so no row is judged; measure each three times")
    elif not of.rule_only:
        same = "all rows look equally noisy: judged by one noise"
        out.append(same if j.noise.alike else "rows of different noise")
    if other := [d.name for d in of.differences if d.kind == "other"]:
        names = ", ".join(other[:8]) + (", ..." if len(other) > 8 else "")
        out.append(f"{names} {'differs' if len(other) == 1 else 'differ'} too: a change may come from there")
    return out


def next_steps(of: Comparison, listed: str) -> list[str]:
    """Commands that measure the rows again that could not be judged; `listed`: the file that --again wrote, or ""."""
    if not of.open:
        return []
    sides = [" ".join(f"--{s.name} {quote(str(f))}" for f in s.files) for s in (of.golden, of.tot)]
    stacks = " ".join(dict.fromkeys(word for s in (of.golden, of.tot) for word in _stack_options(s)))
    backends = quote(",".join(sorted({r.key[0].split("/")[0] for r in of.open if "/" in r.key[0]})) or "BACKEND")
    file = quote(listed or "again.csv")
    steps = [] if listed else [command(f"compare {' '.join(sides)} --again {file}")]
    return [
        *steps,
        command(f"bench {file} --backend {backends} {stacks} --repeats {AGAIN_REPEATS}"),
        command(f"compare runs/<id>/golden.csv runs/<id>/tot.csv --bound {AGAIN_BOUND:g}"),
    ]


def _stack_options(side: Side) -> list[str]:
    """Options of `bench` that give a side again: its stack with the variables set for it, its config set."""
    fields = fields_of(side)
    # what the record names, or, of a bench of ours, what stands behind the side's name
    named = (fields.get("python", ""), fields.get("env", "").partition(" (")[2].removesuffix(")"))
    python = next((x for x in named if x.startswith("/")), named[1])
    given = [n for n in fields.get("under_test", "").split() if n in fields]
    settings = "".join(f",{n.removeprefix('switches.')}={fields[n]}" for n in given)
    if "configs" not in fields:
        return [f"--env {side.name}={quote((python or ('' if given else 'PYTHON')) + settings)}"]
    stack = [f"--env stack={quote(python + settings)}"] if python or settings else []
    return [*stack, f"--config-set {quote(side.name + '=' + fields['configs'].rpartition(' (')[0])}"]


def write_joined(of: Comparison, path: Path) -> None:
    """Writes the joined table as CSV, every row, the worst first."""
    write_csv(path, (*of.columns, *RESULTS), ((*map(no_formula, r.key), *_cells(r)) for r in of.rows))


def write_again(of: Comparison, path: Path) -> int:
    """Writes the kernels and shapes that need a second look, for a benchmark. Returns how many."""
    write_csv(path, of.columns, (r.key for r in of.open))
    return len(of.open)


def _cells(r: Row) -> Sequence[str]:
    times = ("" if x is None else f"{x:.4f}" for x in (r.golden_us, r.tot_us))
    change, noise, seen = ("" if x is None else f"{100 * x:.3f}" for x in (r.change, r.noise, r.seen_from))
    p, rule = "" if r.p is None else f"{r.p:.3g}", "beyond" if r.beyond_rule else "within"
    return (*times, change, r.verdict, p, noise, seen, rule, r.golden_repeats, r.tot_repeats, r.note)


def document(of: Comparison) -> dict[str, Any]:
    """The JSON document: `rows` with key, times and verdict, `counts` by verdict, and how they were judged."""
    j = of.judged
    rows = [asdict(r) | {"key": dict(zip(of.columns, r.key, strict=True))} for r in of.rows]
    for row in rows:
        del row["configs"]
    return {
        "counts": of.counts,
        "rows": rows,
        "rule": {"rel": of.rule.rel, "abs_us": of.rule.abs_us, "ignore_below_us": of.rule.ignore_below},
        "expected_false_regressions": of.bound,
        "threshold": float(j.threshold),
        "judged": int(j.rows),
        "exit_code": of.exit_code,
        "rule_only": of.rule_only,
        "averaged": j.averaged,
        "same_noise": bool(j.noise.alike),
        "paired": j.paired,
        "in_pairs": j.noise.in_pairs,
        "table_shift": float(j.shift.change),
        "shift_removed": float(j.shift.removed),
        "table_slower": of.slower,
        "table_p": float(j.shift.p),
        "seen_from": median_seen(of),
        "environment": {
            **{s.name: fields_of(s) for s in (of.golden, of.tot)},
            "differences": [
                {"field": d.name, "golden": d.golden, "tot": d.tot, "kind": d.kind} for d in of.differences
            ],
        },
        "config_files": config_sets.changed_files(of),
        "files": {s.name: [str(f) for f in s.files] for s in (of.golden, of.tot)},
        "summary": sentences(of),
        "warnings": of.warnings,
    }


def environments(of: Comparison) -> list[tuple[str, str, str, str]]:
    """(field, golden, tot, what a difference means) of all fields of the environment records."""
    golden, tot = fields_of(of.golden), fields_of(of.tot)
    means = {d.name: MEANS[d.kind] for d in of.differences}
    return [(n, golden.get(n, ""), tot.get(n, ""), means.get(n, "")) for n in dict.fromkeys((*golden, *tot))]


def markdown(of: Comparison) -> str:
    """Markdown for a pull request: verdict, environments, the rows that need a look, all others folded."""
    seen = [r for r in of.rows if r.verdict not in ("ok", "ignored")]
    rest = [r for r in of.rows if r.verdict in ("ok", "ignored")]
    head = {0: "No regression", 1: "Regression", 4: "Not all could be judged"}[of.exit_code]
    lines = [f"### {head}: golden against tot", "", *sentences(of), ""]
    if fields := [f"| {' | '.join(map(_safe, row))} |" for row in environments(of)]:
        lines += ["| environment | golden | tot | |", "|---|---|---|---|", *fields, ""]
    lines += [f"- {_safe(n)}" for n in (*config_sets.sentences(of), *remarks(of), *of.warnings)] + [""]
    lines += _table(of, seen)
    if rest:
        summary = f"<summary>{plural(len(rest), 'row')} ok or ignored</summary>"
        lines += ["<details>", summary, "", *_table(of, rest), "</details>"]
    rule = of.rule
    suspected = f"tot > {rule.rel:g} * golden + {rule.abs_us:g} us; golden below {rule.ignore_below:g} us is ignored"
    lines += ["", f"Suspected where {suspected}. p: how likely a row without a change shows one of this size."]
    return "\n".join(lines) + "\n"


def _table(of: Comparison, rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    head = [*map(_safe, of.columns), "golden us", "tot us", "change", "verdict", "p", "seen from", "note"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(of.columns) + "---:|" * 3 + "---|" + "---:|" * 2 + "---|"]
    for r in rows[:MOST_ROWS]:
        bold = "**" if r.verdict == "regression" else ""
        cells = [
            *map(_safe, r.key), us(r.golden_us), us(r.tot_us), percent(r.change, sign=True),
            f"{bold}{r.verdict}{bold}", chance(r.p), percent(r.seen_from, sign=True), _safe(r.note),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    more = ["", f"... and {len(rows) - MOST_ROWS} more"] if len(rows) > MOST_ROWS else []
    return [*lines, *more, ""]


def _safe(text: str) -> str:
    """Text of a file as plain text in a Markdown table: neither markup, links, mentions nor HTML."""
    text = re.sub(r"([\\`*_{}\[\]()#|~!])", r"\\\1", escaped(text))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", "@&#8203;")
