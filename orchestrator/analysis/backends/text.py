"""The summary in sentences and the cells of its tables: the same on a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.analysis.backends.gather import device_text
from orchestrator.analysis.backends.published import OFF, Reference
from orchestrator.analysis.backends.query import REASONS
from orchestrator.analysis.backends.statistics import LEAD, Pair, Statistics
from orchestrator.analysis.backends.table import BackendTable, ShapeBest
from orchestrator.shapes.sizes import element_type
from orchestrator.tables.backends import label
from worker.text import plural

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
    """What was read, in one sentence."""
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
        named = _named([f"{table.key_text(s)} ({ratio(s.ratio(LEAD))} of {_other(s)})" for s in worst])
        out.append(("ASM loses", f"on {len(worst):,}: {named}" if worst else "nowhere"))
    limit = f"{table.err_ratio:g}"
    if stats.beyond:
        faster = [table.key_text(s) for s in stats.beyond if s.wrong_was_faster]
        text = f"{plural(table.left_out['error_ratio'], 'row')} of {plural(len(stats.beyond), 'shape')} above {limit}"
        more = f", faster than any valid row on {_named(faster)}" if faster else ""
        out.append(("error ratio", f"{text}{more}: listed below"))
    elif table.family.m_column == "M":
        out.append(("error ratio", f"no row above {limit}"))
    out.append(
        ("no backend", _named([table.key_text(s) for s in stats.without]) or "none: every shape has a valid row")
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
    """How many were measured and how many of them are off."""
    there = [r for r in references if r.measured]
    off = [r for r in there if r.off]
    return (
        f"{len(there)} of {len(references)} published shapes were measured, {len(off)} of them deviate by more than"
        f" {OFF:.0%} (!)"
    )


def _other(shape: ShapeBest) -> str:
    other = shape.best_other(LEAD)
    return label(other.backend) if other else ""


def _named(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")
