"""An analysis for people: on a terminal, as wide as it is, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.analysis.backends import text
from orchestrator.analysis.backends.published import Reference, source
from orchestrator.analysis.backends.statistics import LEAD, Statistics
from orchestrator.analysis.backends.table import BackendTable, ShapeBest
from orchestrator.tables.backends import label
from worker.text import plural

WINNER = "bold green"
_MISSING = "-"
MOST_WRONG = 100
"""Rows beyond the error ratio that a terminal lists."""


class Grid:
    """The main table as text: a column a backend, then what tells the winner apart."""

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
            row += [text.number(s.best[b].tflops) if b in s.best else _MISSING for b in table.backends]
            row.append(label(won.backend) if won else "none")
            if lead:
                row.append(text.ratio(s.ratio(LEAD)))
            if any(stats.roofs):
                row.append(text.percent(stats.share(at, s)))
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
    """Everything on a terminal. `shapes`: those to list, with their numbers in the table."""
    console.print(Text(text.headline(table, stats), style="bold"))
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
        console.print(_plain(text.PAIR_HEAD, map(text.pair_cells, stats.pairs), left=(0,)))
    console.print()
    for what, sentence in text.sentences(table, stats):
        line = Text(sentence)
        head = Table.grid(padding=(0, 2))
        head.add_column(width=11, no_wrap=True, style="bold")
        head.add_column()
        head.add_row(Text(what), line)
        console.print(head)
    if wrong := text.wrong_cells(table, stats):
        console.print()
        console.print(_plain(text.WRONG_HEAD, iter(wrong[:MOST_WRONG]), left=(0, 1, 2, 5)))
        if len(wrong) > MOST_WRONG:
            console.print(Text(f"... and {len(wrong) - MOST_WRONG:,} more (all with --json)", style="dim"))
    if references:
        console.print()
        console.print(_plain(text.REFERENCE_HEAD, map(text.reference_cells, references), left=(0, 3)))
        console.print(Text(text.reference_sentence(references)))
        console.print(Text(source(), style="dim"))


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
    yield from (f"**{_safe(text.headline(table, stats))}**", "")
    bold = [
        [f"**{_safe(c)}**" if i == grid.winner_at(n) else _safe(c) for i, c in enumerate(row)]
        for n, row in enumerate(grid.rows)
    ]
    yield from _table(grid.heads, bold, left=[i for i, h in enumerate(grid.heads) if h in ("shape", "best")])
    yield from ("", "TFLOPS (1e12 operations a second); bold: the fastest.")
    if stats.pairs:
        yield ""
        yield from _table(text.PAIR_HEAD, [list(text.pair_cells(p)) for p in stats.pairs], left=[0])
    yield ""
    for what, sentence in text.sentences(table, stats):
        yield f"- **{what}**: {_safe(sentence)}" if what else f"  {_safe(sentence)}"
    if wrong := text.wrong_cells(table, stats):
        yield ""
        yield from _table(text.WRONG_HEAD, [[_safe(c) for c in row] for row in wrong], left=[0, 1, 2, 5])
    if references:
        yield ""
        yield from _table(text.REFERENCE_HEAD, [list(text.reference_cells(r)) for r in references], left=[0, 3])
        yield from ("", f"{text.reference_sentence(references)}. {source()}")
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
