"""Shows the documents of `analyze` and `compare` to people: adds tables and sentences to a page.

`add_analysis` shows what `analyze.py` made, `add_comparison` what `comparison.py` made. `cli/printer.py` prints the
page, or makes Markdown of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from orchestrator.backend_names import backend_label
from orchestrator.pages import ALL, Cell, Document, Page
from orchestrator.results.analyze import LEAD, MOST_DEVIATION, spread_of
from orchestrator.results.comparison import percent
from orchestrator.results.fastest_rows import device_text
from orchestrator.results.verdicts import AGAIN_BOUND
from worker.text import and_more, plural

_STYLES = {
    "regression": "bold red",
    "boundary": "yellow",
    "unstable": "magenta",
    "improved": "green",
    "ignored": "dim",
}
MOST_ROWS = 60
MEANS = {"machine": "another machine", "method": "measured differently", "other": "differs too", "test": "under test"}
HEADS = {
    "golden_us": "golden us",
    "tot_us": "tot us",
    "change": "change",
    "verdict": "verdict",
    "p": "p",
    "seen_from": "seen from",
    "golden_repeats": "golden runs",
    "tot_repeats": "tot runs",
}
"""The columns of a row's figures, by their names in the document."""
OUTCOMES = {0: "No regression", 1: "Regression", 4: "Not all could be judged"}
"""The headline of a comparison, by its exit code."""

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


def add_analysis(page: Page, analysis: Document, most: int) -> None:
    """Add an analysis to a page, with as many shapes as `most` says (0: all)."""
    page.line(_headline(analysis))
    _add_shapes(page, analysis, most)
    page.line("TFLOPS (1e12 operations a second); bold: the fastest; ASM/other: ASM over the best other")
    _add_pairs(page, analysis["summary"]["pairs"])
    page.line(*_sentences(analysis))
    heads = ("shape", "backend", "kernel", "errRatio", "us", "")
    page.table(heads, _wrong_rows(analysis["rows"]), right=("errRatio", "us"), most=MOST_WRONG, more=ALL)
    if "reference" in analysis:
        _add_reference(page, analysis["reference"])
    page.line(*(f"note: {note}" for note in analysis["notes"]))


def _headline(analysis: Document) -> str:
    """The inputs of an analysis in one sentence."""
    chips = []
    for chip in analysis["summary"]["roofline"]["chips"]:
        if chip["gfx"] or chip["cu_num"]:
            name = f" ({chip['name']})" if chip["name"] else ""
            chips.append(device_text(chip["gfx"], chip["cu_num"]) + name)
    devices = f" on {', '.join(chips)}" if chips else ""
    shapes = plural(len(analysis["rows"]), "shape")
    backends = plural(len(analysis["backends"]), "backend")
    files = plural(len(analysis["inputs"]), "file")
    rows = plural(sum(table["rows"] for table in analysis["inputs"]), "row")
    return f"{analysis['family']}{devices}: {shapes}, {backends}, from {analysis['title']} ({files}, {rows})"


def _add_shapes(page: Page, analysis: Document, most: int) -> None:
    """Add a row a shape, a column a backend; then the best, the ratio and the share of the roofline."""
    shapes = analysis["rows"]
    backends = analysis["backends"]
    has_lead = _has_lead(analysis)
    has_roof = any(shape["roofline"] for shape in shapes)
    has_chips = len(analysis["summary"]["roofline"]["chips"]) > 1
    figures = [backend_label(backend) for backend in backends]
    ratios = []
    if has_lead:
        ratios.append("ASM/other")
    if has_roof:
        ratios.append("roof")
    rows = []
    for shape in shapes:
        best = shape["best"]
        name = shape["shape"]
        if has_chips:
            name += f" {shape['gfx'] or '?'}/{shape['cu_num'] or '?'}"
        row: list[Cell] = [name]
        for backend in backends:
            measured = shape["backends"].get(backend)
            tflops = _number(measured["tflops"]) if measured else "-"
            row.append((tflops, "bold green") if backend == best else tflops)
        row.append(backend_label(best) if best else "none")
        if has_lead:
            row.append(_ratio(shape["asm_over_best_other"]))
        if has_roof:
            row.append(percent((shape["roofline"] or {}).get("share")))
        rows.append(row)
    heads = ["shape", *figures, "best", *ratios]
    page.table(heads, rows, "shape", right=figures + ratios, most=most or len(rows), more="--rows 0 shows all")


