"""The documents of `analyze` and `compare` for people: tables and sentences on a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.families import label
from orchestrator.pages import ALL, Cell, Page
from orchestrator.results.analyze import LEAD, OFF, device_text, spread_of
from orchestrator.results.compare import AGAIN_BOUND
from orchestrator.results.comparison import percent
from worker.text import and_more, plural

_STYLES = {"regression": "bold red", "boundary": "yellow", "unstable": "magenta", "improved": "green",
           "ignored": "dim"}  # fmt: skip

MOST_ROWS = 60
MEANS = {"machine": "another machine", "method": "measured differently", "other": "differs too", "test": "under test"}
HEADS = {
    "golden_us": "golden us", "tot_us": "tot us", "change": "change", "verdict": "verdict", "p": "p",
    "seen_from": "seen from", "golden_repeats": "golden runs", "tot_repeats": "tot runs",
}  # fmt: skip
"""The columns of a row's figures, by their names in the document."""

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
"""Rows beyond the error ratio that are listed."""
MOST_PAIRS = 28
"""Pairs of backends that are listed: all of eight backends."""


def add_analysis(page: Page, of: Mapping[str, Any], most: int) -> None:
    """Add an analysis to a page, with as many shapes as `most` says."""
    page.line(_headline(of))
    _add_shapes(page, of, most)
    page.line("TFLOPS (1e12 operations a second); bold: the fastest; ASM/other: ASM over the best other")
    heads: tuple[str, ...] = ("backends", "shapes", "faster on", "min", "max", "mean", "geo. mean")
    page.table(heads, (
        (f"{label(p['first'])} over {label(p['second'])}", f"{p['shapes']:,}", f"{p['wins']:,}",
         *(_ratio(p[n]) for n in ("least", "most", "mean", "geomean")))
        for p in of["summary"]["pairs"]
    ), "pair", right=heads[1:], most=MOST_PAIRS, more=ALL)  # fmt: skip
    page.line(*_sentences(of))
    heads = ("shape", "backend", "kernel", "errRatio", "us", "")
    page.table(heads, _wrong(of), right=heads[3:5], most=MOST_WRONG, more=ALL)
    if reference := of.get("reference"):
        rows = [(f"{r['M']}x{r['N']}x{r['K']}", _number(r["tflops"]), *_here(r)) for r in reference["rows"]]
        heads = ("shape", "published", "measured", "backend", "deviation")
        page.table(heads, rows, right=("published", "measured", "deviation"), most=len(rows))
        there, off = (sum(bool(r[n]) for r in reference["rows"]) for n in ("measured", "off"))
        said = (
            f"{there} of {len(rows)} published shapes were measured, {off} of them deviate by more than {OFF:.0%} (!)"
        )
        page.line(said, reference["source"])
    page.line(*(f"note: {note}" for note in of["notes"]))


def _number(tflops: float) -> str:
    """Four digits at most, as `5,913`, `86.9`, `0.78`."""
    return f"{tflops:,.0f}" if tflops >= 99.95 else f"{tflops:.1f}" if tflops >= 9.995 else f"{tflops:.2f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


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


def _add_shapes(page: Page, of: Mapping[str, Any], most: int) -> None:
    """Add a row a shape, a column a backend; then the best, the ratio and the share of the roofline."""
    names, lead, roofs = of["backends"], _has_lead(of), any(r["roofline"] for r in of["rows"])
    several = len(of["summary"]["roofline"]["chips"]) > 1
    rows: list[list[Cell]] = []
    for r in of["rows"]:
        there, won = r["backends"], r["best"]
        row: list[Cell] = [r["shape"] + (f" {r['gfx'] or '?'}/{r['cu_num'] or '?'}" if several else "")]
        for b in names:
            figure = _number(there[b]["tflops"]) if b in there else ""
            row.append((figure, "bold green") if b == won else figure or "-")
        row += [label(won) if won else "none", *[_ratio(r["asm_over_best_other"])] * lead]
        rows.append(row + [percent((r["roofline"] or {}).get("share"))] * roofs)
    heads = ["shape", *map(label, names), "best", *["ASM/other"] * lead, *["roof"] * roofs]
    right = [h for h in heads if h not in ("shape", "best")]
    page.table(heads, rows, "shape", right=right, most=most or len(rows), more="--rows 0 shows all")


def _has_lead(of: Mapping[str, Any]) -> bool:
    return any(LEAD in (p["first"], p["second"]) for p in of["summary"]["pairs"])


