"""A comparison as CSV, Markdown and JSON."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from orchestrator.analysis.compare import text
from orchestrator.analysis.compare.join import Comparison, Row
from orchestrator.tables.faults import escaped
from orchestrator.tables.write import no_formula
from orchestrator.userfiles import write_atomic
from worker.text import plural

RESULTS = (
    "golden_us", "tot_us", "change_pct", "verdict", "p", "noise_pct", "seen_from_pct", "rule", "golden_repeats",
    "tot_repeats", "note",
)  # fmt: skip
MOST_ROWS = 60


def write_csv(of: Comparison, path: Path) -> None:
    """The joined table, every row, the worst first."""

    def fill(f: TextIO) -> None:
        out = csv.writer(f, lineterminator="\n")
        out.writerow((*of.columns, *RESULTS))
        out.writerows((*map(no_formula, r.key), *_cells(r)) for r in of.rows)

    write_atomic(path, fill)


def write_again(of: Comparison, path: Path) -> int:
    """The kernels and shapes that deserve a second look, for a benchmark. Returns how many."""
    rows = of.open

    def fill(f: TextIO) -> None:
        out = csv.writer(f, lineterminator="\n")
        out.writerow(of.columns)
        out.writerows(r.key for r in rows)

    write_atomic(path, fill)
    return len(rows)


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
        "seen_from": text.middle_seen(of),
        "environment": {
            "golden": of.golden.fields,
            "tot": of.tot.fields,
            "differences": [
                {"field": d.name, "golden": d.golden, "tot": d.tot, "kind": d.kind} for d in of.differences
            ],
        },
        "files": {s.name: [str(f) for f in s.files] for s in (of.golden, of.tot)},
        "summary": text.sentences(of),
        "warnings": of.warnings,
    }  # fmt: skip


def markdown(of: Comparison) -> str:
    """For a pull request: verdict, environments, the rows that a reader must see, all others folded away."""
    seen = [r for r in of.rows if r.verdict not in ("ok", "ignored")]
    rest = [r for r in of.rows if r.verdict in ("ok", "ignored")]
    head = "Regression" if of.regression else "Not all could be judged" if of.open else "No regression"
    lines = [f"### {head}: golden against tot", "", *text.sentences(of), "", *_environments(of)]
    notes = [text.pairing(of), text.noise_source(of), text.caveat(of), *of.warnings]
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
    means = {d.name: text.differs(d) for d in of.differences}
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
            *map(_safe, r.key), text.us(r.golden_us), text.us(r.tot_us), text.percent(r.change, sign=True),
            f"{bold}{r.verdict}{bold}", text.chance(r.p), text.percent(r.seen_from, sign=True), _safe(r.note),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    if len(rows) > MOST_ROWS:
        lines += ["", f"... and {len(rows) - MOST_ROWS} more"]
    return [*lines, ""]


def _safe(text: str) -> str:
    """Text of a file as plain text in a Markdown table: neither markup, links, mentions nor HTML."""
    text = re.sub(r"([\\`*_{}\[\]()#|~!])", r"\\\1", escaped(text))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", "@&#8203;")
