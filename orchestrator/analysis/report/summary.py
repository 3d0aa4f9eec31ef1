"""What was asked and what came of it, in three sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.analysis.report.earlier import Earlier
from orchestrator.analysis.report.measured import Winner
from orchestrator.analysis.report.origin import stamp
from orchestrator.analysis.report.values import geomean
from orchestrator.command_hints import command
from orchestrator.ledger.model import Counts
from orchestrator.planning import Range
from orchestrator.run.config import RunConfig
from orchestrator.run.view.status import GOING, left_words
from worker.text import plural


@dataclass(frozen=True, slots=True)
class Told:
    """What the sentences are made of. `name`: the run as it is named on a command line; `worked` "": no time yet."""

    config: RunConfig
    state: str
    counts: Counts
    nodes: int
    slots: int
    devices: Sequence[str]
    winners: Sequence[Winner]
    gains: Sequence[float]
    earlier: Earlier
    failures: Mapping[str, int]
    worked: str
    left: Range | None
    name: str
    unconfirmed: int = 0


def sentences(t: Told) -> list[str]:
    """What was asked; what came of it; what is next."""
    return [_asked(t), _came(t), _next(t)]


def _asked(t: Told) -> str:
    where = f"{plural(t.slots, 'slot')} on {plural(t.nodes, 'node')}" if t.nodes else "nodes that are not up yet"
    what = f" ({', '.join(t.devices)})" if t.devices else ""
    shapes = f"{plural(t.counts.total, 'shape')} of {t.config.family} {'was' if t.counts.total == 1 else 'were'}"
    return f"{shapes} asked for on {stamp(t.config.created)}, with the tuner {t.config.tuner} on {where}{what}."


def _came(t: Told) -> str:
    c = t.counts
    parts = [f"{c.tuned:,} tuned" + (f" ({t.unconfirmed:,} of them unconfirmed)" if t.unconfirmed else "")]
    parts += [f"{n:,} skipped because the table had them" for n in (c.skipped,) if n]
    parts += [f"{n:,} failed" for n in (c.failed,) if n]
    parts += [f"{n:,} in flight" for n in (c.running,) if n]
    parts += [f"{n:,} not begun" for n in (c.pending,) if n]
    if not t.worked:
        text = f"The run is {t.state}: "
    elif t.state in GOING:
        text = f"The run has been going for {t.worked}: "
    else:
        text = f"The run is {t.state} after {t.worked}: "
    text += ", ".join(parts)
    if t.winners:
        text += f"; winners run at {_rate(t.winners)}"
        if t.gains:
            text += f", {median(t.gains):.2f} times as fast as the middle candidate"
    return text + "."


def _rate(winners: Sequence[Winner]) -> str:
    rates = sorted(w.tflops for w in winners)
    if len(rates) == 1:
        return f"{digits(rates[0])} TFLOPS"
    return f"{digits(rates[0])} to {digits(rates[-1])} TFLOPS (median {digits(median(rates))})"


def digits(x: float) -> str:
    """Three digits, thousands apart."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def _next(t: Told) -> str:
    if t.state in GOING:
        if t.counts.tuned == 0:
            return "Nothing is tuned yet."
        return (
            f"What is left takes {left_words(t.left.low_s, t.left.mid_s, t.left.high_s)}." if t.left else "It goes on."
        )
    if t.state in ("interrupted", "cancelled") and t.counts.settled < t.counts.total:
        return f"What was measured is kept, and the rest goes on with: {command(f'resume {t.name}')}"
    if t.counts.failed:
        why = ", ".join(f"{reason} {n:,}" for reason, n in t.failures.items())
        return f"{plural(t.counts.failed, 'failure')} to look at ({why}): each is below, with what can be done."
    return _merged(t.earlier) if t.counts.tuned else "There was nothing to tune."


def _merged(e: Earlier) -> str:
    if not e.counts:
        return "Every shape is settled; tuned.csv is the table, and nothing was merged."
    done = ", ".join(f"{n:,} {action}" for action, n in e.counts.items())
    return f"Every shape is settled and merged into {e.source}: rows {done}."


def gain_over(winners: Mapping[int, Winner], old: Mapping[int, float]) -> dict[str, float | int | None]:
    """How much faster than the previous table: n, faster, slower, geomean of old over new."""
    ratios = [old[i] / w.us for i, w in winners.items() if i in old]
    return {
        "n": len(ratios),
        "faster": sum(r > 1.0 for r in ratios),
        "slower": sum(r < 1.0 for r in ratios),
        "geomean": geomean(ratios),
    }