def _has_lead(analysis: Document) -> bool:
    return any(LEAD in (pair["first"], pair["second"]) for pair in analysis["summary"]["pairs"])


def _number(tflops: float) -> str:
    """Four digits at most, as `5,913`, `86.9`, `0.78`."""
    if tflops >= 99.95:
        return f"{tflops:,.0f}"
    return f"{tflops:.1f}" if tflops >= 9.995 else f"{tflops:.2f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _add_pairs(page: Page, pairs: Sequence[Document]) -> None:
    rows = []
    for pair in pairs:
        names = f"{backend_label(pair['first'])} over {backend_label(pair['second'])}"
        ratios = [_ratio(pair[name]) for name in ("least", "most", "mean", "geomean")]
        rows.append([names, f"{pair['shapes']:,}", f"{pair['wins']:,}", *ratios])
    heads = ("backends", "shapes", "faster on", "min", "max", "mean", "geo. mean")
    page.table(heads, rows, "pair", right=heads[1:], most=MOST_PAIRS, more=ALL)


def _wrong_rows(shapes: Sequence[Document]) -> Iterator[Sequence[str]]:
    """The rows beyond the error ratio, by shape, the largest errors first."""
    for shape in shapes:
        least = shape["backends"][shape["best"]]["us"] if shape["best"] else float("inf")
        for row in sorted(shape["beyond_err_ratio"], key=_by_error):
            error = "(none)" if row["err_ratio"] is None else f"{row['err_ratio']:.4g}"
            faster = "faster than any valid row" if row["us"] < least else ""
            yield (
                shape["shape"],
                backend_label(row["backend"]),
                row["kernel"] or "(no name)",
                error,
                f"{row['us']:.2f}",
                faster,
            )


def _by_error(row: Document) -> tuple[float, float]:
    """Sorts rows without an error ratio first, then the largest; of equals the fastest."""
    error = 1e300 if row["err_ratio"] is None else row["err_ratio"]
    return -error, row["us"]


def _add_reference(page: Page, reference: Document) -> None:
    """Add the published figures beside the measured ones. One that deviates by more than MOST_DEVIATION has a `!`."""
    rows: list[Sequence[Cell]] = []
    measured = 0
    deviating = 0
    for row in reference["rows"]:
        published = (f"{row['M']}x{row['N']}x{row['K']}", _number(row["tflops"]))
        figure = row["measured"]
        if not figure:
            rows.append((*published, "", "not measured", ""))
            continue
        measured += 1
        deviation: Cell = f"{row['deviation']:+.1%}"
        if row["off"]:
            deviating += 1
            deviation = (f"{deviation} !", "bold red")
        rows.append((*published, _number(figure["tflops"]), backend_label(figure["backend"]), deviation))
    heads = ("shape", "published", "measured", "backend", "deviation")
    page.table(heads, rows, right=("published", "measured", "deviation"), most=len(rows))
    page.line(
        f"{measured} of {len(rows)} published shapes were measured, {deviating} of them deviate by more than"
        f" {MOST_DEVIATION:.0%} (!)",
        reference["source"],
    )


def _sentences(analysis: Document) -> Iterator[str]:
    """The sentences of the summary, in the order of interest; only what there is to say."""
    rows = analysis["rows"]
    wins = sorted(analysis["summary"]["wins"].items(), key=lambda item: -item[1])
    won = [f"{backend_label(backend)} on {count:,}" for backend, count in wins if count]
    if won:
        yield f"fastest: {', '.join(won)} of {plural(len(rows), 'shape')}"
    if _has_lead(analysis):
        yield _lead_sentence(rows)
    yield from _error_sentences(analysis)
    unserved = and_more(analysis["summary"]["no_backend"], MOST_NAMED)
    yield f"no backend: {unserved or 'none, every shape has a valid row'}"
    left_out = analysis["left_out"]
    reasons = [f"{left_out[reason]:,} {words}" for reason, words in REASONS.items() if left_out[reason]]
    yield f"left out: {'; '.join(reasons) or 'no row'}"
    for chip in analysis["summary"]["roofline"]["chips"]:
        yield from _roofline_sentences(rows, chip)


