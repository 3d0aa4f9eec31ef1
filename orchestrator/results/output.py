"""The documents of `analyze` and `compare` for people: tables and sentences on a terminal as wide as it is, and as
Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from shlex import quote
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.command_hints import command
from orchestrator.results.analyze import LEAD, OFF, Row, device_text, spread_of
from orchestrator.results.compare import AGAIN_BOUND, OPEN
from orchestrator.results.comparison import percent
from orchestrator.tables.kinds import label
from orchestrator.tables.textfiles import escaped
from worker.text import and_more, plural

MISSING = "-"
_STYLES = {MISSING: "dim", "none": "dim", "regression": "bold red", "boundary": "yellow", "unstable": "magenta",
           "improved": "green", "ignored": "dim"}  # fmt: skip


class Grid(NamedTuple):
    """A table of texts. `left`: columns that are aligned left; `bold`: for each row the column that stands out."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[str]
    bold: Sequence[int | None] = ()


def on_terminal(grid: Grid, kept: Iterable[int] | None = None) -> Table:
    """A grid for a terminal, its columns `kept` or all. Only the first column is wrapped, and never cut."""
    out = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    kept = list(range(len(grid.heads)) if kept is None else kept)
    for i in kept:
        justify = "left" if grid.heads[i] in grid.left else "right"
        out.add_column(escaped(grid.heads[i]), justify=justify, no_wrap=i > 0, overflow="fold")  # type: ignore[arg-type]
    for n, row in enumerate(grid.rows):
        out.add_row(*(styled(row[i], bool(grid.bold) and i == grid.bold[n]) for i in kept))
    return out


def styled(text: str, bold: bool) -> Text:
    """A cell for a terminal, in the colour of what it says."""
    other = "bold green" if bold else "bold red" if text.endswith("!") else ""
    return Text(escaped(text), style=_STYLES.get(text, other))


def marked(grid: Grid) -> Iterator[str]:
    """A grid as lines of Markdown, after an empty line; nothing if it has no rows."""
    if grid.rows:
        yield from ("", f"| {' | '.join(map(safe, grid.heads))} |")
        yield f"|{'|'.join('---' if h in grid.left else '---:' for h in grid.heads)}|"
    for n, row in enumerate(grid.rows):
        at = grid.bold[n] if grid.bold else None
        yield f"| {' | '.join(f'**{safe(c)}**' if i == at else safe(c) for i, c in enumerate(row))} |"


def safe(text: str) -> str:
    """Text of a file as plain text in Markdown: neither markup, links, mentions nor HTML."""
    text = escaped(text).replace("&", "&amp;").replace("<", "&lt;").replace("@", "@&#8203;")
    return re.sub(r"([\\`*\[\]|])", r"\\\1", text)


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
"""Rows beyond the error ratio that a terminal lists."""
_OPTIONAL = ("roof", "ASM/other", "best")
"""Columns that a narrow terminal leaves out, the first one first."""


def show_analysis(console: Console, of: Mapping[str, Any], rows: Sequence[Row]) -> None:
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


def analysis_markdown(of: Mapping[str, Any]) -> Iterator[str]:
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


def environments(of: Mapping[str, Any]) -> Grid:
    """The fields of the environment records that differ, and what that means."""
    found = [d for d in of["environment"]["differences"] if d["kind"] in MEANS]
    rows = [(d["field"], d["golden"], d["tot"], MEANS[d["kind"]]) for d in found]
    return Grid(("environment", "golden", "tot", ""), rows, ("environment", "golden", "tot", ""))


def comparison_table(of: Mapping[str, Any]) -> Grid:
    """The first rows, and all that regressed or could not be judged."""
    told = [r for i, r in enumerate(of["rows"]) if i < MOST_ROWS or r["verdict"] in ("regression", *OPEN)]
    names = [n for n in HEADS if n in told[0]]
    cells = [(*r["key"].values(), *(_figure(n, r[n]) for n in names)) for r in told]
    keys = list(told[0]["key"])
    bold = [len(keys) + names.index("verdict") if r["verdict"] == "regression" else None for r in told]
    return Grid([*keys, *(HEADS[n] for n in names)], cells, ("kernel", "verdict"), bold)


def _figure(name: str, value: Any) -> str:
    if name in ("change", "seen_from"):
        return percent(value, sign=True)
    text = f"{value:.2g}" if name == "p" and value is not None else value
    return "" if text is None else text if isinstance(text, str) else f"{text:.2f}"


def comparison_sentences(of: Mapping[str, Any], listed: str) -> list[str]:
    """The verdict in sentences, and the command that measures what could not be judged; `listed`: see `--again`."""
    out = list(of["summary"])
    if left := len(of["rows"]) - len(comparison_table(of).rows):
        out.insert(0, f"... and {plural(left, 'more row')} (all with --out or --json)")
    if of["open"]:
        sides = " ".join(f"--{name} {quote(f)}" for name, files in of["files"].items() for f in files)
        again = of["again"].replace("again.csv", quote(listed or "again.csv"), 1)
        first = "" if listed else command(f"compare {sides} --again again.csv") + "; "
        bound = "" if of["rule_only"] else f" with --bound {AGAIN_BOUND:g}"
        out.append(f"{plural(of['open'], 'row')} could not be judged. Measure again, in turn and seven times, and"
                   f" compare the new files{bound}:")  # fmt: skip
        out.append(f"  {first}{again}")
    return out


def comparison_markdown(of: Mapping[str, Any]) -> Iterator[str]:
    """Lines of Markdown for a pull request."""
    head = {0: "No regression", 1: "Regression", 4: "Not all could be judged"}[of["exit_code"]]
    yield from (f"### {head}: golden against tot", "")
    yield from (f"- {safe(line.strip())}" for line in (*comparison_sentences(of, ""), *of["warnings"]))
    yield from marked(environments(of))
    yield from marked(comparison_table(of))
