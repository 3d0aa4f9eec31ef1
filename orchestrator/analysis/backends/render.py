"""Prints an analysis for people: on a terminal as wide as it is, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.analysis.backends.statistics import LEAD, OFF, Reference, Statistics, reference_source
from orchestrator.analysis.backends.table import REASONS, BackendTable, ShapeBest, device_text
from orchestrator.analysis.grid import MISSING, Grid, marked, on_terminal, safe, styled
from orchestrator.shapes.model import element_type
from orchestrator.tables.backends import label
from worker.text import and_more, plural

MOST_NAMED = 8
MOST_WRONG = 100
"""Rows beyond the error ratio that a terminal lists."""
_OPTIONAL = ("roof", "ASM/other", "best")
"""Columns that a narrow terminal leaves out, the first one first."""


def show(
    console: Console,
    table: BackendTable,
    stats: Statistics,
    shapes: Sequence[tuple[int, ShapeBest]],
    references: Sequence[Reference] = (),
) -> None:
    """Prints an analysis on a terminal. `shapes`: those to list, with their numbers in the table."""
    console.print(Text(_headline(table, stats), style="bold"))
    console.print()
    main = _main(table, stats, shapes)
    kept = _columns_within(main, console.width)
    if kept:
        console.print(on_terminal(main, kept))
    else:
        _stacked(console, main, len(table.backends))
    if len(shapes) < len(table.shapes):
        more = f"... and {plural(len(table.shapes) - len(shapes), 'more shape')} (--rows 0 shows all)"
        console.print(Text(more, style="dim"))
    other = "; ASM/other: ASM over the best other" if "ASM/other" in [main.heads[i] for i in kept] else ""
    console.print(Text(f"TFLOPS (1e12 operations a second), bold: the fastest{other}", style="dim"))
    if stats.pairs:
        console.print()
        console.print(on_terminal(_pairs(stats)))
    console.print()
    for what, sentence in _sentences(table, stats):
        line = Table.grid(padding=(0, 2))
        line.add_column(width=11, no_wrap=True, style="bold")
        line.add_row(Text(what), Text(sentence))
        console.print(line)
    wrong = _wrong(table, stats)
    if wrong.rows:
        console.print()
        console.print(on_terminal(wrong._replace(rows=wrong.rows[:MOST_WRONG])))
    if len(wrong.rows) > MOST_WRONG:
        console.print(Text(f"... and {len(wrong.rows) - MOST_WRONG:,} more (all with --json)", style="dim"))
    if references:
        console.print()
        console.print(on_terminal(_references(references)))
        console.print(Text(_reference_sentence(references)))
        console.print(Text(reference_source(), style="dim"))


def markdown(
    table: BackendTable,
    stats: Statistics,
    shapes: Sequence[tuple[int, ShapeBest]],
    references: Sequence[Reference] = (),
) -> Iterator[str]:
    """The same as lines of Markdown."""
    yield f"**{safe(_headline(table, stats))}**"
    yield from marked(_main(table, stats, shapes))
    yield from ("", "TFLOPS (1e12 operations a second); bold: the fastest.")
    yield from marked(_pairs(stats))
    yield ""
    for what, sentence in _sentences(table, stats):
        yield f"- **{what}**: {safe(sentence)}" if what else f"  {safe(sentence)}"
    yield from marked(_wrong(table, stats))
    if references:
        yield from marked(_references(references))
        yield from ("", f"{_reference_sentence(references)}. {reference_source()}")
    if notes := [*table.notes, *stats.notes]:
        yield from ("", *(f"- note: {safe(n)}" for n in notes))


def _number(tflops: float) -> str:
    """Four digits at most, as `5,913`, `86.9`, `0.78`."""
    return f"{tflops:,.0f}" if tflops >= 99.95 else f"{tflops:.1f}" if tflops >= 9.995 else f"{tflops:.2f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    """`57 %`, or nothing; one digit more below 10 %."""
    return "" if value is None else f"{value * 100:.{0 if value >= 0.0995 else 1}f} %"


def _headline(table: BackendTable, stats: Statistics) -> str:
    """The inputs of an analysis in one sentence."""
    chips = {d: f" ({chip.name})" if chip else "" for d, chip in stats.chips.items() if d != ("", None)}
    on = f" on {', '.join(device_text(d) + name for d, name in chips.items())}" if chips else ""
    rows, files = sum(f.rows for f in table.inputs), len(table.inputs)
    return (
        f"{table.family.name}{on}: {plural(len(table.shapes), 'shape')}, {plural(len(table.backends), 'backend')},"
        f" from {table.title} ({plural(files, 'file')}, {plural(rows, 'row')})"
    )


def _main(table: BackendTable, stats: Statistics, shapes: Iterable[tuple[int, ShapeBest]]) -> Grid:
    """A row a shape, a column a backend; then the best, the ratio and the share of the roofline."""
    several, lead, roofs = len(table.devices) > 1, _has_lead(stats), any(stats.roofs)
    rows: list[list[str]] = []
    bold: list[int | None] = []
    for at, s in shapes:
        won = s.winner
        row = [table.key_text(s) + (f" {s.device[0] or '?'}/{s.device[1] or '?'}" if several else "")]
        row += [_number(s.best[b].tflops) if b in s.best else MISSING for b in table.backends]
        row += [label(won.backend) if won else "none"]
        row += [_ratio(s.ratio(LEAD))] * lead + [_percent(stats.share(at, s))] * roofs
        rows.append(row)
        bold.append(1 + table.backends.index(won.backend) if won else None)
    heads = ["shape", *map(label, table.backends), "best", *["ASM/other"] * lead, *["roof"] * roofs]
    return Grid(heads, rows, ("shape", "best"), bold)


def _has_lead(stats: Statistics) -> bool:
    return any(LEAD in (p.first, p.second) for p in stats.pairs)


def _pairs(stats: Statistics) -> Grid:
    rows = [
        (f"{label(p.first)} over {label(p.second)}", f"{p.shapes:,}", f"{p.wins:,}",
         *map(_ratio, (p.least, p.most, p.mean, p.geomean)))
        for p in stats.pairs
    ]  # fmt: skip
    return Grid(("backends", "shapes", "faster on", "min", "max", "mean", "geo. mean"), rows, ("backends",))


def _wrong(table: BackendTable, stats: Statistics) -> Grid:
    """The rows beyond the error ratio, by shape, the largest errors first."""
    rows = [
        (table.key_text(s), label(w.backend), w.kernel or "(no name)", "(none)" if w.err is None else f"{w.err:.4g}",
         f"{w.us:.2f}", "faster than any valid row" if s.winner is None or w.us < s.winner.us else "")
        for s in stats.beyond
        for w in sorted(s.wrong, key=lambda w: (-(w.err if w.err is not None else 1e300), w.us))
    ]  # fmt: skip
    return Grid(("shape", "backend", "kernel", "errRatio", "us", ""), rows, ("shape", "backend", "kernel", ""))


def _references(references: Sequence[Reference]) -> Grid:
    """Published figures beside those measured. What deviates by more than OFF is marked with a `!`."""
    rows = []
    for r in references:
        row = ("x".join(map(str, r.key)), _number(r.tflops), "", "not measured", "")
        if r.measured and r.deviation is not None:
            deviation = f"{r.deviation:+.1%}{' !' if r.off else ''}"
            row = (*row[:2], _number(r.measured.tflops), label(r.measured.backend), deviation)
        rows.append(row)
    return Grid(("shape", "published", "measured", "backend", "deviation"), rows, ("shape", "backend"))


def _reference_sentence(references: Sequence[Reference]) -> str:
    there, off = sum(r.measured is not None for r in references), sum(r.off for r in references)
    return (
        f"{there} of {len(references)} published shapes were measured, {off} of them deviate by more than {OFF:.0%} (!)"
    )


def _sentences(table: BackendTable, stats: Statistics) -> Iterator[tuple[str, str]]:
    """(what, the sentence) of the summary, in the order of interest; only what there is to say."""
    if won := [f"{label(b)} on {n:,}" for b, n in sorted(stats.wins.items(), key=lambda kv: -kv[1]) if n]:
        yield "fastest", f"{', '.join(won)} of {plural(len(table.shapes), 'shape')}"
    if _has_lead(stats):
        worst = sorted((s.ratio(LEAD) or 0, at) for at, s in enumerate(stats.lead_loses))
        named = [
            f"{table.key_text(s)} ({_ratio(of)} of {label(other.backend)})"
            for of, at in worst
            if (other := (s := stats.lead_loses[at]).best_other(LEAD))
        ]
        yield "ASM loses", f"on {len(worst):,}: {and_more(named, MOST_NAMED)}" if worst else "nowhere"
    if stats.beyond:
        text = plural(table.left_out["error_ratio"], "row") + f" of {plural(len(stats.beyond), 'shape')}"
        faster = [table.key_text(s) for s in stats.beyond if s.wrong_was_faster]
        more = f", faster than any valid row on {and_more(faster, MOST_NAMED)}" if faster else ""
        yield "error ratio", f"{text} above {table.err_ratio:g}{more}: listed below"
    elif table.family.m_column == "M":
        yield "error ratio", f"no row above {table.err_ratio:g}"
    without = and_more([table.key_text(s) for s in stats.without], MOST_NAMED)
    yield "no backend", without or "none: every shape has a valid row"
    left = [f"{n:,} {REASONS[reason]}" for reason, n in table.left_out.items() if n]
    yield "left out", f"rows: {'; '.join(left)}" if left else "no row"
    for device, chip in stats.chips.items():
        shares = [x for i, s in enumerate(table.shapes) if s.device == device and (x := stats.share(i, s)) is not None]
        if chip and shares:
            typed = element_type(table.family)
            used = {kind[0] for s in table.shapes if (kind := typed(s.key))}
            peaks = ", ".join(f"{k} {v:,.0f}" for k, v in chip.peaks.items() if k in used)
            reach = f"{_percent(min(shares))} to {_percent(max(shares))} (mean {_percent(sum(shares) / len(shares))})"
            yield "roofline", f"the fastest reach {reach}"
            yield "", f"of {chip.name}: {peaks} TFLOPS dense, {chip.bandwidth:g} TB/s ({chip.source})"


def _columns_within(grid: Grid, width: int) -> list[int]:
    """The columns that fit; none where not even the backends do."""
    widths = [max(map(len, column)) + 2 for column in zip(grid.heads, *grid.rows, strict=True)]
    kept = list(range(len(widths)))
    for name in ("", *_OPTIONAL):
        kept = [i for i in kept if grid.heads[i] != name]
        if sum(widths[i] for i in kept) - 2 <= width:
            return kept
    return []


def _stacked(console: Console, grid: Grid, backends: int) -> None:
    """A narrow terminal: the shape, below it its backends, as many a line as fit."""
    for row, won in zip(grid.rows, grid.bold, strict=True):
        console.print(Text(row[0], style="bold"))
        cells = range(1, backends + 1)
        parts = [styled(f"{grid.heads[i]} {row[i]}", i == won) for i in cells if row[i] != MISSING]
        line = Text()
        for part in parts or [Text("no backend", style="dim")]:
            if line and len(line) + 2 + len(part) > console.width:
                console.print(line, no_wrap=True)
                line = Text()
            line = line + Text("  ") + part
        console.print(line, no_wrap=True)
