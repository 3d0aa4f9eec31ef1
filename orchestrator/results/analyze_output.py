"""Prints the document of `analyze` for people: on a terminal as wide as it is, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.results.analyze import LEAD, OFF, Row, device_text, spread_of
from orchestrator.results.grid import MISSING, Grid, marked, on_terminal, safe
from orchestrator.tables.backends import label
from worker.text import and_more, plural

REASONS = {
    "no_time": "without a time (us missing, not a number, or not above 0)",
    "not_finite": "with an infinite time",
    "error_ratio": "beyond the error ratio",
    "no_shape": "without a whole key",
    "malformed": "that are not rows of the header (cut short, too long, not UTF-8)",
}
"""Reasons to leave rows out: the words after `N rows`."""
MOST_NAMED = 8
MOST_WRONG = 100
"""Rows beyond the error ratio that a terminal lists."""
_OPTIONAL = ("roof", "ASM/other", "best")
"""Columns that a narrow terminal leaves out, the first one first."""


def show(console: Console, of: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Prints an analysis on a terminal; `rows`: the shapes to list."""
    console.print(Text(_headline(of), style="bold"), Text(""), sep="\n")
    main = _main(of, rows)
    kept = _columns_within(main, console.width)
    if kept:
        console.print(on_terminal(main, kept))
    for row in () if kept else main.rows:  # too narrow even for the backends: one below the other
        there = [f"  {main.heads[i]} {row[i]}" for i in range(1, 1 + len(of["backends"])) if row[i] != MISSING]
        console.print(Text(row[0], style="bold"), *(there or ["  no backend"]), sep="\n")
    if len(rows) < len(of["rows"]):
        more = f"... and {plural(len(of['rows']) - len(rows), 'more shape')} (--rows 0 shows all)"
        console.print(Text(more, style="dim"))
    other = "; ASM/other: ASM over the best other" if "ASM/other" in [main.heads[i] for i in kept] else ""
    console.print(Text(f"TFLOPS (1e12 operations a second), bold: the fastest{other}", style="dim"))
    if (pairs := _pairs(of)).rows:
        console.print(Text(""), on_terminal(pairs), sep="\n")
    console.print()
    for what, sentence in _sentences(of):
        line = Table.grid(padding=(0, 2))
        line.add_column(width=11, no_wrap=True, style="bold")
        line.add_row(Text(what), Text(sentence))
        console.print(line)
    if (wrong := _wrong(of)).rows:
        console.print(Text(""), on_terminal(wrong._replace(rows=wrong.rows[:MOST_WRONG])), sep="\n")
    if len(wrong.rows) > MOST_WRONG:
        console.print(Text(f"... and {len(wrong.rows) - MOST_WRONG:,} more (all with --json)", style="dim"))
    if of.get("reference"):
        console.print(Text(""), on_terminal(_references(of)), Text(_reference_sentence(of)), sep="\n")
        console.print(Text(of["reference"]["source"], style="dim"))


def markdown(of: Mapping[str, Any]) -> Iterator[str]:
    """The same as lines of Markdown."""
    yield f"**{safe(_headline(of))}**"
    yield from marked(_main(of, of["rows"]))
    yield from ("", "TFLOPS (1e12 operations a second); bold: the fastest.")
    yield from marked(_pairs(of))
    yield ""
    for what, sentence in _sentences(of):
        yield f"- **{what}**: {safe(sentence)}" if what else f"  {safe(sentence)}"
    yield from marked(_wrong(of))
    if of.get("reference"):
        yield from marked(_references(of))
        yield from ("", f"{_reference_sentence(of)}. {of['reference']['source']}")
    if of["notes"]:
        yield from ("", *(f"- note: {safe(n)}" for n in of["notes"]))


