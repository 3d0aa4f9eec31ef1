"""The sentences at the top of a page: what was asked for, how far it is, and what comes next."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median

from orchestrator.command_hints import command
from orchestrator.ledger.reader import Counts
from orchestrator.paths import RunConfig
from orchestrator.policy.model import SlotId
from orchestrator.report.measured import Winner
from orchestrator.report.origin import stamp
from orchestrator.report.previous_table import PreviousTable
from orchestrator.view.status import UNFINISHED
from worker.text import plural


def describe_request(
    config: RunConfig, total: int, slots: Collection[SlotId], devices: Sequence[str], *, bench: bool
) -> str:
    """Sentence on the request, and on where it was measured."""
    nodes = len({node for node, _ in slots})
    where = f"{plural(len(slots), 'slot')} on {plural(nodes, 'node')}" if nodes else "nodes that are not up yet"
    if devices:
        where += f" ({', '.join(devices)})"
    shapes = f"{plural(total, 'shape')} of {config.family} {'was' if total == 1 else 'were'}"
    tool = "for a bench" if bench else f"with the tuner {config.tuner}"
    return f"{shapes} requested on {stamp(config.created)}, {tool} on {where}."


def describe_outcome(
    state: str, counts: Counts, worked: str, winners: Collection[Winner], unconfirmed: int, *, bench: bool
) -> str:
    """Sentence on the progress of the run and the speed of its winners. `worked`: "" before it began."""
    parts = [f"{counts.tuned:,} {'measured' if bench else 'tuned'}"]
    if unconfirmed:
        parts[0] += f" ({unconfirmed:,} of them unconfirmed)"
    for n, words in (
        (counts.skipped, "skipped because the table had them"),
        (counts.failed, "failed"),
        (counts.running, "in flight"),
        (counts.pending, "not begun"),
    ):
        if n:
            parts.append(f"{n:,} {words}")
    text = f"{_describe_state(state, worked)}: {', '.join(parts)}"
    if winners:
        text += f"; {'the fastest backends' if bench else 'winners'} run at {_describe_rates(winners)}"
    gains = [winner.median_us / winner.us for winner in winners if winner.median_us]
    if gains and not bench:
        text += f", {median(gains):.2f} times as fast as the median candidate"
    return f"{text}."


def _describe_state(state: str, worked: str) -> str:
    if not worked:
        return f"The run is {state}"
    return f"The run has been going for {worked}" if state in UNFINISHED else f"The run is {state} after {worked}"


def _describe_rates(winners: Collection[Winner]) -> str:
    rates = sorted(winner.tflops for winner in winners)
    if len(rates) == 1:
        return f"{digits(rates[0])} TFLOPS"
    return f"{digits(rates[0])} to {digits(rates[-1])} TFLOPS (median {digits(median(rates))})"


def digits(x: float) -> str:
    """A number with three digits, and a separator for thousands."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def describe_next(
    state: str,
    counts: Counts,
    left: str,
    name: str,
    failures: Mapping[str, int],
    before: PreviousTable,
    *,
    bench: bool,
) -> str:
    """Sentence on what comes next, or what the user can do. `left`: the time that is left, "" if it is not known.
    `name`: the run's name on a command line. `failures`: shapes by reason."""
    if state in UNFINISHED and counts.tuned == 0:
        return "Nothing is measured yet." if bench else "Nothing is tuned yet."
    if state in UNFINISHED:
        return f"Time left: {left}." if left else "It goes on."
    if state in ("interrupted", "cancelled") and counts.settled < counts.total:
        return f"All results so far are kept. To measure the rest: {command(f'resume {name}')}"
    if counts.failed:
        reasons = ", ".join(f"{reason} {n:,}" for reason, n in failures.items())
        return f"{plural(counts.failed, 'failure')} to look at ({reasons}): each is listed below, with advice."
    if bench:
        return "Every shape is measured; bench.csv lists the backends side by side."
    if not counts.tuned:
        return "There was nothing to tune."
    if not before.counts:
        return "Every shape is settled; tuned.csv is the table, and nothing was merged."
    rows = ", ".join(f"{n:,} {action}" for action, n in before.counts.items())
    return f"Every shape is settled and merged into {before.source}: rows {rows}."