def _wrong(of: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """The rows beyond the error ratio, by shape, the largest errors first."""
    for r in of["rows"]:
        least = r["backends"][r["best"]]["us"] if r["best"] else float("inf")
        wrong = r["beyond_err_ratio"]
        for w in sorted(wrong, key=lambda w: (-(1e300 if (e := w["err_ratio"]) is None else e), w["us"])):
            err = "(none)" if w["err_ratio"] is None else f"{w['err_ratio']:.4g}"
            faster = "faster than any valid row" if w["us"] < least else ""
            yield r["shape"], label(w["backend"]), w["kernel"] or "(no name)", err, f"{w['us']:.2f}", faster


def _here(r: Mapping[str, Any]) -> tuple[Cell, ...]:
    """The cells beside a published figure. A deviation of more than OFF is marked with a `!`."""
    if not (m := r["measured"]):
        return "", "not measured", ""
    deviation = f"{r['deviation']:+.1%}"
    return _number(m["tflops"]), label(m["backend"]), (f"{deviation} !", "bold red") if r["off"] else deviation


def _sentences(of: Mapping[str, Any]) -> Iterator[str]:
    """The sentences of the summary, in the order of interest; only what there is to say."""
    rows, summary, left_out = of["rows"], of["summary"], of["left_out"]
    if won := [f"{label(b)} on {n:,}" for b, n in sorted(summary["wins"].items(), key=lambda kv: -kv[1]) if n]:
        yield f"fastest: {', '.join(won)} of {plural(len(rows), 'shape')}"
    if _has_lead(of):
        worst = sorted((x, r["shape"], r["best"]) for r in rows if (x := r["asm_over_best_other"]) and x < 1)
        named = [f"{shape} ({_ratio(x)} of {label(best)})" for x, shape, best in worst]
        yield f"ASM loses on {len(worst):,}: {and_more(named, MOST_NAMED)}" if worst else "ASM loses nowhere"
    if beyond := summary["beyond_err_ratio"]:
        text = plural(left_out["error_ratio"], "row") + f" of {plural(len(beyond), 'shape')}"
        faster = [r["shape"] for r in rows if r["wrong_was_faster"]]
        more = f", faster than any valid row on {and_more(faster, MOST_NAMED)}" if faster else ""
        yield f"error ratio: {text} above {of['err_ratio']:g}{more}: listed below"
    elif any("M" in r["key"] for r in rows):
        yield f"error ratio: no row above {of['err_ratio']:g}"
    yield f"no backend: {and_more(summary['no_backend'], MOST_NAMED) or 'none, every shape has a valid row'}"
    left = [f"{left_out[reason]:,} {words}" for reason, words in REASONS.items() if left_out[reason]]
    yield f"left out: {'; '.join(left) or 'no row'}"
    for c in summary["roofline"]["chips"]:
        mine = [r for r in rows if (r["gfx"], r["cu_num"]) == (c["gfx"], c["cu_num"]) and r["roofline"] and r["best"]]
        if s := spread_of([r["roofline"]["share"] for r in mine]):
            peaks = ", ".join(f"{k} {c['peaks'][k]:,.0f}" for k in c["peaks"] if k in c["types"])
            reach = f"{percent(s['min'])} to {percent(s['max'])} (mean {percent(s['mean'])})"
            yield f"roofline: the fastest reach {reach}"
            yield f"  of {c['name']}: {peaks} TFLOPS dense, {c['bandwidth']:g} TB/s ({c['source']})"


def add_comparison(page: Page, of: Mapping[str, Any]) -> None:
    """Add the fields of the environment records that differ; the first rows, and all that regressed or could not be
    judged, which come first; the verdict, and the command that measures what could not be judged."""
    page.line(
        {0: "No regression", 1: "Regression", 4: "Not all could be judged"}[of["exit_code"]] + ": golden against tot"
    )
    differing = (d for d in of["environment"]["differences"] if d["kind"] in MEANS)
    fields = [(d["field"], d["golden"], d["tot"], MEANS[d["kind"]]) for d in differing]
    page.table(("environment", "golden", "tot", ""), fields, most=len(fields))
    rows, names = of["rows"], [n for n in HEADS if n in of["rows"][0]]
    heads, bad = [HEADS[n] for n in names], of["open"] + of["counts"]["regression"]
    cells = ((*r["key"].values(), *(_figure(n, r[n]) for n in names)) for r in rows)
    right, most = [h for h in heads if h != "verdict"], max(MOST_ROWS, bad)
    page.table([*rows[0]["key"], *heads], cells, right=right, most=most, more="all with --out or --json")
    page.line(*of["summary"])
    if of["open"]:
        bound = "" if of["rule_only"] else f" with --bound {AGAIN_BOUND:g}"
        way = f"Profile both sides again (rocprofv3 --kernel-trace), and compare the traces{bound}"
        if of["again"]:
            way = f"Measure again, in turn and seven times, and compare the new files{bound}:"
        page.line(f"{plural(of['open'], 'row')} could not be judged. {way}")
        if of["again"]:
            page.line(f"  {of['again']}")


def _figure(name: str, value: Any) -> Cell:
    if isinstance(value, str):
        return (value, _STYLES[value]) if value in _STYLES else value
    if value is None or name in ("change", "seen_from"):
        return percent(value, sign=True)
    return f"{value:.2g}" if name == "p" else f"{value:.2f}"