def _number(tflops: float) -> str:
    """Four digits at most, as `5,913`, `86.9`, `0.78`."""
    return f"{tflops:,.0f}" if tflops >= 99.95 else f"{tflops:.1f}" if tflops >= 9.995 else f"{tflops:.2f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    """`57 %`, or nothing; one digit more below 10 %."""
    return "" if value is None else f"{value * 100:.{0 if value >= 0.0995 else 1}f} %"


def _headline(of: Mapping[str, Any]) -> str:
    """The inputs of an analysis in one sentence."""
    chips = [
        device_text(c["gfx"], c["cu_num"]) + (f" ({c['name']})" if c["name"] else "")
        for c in of["summary"]["roofline"]["chips"]
        if c["gfx"] or c["cu_num"]
    ]
    on = f" on {', '.join(chips)}" if chips else ""
    shapes, backends = plural(len(of["rows"]), "shape"), plural(len(of["backends"]), "backend")
    files, rows = plural(len(of["inputs"]), "file"), plural(sum(f["rows"] for f in of["inputs"]), "row")
    return f"{of['family']}{on}: {shapes}, {backends}, from {of['title']} ({files}, {rows})"


def _main(of: Mapping[str, Any], shapes: Sequence[Row]) -> Grid:
    """A row a shape, a column a backend; then the best, the ratio and the share of the roofline."""
    names, lead, roofs = of["backends"], _has_lead(of), any(r["roofline"] for r in of["rows"])
    several = len(of["summary"]["roofline"]["chips"]) > 1
    rows: list[list[str]] = []
    for r in shapes:
        there, won = r["backends"], r["best"]
        row = [r["shape"] + (f" {r['gfx'] or '?'}/{r['cu_num'] or '?'}" if several else "")]
        row += [_number(there[b]["tflops"]) if b in there else MISSING for b in names]
        row += [label(won) if won else "none", *[_ratio(r["asm_over_best_other"])] * lead]
        rows.append(row + [_percent((r["roofline"] or {}).get("share"))] * roofs)
    heads = ["shape", *map(label, names), "best", *["ASM/other"] * lead, *["roof"] * roofs]
    bold = [1 + names.index(r["best"]) if r["best"] else None for r in shapes]
    return Grid(heads, rows, ("shape", "best"), bold)


def _has_lead(of: Mapping[str, Any]) -> bool:
    return any(LEAD in (p["first"], p["second"]) for p in of["summary"]["pairs"])


def _pairs(of: Mapping[str, Any]) -> Grid:
    rows = [
        (f"{label(p['first'])} over {label(p['second'])}", f"{p['shapes']:,}", f"{p['wins']:,}",
         *(_ratio(p[n]) for n in ("least", "most", "mean", "geomean")))
        for p in of["summary"]["pairs"]
    ]  # fmt: skip
    return Grid(("backends", "shapes", "faster on", "min", "max", "mean", "geo. mean"), rows, ("backends",))


def _wrong(of: Mapping[str, Any]) -> Grid:
    """The rows beyond the error ratio, by shape, the largest errors first."""
    rows = []
    for r in of["rows"]:
        least = r["backends"][r["best"]]["us"] if r["best"] else float("inf")
        for w in sorted(
            r["beyond_err_ratio"], key=lambda w: (-(1e300 if (e := w["err_ratio"]) is None else e), w["us"])
        ):
            err = "(none)" if w["err_ratio"] is None else f"{w['err_ratio']:.4g}"
            faster = "faster than any valid row" if w["us"] < least else ""
            rows.append((r["shape"], label(w["backend"]), w["kernel"] or "(no name)", err, f"{w['us']:.2f}", faster))
    return Grid(("shape", "backend", "kernel", "errRatio", "us", ""), rows, ("shape", "backend", "kernel", ""))


def _references(of: Mapping[str, Any]) -> Grid:
    """Published figures beside those measured. What deviates by more than OFF is marked with a `!`."""
    rows = []
    for r in of["reference"]["rows"]:
        here = ("", "not measured", "")
        if m := r["measured"]:
            here = (_number(m["tflops"]), label(m["backend"]), f"{r['deviation']:+.1%}{' !' if r['off'] else ''}")
        rows.append((f"{r['M']}x{r['N']}x{r['K']}", _number(r["tflops"]), *here))
    return Grid(("shape", "published", "measured", "backend", "deviation"), rows, ("shape", "backend"))


def _reference_sentence(of: Mapping[str, Any]) -> str:
    rows = of["reference"]["rows"]
    there, off = sum(r["measured"] is not None for r in rows), sum(r["off"] for r in rows)
    return f"{there} of {len(rows)} published shapes were measured, {off} of them deviate by more than {OFF:.0%} (!)"


def _sentences(of: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(what, the sentence) of the summary, in the order of interest; only what there is to say."""
    rows, summary, left_out = of["rows"], of["summary"], of["left_out"]
    if won := [f"{label(b)} on {n:,}" for b, n in sorted(summary["wins"].items(), key=lambda kv: -kv[1]) if n]:
        yield "fastest", f"{', '.join(won)} of {plural(len(rows), 'shape')}"
    if _has_lead(of):
        worst = sorted((x, r["shape"], r["best"]) for r in rows if (x := r["asm_over_best_other"]) and x < 1)
        named = [f"{shape} ({_ratio(x)} of {label(best)})" for x, shape, best in worst]
        yield "ASM loses", f"on {len(worst):,}: {and_more(named, MOST_NAMED)}" if worst else "nowhere"
    if beyond := summary["beyond_err_ratio"]:
        text = plural(left_out["error_ratio"], "row") + f" of {plural(len(beyond), 'shape')}"
        faster = [r["shape"] for r in rows if r["wrong_was_faster"]]
        more = f", faster than any valid row on {and_more(faster, MOST_NAMED)}" if faster else ""
        yield "error ratio", f"{text} above {of['err_ratio']:g}{more}: listed below"
    elif any("M" in r["key"] for r in rows):
        yield "error ratio", f"no row above {of['err_ratio']:g}"
    yield "no backend", and_more(summary["no_backend"], MOST_NAMED) or "none: every shape has a valid row"
    left = [f"{left_out[reason]:,} {words}" for reason, words in REASONS.items() if left_out[reason]]
    yield "left out", f"rows: {'; '.join(left)}" if left else "no row"
    for c in summary["roofline"]["chips"]:
        mine = [r for r in rows if (r["gfx"], r["cu_num"]) == (c["gfx"], c["cu_num"]) and r["roofline"] and r["best"]]
        if s := spread_of([r["roofline"]["share"] for r in mine]):
            peaks = ", ".join(f"{k} {c['peaks'][k]:,.0f}" for k in c["peaks"] if k in c["types"])
            reach = f"{_percent(s['min'])} to {_percent(s['max'])} (mean {_percent(s['mean'])})"
            yield "roofline", f"the fastest reach {reach}"
            yield "", f"of {c['name']}: {peaks} TFLOPS dense, {c['bandwidth']:g} TB/s ({c['source']})"


def _columns_within(grid: Grid, width: int) -> list[int]:
    """The columns that fit; none where not even the backends do."""
    widths = [max(map(len, column)) + 2 for column in zip(grid.heads, *grid.rows, strict=True)]
    kept = list(range(len(widths)))
    for name in ("", *_OPTIONAL):
        kept = [i for i in kept if grid.heads[i] != name]
        if sum(widths[i] for i in kept) - 2 <= width:
            return kept
    return []
