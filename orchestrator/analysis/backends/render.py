"""An analysis for people: its sentences and tables, on a terminal as wide as it is, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.analysis.backends.best import device_text
from orchestrator.analysis.backends.query import REASONS
from orchestrator.analysis.backends.statistics import LEAD, OFF, Pair, Reference, Statistics, reference_source
from orchestrator.analysis.backends.table import BackendTable, ShapeBest
from orchestrator.shapes.model import element_type
from orchestrator.tables.backends import label
from worker.text import and_more, plural

MOST_NAMED = 8
PAIR_HEAD = ("backends", "shapes", "faster on", "min", "max", "mean", "geo. mean")
WRONG_HEAD = ("shape", "backend", "kernel", "errRatio", "us", "")
REFERENCE_HEAD = ("shape", "published", "measured", "backend", "deviation")


def number(tflops: float) -> str:
    """Four digits at most, as `5,913`, `86.9`, `0.78`."""
    return f"{tflops:,.0f}" if tflops >= 99.95 else f"{tflops:.1f}" if tflops >= 9.995 else f"{tflops:.2f}"


def ratio(value: float | None) -> str:
    """`1.17x`, or nothing."""
    return "" if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    """`57 %`, or nothing; one digit more below 10 %."""
    return "" if value is None else f"{value:.0%}".replace("%", " %") if value >= 0.0995 else f"{value * 100:.1f} %"


def headline(table: BackendTable, stats: Statistics) -> str:
    """The inputs of an analysis in one sentence."""
    on = ", ".join(
        device_text(d) + (f" ({chip.name})" if (chip := stats.chips[d]) else "")
        for d in table.devices
        if d != ("", None)
    )
    rows, files = sum(f.rows for f in table.inputs), len(table.inputs)
    return (
        f"{table.family.name}{f' on {on}' if on else ''}: {plural(len(table.shapes), 'shape')}, "
        f"{plural(len(table.backends), 'backend')}, from {table.title} ({plural(files, 'file')}, {plural(rows, 'row')})"
    )


def sentences(table: BackendTable, stats: Statistics) -> list[tuple[str, str]]:
    """(what, the sentence) of the summary, in the order of interest; only what there is to say."""
    out: list[tuple[str, str]] = []
    won = [f"{label(b)} on {n:,}" for b, n in sorted(stats.wins.items(), key=lambda kv: -kv[1]) if n]
    if won:
        out.append(("fastest", f"{', '.join(won)} of {plural(len(table.shapes), 'shape')}"))
    if any(LEAD in (p.first, p.second) for p in stats.pairs):
        worst = sorted(stats.lead_loses, key=lambda s: s.ratio(LEAD) or 0)
        named = and_more([f"{table.key_text(s)} ({ratio(s.ratio(LEAD))} of {_other(s)})" for s in worst], MOST_NAMED)
        out.append(("ASM loses", f"on {len(worst):,}: {named}" if worst else "nowhere"))
    limit = f"{table.err_ratio:g}"
    if stats.beyond:
        faster = [table.key_text(s) for s in stats.beyond if s.wrong_was_faster]
        text = f"{plural(table.left_out['error_ratio'], 'row')} of {plural(len(stats.beyond), 'shape')} above {limit}"
        more = f", faster than any valid row on {and_more(faster, MOST_NAMED)}" if faster else ""
        out.append(("error ratio", f"{text}{more}: listed below"))
    elif table.family.m_column == "M":
        out.append(("error ratio", f"no row above {limit}"))
    out.append(
        (
            "no backend",
            and_more([table.key_text(s) for s in stats.without], MOST_NAMED) or "none: every shape has a valid row",
        )
    )
    left = [f"{n:,} {REASONS[reason]}" for reason, n in table.left_out.items() if n]
    out.append(("left out", f"rows: {'; '.join(left)}" if left else "no row"))
    for device, chip in stats.chips.items():
        shares = [x for i, s in enumerate(table.shapes) if s.device == device and (x := stats.share(i, s)) is not None]
        if chip and shares:
            typed = element_type(table.family)
            used = {kind[0] for s in table.shapes if (kind := typed(s.key))}
            peaks = ", ".join(f"{k} {v:,.0f}" for k, v in chip.peaks.items() if k in used)
            mean = percent(sum(shares) / len(shares))
            out.append(
                ("roofline", f"the fastest reach {percent(min(shares))} to {percent(max(shares))} (mean {mean})")
            )
            out.append(("", f"of {chip.name}: {peaks} TFLOPS dense, {chip.bandwidth:g} TB/s ({chip.source})"))
    return out


def pair_cells(p: Pair) -> tuple[str, ...]:
    """A row under PAIR_HEAD."""
    return (
        f"{label(p.first)} over {label(p.second)}", f"{p.shapes:,}", f"{p.wins:,}",
        *(ratio(v) for v in (p.least, p.most, p.mean, p.geomean)),
    )  # fmt: skip


def wrong_cells(table: BackendTable, stats: Statistics) -> list[tuple[str, ...]]:
    """The rows beyond the error ratio under WRONG_HEAD, by shape, the largest errors first."""
    return [
        (
            table.key_text(s), label(w.backend), w.kernel or "(no name)", "(none)" if w.err is None else f"{w.err:.4g}",
            f"{w.us:.2f}", "faster than any valid row" if s.winner is None or w.us < s.winner.us else "",
        )
        for s in stats.beyond
        for w in sorted(s.wrong, key=lambda w: (-(w.err if w.err is not None else 1e300), w.us))
    ]  # fmt: skip


def reference_cells(r: Reference) -> tuple[str, ...]:
    """A row under REFERENCE_HEAD; what deviates by more than OFF is marked with a `!`."""
    shape = "x".join(map(str, r.key))
    if r.measured is None or r.deviation is None:
        return shape, number(r.tflops), "", "not measured", ""
    mark = " !" if r.off else ""
    return shape, number(r.tflops), number(r.measured.tflops), label(r.measured.backend), f"{r.deviation:+.1%}{mark}"


def reference_sentence(references: Sequence[Reference]) -> str:
    """Number of reference shapes measured, and of those that deviate."""
    there = [r for r in references if r.measured]
    off = [r for r in there if r.off]
    return (
        f"{len(there)} of {len(references)} published shapes were measured, {len(off)} of them deviate by more than"
        f" {OFF:.0%} (!)"
    )


def _other(shape: ShapeBest) -> str:
    other = shape.best_other(LEAD)
    return label(other.backend) if other else ""


WINNER = "bold green"
_MISSING = "-"
MOST_WRONG = 100
"""Rows beyond the error ratio that a terminal lists."""


class Grid:
    """The main table as text: a column a backend, then best, ratio and share of the roofline."""

    def __init__(self, table: BackendTable, stats: Statistics, shapes: Sequence[tuple[int, ShapeBest]]) -> None:
        self.table, self.shapes = table, shapes
        several = len(table.devices) > 1
        lead = any(LEAD in (p.first, p.second) for p in stats.pairs)
        self.heads = ["shape", *(label(b) for b in table.backends), "best"]
        self.optional = ["best"]
        if lead:
            self.heads.append("ASM/other")
            self.optional.append("ASM/other")
        if any(stats.roofs):
            self.heads.append("roof")
            self.optional.append("roof")
        self.rows: list[list[str]] = []
        for at, s in shapes:
            won = s.winner
            row = [table.key_text(s) + (f" {s.device[0] or '?'}/{s.device[1] or '?'}" if several else "")]
            row += [number(s.best[b].tflops) if b in s.best else _MISSING for b in table.backends]
            row.append(label(won.backend) if won else "none")
            if lead:
                row.append(ratio(s.ratio(LEAD)))
            if any(stats.roofs):
                row.append(percent(stats.share(at, s)))
            self.rows.append(row)

    def winner_at(self, number: int) -> int | None:
        """The column of the winner in row `number`."""
        won = self.shapes[number][1].winner
        return 1 + self.table.backends.index(won.backend) if won else None

    def columns_within(self, width: int) -> list[int] | None:
        """The columns that fit; None where not even the backends do. The last of the optional ones go first."""
        widths = [max(len(r[i]) for r in chain([self.heads], self.rows)) + 2 for i in range(len(self.heads))]
        kept = list(range(len(self.heads)))
        for name in ["", *reversed(self.optional)]:
            kept = [i for i in kept if self.heads[i] != name]
            if sum(widths[i] for i in kept) - 2 <= width:
                return kept
        return None


def show(
    console: Console,
    table: BackendTable,
    stats: Statistics,
    shapes: Sequence[tuple[int, ShapeBest]],
    references: Sequence[Reference] = (),
) -> None:
    """Print an analysis on a terminal. `shapes`: those to list, with their numbers in the table."""
    console.print(Text(headline(table, stats), style="bold"))
    console.print()
    grid = Grid(table, stats, shapes)
    kept = grid.columns_within(console.width)
    if kept is None:
        _stacked(console, grid)
        kept = []
    else:
        console.print(_rich(grid, kept))
    if len(shapes) < len(table.shapes):
        more = f"... and {plural(len(table.shapes) - len(shapes), 'more shape')} (--rows 0 shows all)"
        console.print(Text(more, style="dim"))
    other = "; ASM/other: ASM over the best other" if "ASM/other" in [grid.heads[i] for i in kept] else ""
    console.print(Text(f"TFLOPS (1e12 operations a second), bold: the fastest{other}", style="dim"))
    if stats.pairs:
        console.print()
        console.print(_plain(PAIR_HEAD, map(pair_cells, stats.pairs), left=(0,)))
    console.print()
    for what, sentence in sentences(table, stats):
        line = Text(sentence)
        head = Table.grid(padding=(0, 2))
        head.add_column(width=11, no_wrap=True, style="bold")
        head.add_column()
        head.add_row(Text(what), line)
        console.print(head)
    if wrong := wrong_cells(table, stats):
        console.print()
        console.print(_plain(WRONG_HEAD, iter(wrong[:MOST_WRONG]), left=(0, 1, 2, 5)))
        if len(wrong) > MOST_WRONG:
            console.print(Text(f"... and {len(wrong) - MOST_WRONG:,} more (all with --json)", style="dim"))
    if references:
        console.print()
        console.print(_plain(REFERENCE_HEAD, map(reference_cells, references), left=(0, 3)))
        console.print(Text(reference_sentence(references)))
        console.print(Text(reference_source(), style="dim"))


def _rich(grid: Grid, kept: Sequence[int]) -> Table:
    out = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for i in kept:
        out.add_column(grid.heads[i], justify="left" if grid.heads[i] in ("shape", "best") else "right", no_wrap=True)
    for n, row in enumerate(grid.rows):
        won = grid.winner_at(n)
        out.add_row(*(_cell(row[i], i == won) for i in kept))
    return out


def _cell(text: str, won: bool) -> Text:
    return Text(text, style=WINNER if won else "dim" if text in (_MISSING, "none") else "")


def _stacked(console: Console, grid: Grid) -> None:
    """A narrow terminal: the shape, below it its backends, as many a line as fit."""
    for n, row in enumerate(grid.rows):
        console.print(Text(row[0], style="bold"))
        won = grid.winner_at(n)
        parts = [
            Text(f"{label(name)} {row[i]}", style=WINNER if i == won else "")
            for i, name in enumerate(grid.table.backends, 1)
            if row[i] != _MISSING
        ]
        for line in _lines(parts or [Text("no backend", style="dim")], console.width - 2):
            console.print(Text("  ") + line, no_wrap=True)


def _lines(parts: Sequence[Text], width: int) -> Iterator[Text]:
    """The parts with two spaces between them, as many a line as fit."""
    line = Text()
    for part in parts:
        if line and len(line) + 2 + len(part) > width:
            yield line
            line = Text()
        line.append("  " if line else "").append_text(part)
    yield line


def _plain(heads: Sequence[str], rows: Iterator[tuple[str, ...]], left: Sequence[int]) -> Table:
    out = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for i, head in enumerate(heads):
        out.add_column(head, justify="left" if i in left else "right", no_wrap=i > 0)
    for row in rows:
        out.add_row(*(Text(c, style="bold red" if c.endswith("!") else "") for c in row))
    return out


def markdown(
    table: BackendTable,
    stats: Statistics,
    shapes: Sequence[tuple[int, ShapeBest]],
    references: Sequence[Reference] = (),
) -> Iterator[str]:
    """The same as lines of Markdown."""
    grid = Grid(table, stats, shapes)
    yield from (f"**{_safe(headline(table, stats))}**", "")
    bold = [
        [f"**{_safe(c)}**" if i == grid.winner_at(n) else _safe(c) for i, c in enumerate(row)]
        for n, row in enumerate(grid.rows)
    ]
    yield from _table(grid.heads, bold, left=[i for i, h in enumerate(grid.heads) if h in ("shape", "best")])
    yield from ("", "TFLOPS (1e12 operations a second); bold: the fastest.")
    if stats.pairs:
        yield ""
        yield from _table(PAIR_HEAD, [list(pair_cells(p)) for p in stats.pairs], left=[0])
    yield ""
    for what, sentence in sentences(table, stats):
        yield f"- **{what}**: {_safe(sentence)}" if what else f"  {_safe(sentence)}"
    if wrong := wrong_cells(table, stats):
        yield ""
        yield from _table(WRONG_HEAD, [[_safe(c) for c in row] for row in wrong], left=[0, 1, 2, 5])
    if references:
        yield ""
        yield from _table(REFERENCE_HEAD, [list(reference_cells(r)) for r in references], left=[0, 3])
        yield from ("", f"{reference_sentence(references)}. {reference_source()}")
    notes = [*table.notes, *stats.notes]
    if notes:
        yield from ("", *(f"- note: {_safe(n)}" for n in notes))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'|'.join('---' if i in left else '---:' for i in range(len(heads)))}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _safe(text: str) -> str:
    for a, b in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("*", "\\*"), ("`", "\\`"), ("[", "\\[")):
        text = text.replace(a, b)
    return text