def _lead_sentence(rows: Sequence[Document]) -> str:
    losses = [(row["asm_over_best_other"], row["shape"], row["best"]) for row in rows if row["asm_over_best_other"]]
    worst = sorted(loss for loss in losses if loss[0] < 1)
    if not worst:
        return "ASM loses nowhere"
    named = [f"{shape} ({_ratio(ratio)} of {backend_label(best)})" for ratio, shape, best in worst]
    return f"ASM loses on {len(worst):,}: {and_more(named, MOST_NAMED)}"


def _error_sentences(analysis: Document) -> Iterator[str]:
    rows = analysis["rows"]
    limit = f"above {analysis['err_ratio']:g}"
    beyond = analysis["summary"]["beyond_err_ratio"]
    if beyond:
        count = plural(analysis["left_out"]["error_ratio"], "row")
        faster = [row["shape"] for row in rows if row["wrong_was_faster"]]
        more = f", faster than any valid row on {and_more(faster, MOST_NAMED)}" if faster else ""
        yield f"error ratio: {count} of {plural(len(beyond), 'shape')} {limit}{more}: listed below"
    elif any("M" in row["key"] for row in rows):  # fmoe is not judged
        yield f"error ratio: no row {limit}"


def _roofline_sentences(rows: Sequence[Document], chip: Document) -> Iterator[str]:
    """The shares of a chip's roofline that its winners reach, and the peaks that it rests on."""
    shares = []
    for row in rows:
        is_here = (row["gfx"], row["cu_num"]) == (chip["gfx"], chip["cu_num"])
        if is_here and row["roofline"] and row["best"]:
            shares.append(row["roofline"]["share"])
    spread = spread_of(shares)
    if spread:
        peaks = ", ".join(f"{kind} {peak:,.0f}" for kind, peak in chip["peaks"].items() if kind in chip["types"])
        reach = f"{percent(spread['min'])} to {percent(spread['max'])} (mean {percent(spread['mean'])})"
        yield f"roofline: the fastest reach {reach}"
        yield f"  of {chip['name']}: {peaks} TFLOPS dense, {chip['bandwidth']:g} TB/s ({chip['source']})"


def add_comparison(page: Page, comparison: Document) -> None:
    """Add the fields of the environment records that differ; the first rows, and all that regressed or could not be
    judged, which come first; the verdict, and the command that measures what could not be judged."""
    page.line(f"{OUTCOMES[comparison['exit_code']]}: golden against tot")
    fields = []
    for difference in comparison["environment"]["differences"]:
        if difference["kind"] in MEANS:
            meaning = MEANS[difference["kind"]]
            fields.append((difference["field"], difference["golden"], difference["tot"], meaning))
    page.table(("environment", "golden", "tot", ""), fields, most=len(fields))
    rows = comparison["rows"]
    names = [name for name in HEADS if name in rows[0]]
    heads = [HEADS[name] for name in names]
    cells = ([*row["key"].values(), *(_figure(name, row[name]) for name in names)] for row in rows)
    most = max(MOST_ROWS, comparison["open"] + comparison["counts"]["regression"])
    right = [head for head in heads if head != "verdict"]
    page.table([*rows[0]["key"], *heads], cells, right=right, most=most, more="all with --out or --json")
    page.line(*comparison["summary"])
    if comparison["open"]:
        _add_hint(page, comparison)


def _add_hint(page: Page, comparison: Document) -> None:
    """Say how to judge the rows that could not be judged."""
    again = comparison["again"]
    bound = "" if comparison["rule_only"] else f" with --bound {AGAIN_BOUND:g}"
    hint = f"Profile both sides again (rocprofv3 --kernel-trace), and compare the traces{bound}"
    if again:
        hint = f"Measure again, in turn and seven times, and compare the new files{bound}:"
    page.line(f"{plural(comparison['open'], 'row')} could not be judged. {hint}")
    if again:
        page.line(f"  {again}")


def _figure(name: str, value: Any) -> Cell:
    if isinstance(value, str):
        return (value, _STYLES[value]) if value in _STYLES else value
    if value is None or name in ("change", "seen_from"):
        return percent(value, sign=True)
    return f"{value:.2g}" if name == "p" else f"{value:.2f}"
