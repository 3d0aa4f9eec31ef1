"""Text of `gemmfleet simulate`: numbers of a simulated run with a time line, or two settings side by side."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from orchestrator.cli.output.terminal import console, table
from orchestrator.status import duration
from worker.text import and_more, plural

if TYPE_CHECKING:
    from orchestrator.simulation.job import Job, Setting

WIDTH, MOST_LINES = 72, 40
SHADES = " .:=#"
"""Share of slots that work, from none to all."""


def show(job: Job, runs: Sequence[dict[str, Any]]) -> None:
    """Print the numbers of one setting (medians of its seeds), and the time line of the first seed."""
    first, over = runs[0], median(r["over_bound"] for r in runs)
    took = f" (the run itself took {duration(job.took_s)})" if job.took_s else ""
    slots = f"{plural(first['slots'], 'slot')} on {plural(first['nodes'], 'node')}"
    shapes = first["tuned"] + first["failed"] + first["pending"]
    print(f"{job.name}: {plural(shapes, 'shape')} in {plural(first['groups'], 'group')}, {slots}, simulated{_of(runs)}")
    print(f"makespan     {duration(_mid(runs, 'makespan_s'))}{took}")
    print(f"lower bound  {duration(_mid(runs, 'bound_s'))}; the makespan is {over:.2f} times that")
    print(f"idle         {_mid(runs, 'idle'):.1%} of the slots' time; set-up {_mid(runs, 'setup'):.1%}")
    print(f"repeated     {_mid(runs, 'repeated'):.1%}; {plural(first['again'], 'shape')} begun more than once")
    print(f"shapes       {first['tuned']} tuned, {first['failed']} failed" + _pending(first))
    if first["quarantined"]:
        names = [f"{node} slot {slot}" for node, slot in first["quarantined"]]
        print(f"quarantined  {and_more(names, 8)}")
    print("\ntime line: share of slots at work; x: most of it in vain")
    for label, bar in bars(first["timeline"]["lanes"], first["makespan_s"]):
        print(f"{label:24.24} |{bar}|")


def _of(runs: Sequence[dict[str, Any]]) -> str:
    return f", medians of {len(runs)} seeds" if len(runs) > 1 else ""


def _pending(run: dict[str, Any]) -> str:
    return f", {run['pending']} pending: {run['stuck'] or 'the time was up'}" if run["pending"] else ""


def _mid(runs: Sequence[dict[str, Any]], name: str) -> float:
    return float(median(r[name] for r in runs))


def show_compared(job: Job, settings: Sequence[Setting], found: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Print two settings side by side: medians over the seeds, and the change."""
    a, b = found
    print(f"{job.name}, simulated{_of(a)}")
    t = table("", "A", "B", "B / A", right=("A", "B", "B / A"))
    t.add_row("slots on nodes", *(f"{r[0]['slots']} on {r[0]['nodes']}" for r in found), "")
    t.add_row("without, batch", *(f"{', '.join(s.without) or '-'}, {s.batch or '-'}" for s in settings), "")
    for name, words in (("makespan_s", "makespan"), ("bound_s", "lower bound")):
        t.add_row(words, *(duration(_mid(r, name)) for r in found), f"{_mid(b, name) / max(_mid(a, name), 1e-9):.2f}")
    t.add_row("over the bound", *(f"{_mid(r, 'over_bound'):.2f}" for r in found), "")
    for name in ("idle", "setup", "repeated"):
        t.add_row(name, *(f"{_mid(r, name):.1%}" for r in found), "")
    for name in ("tuned", "failed", "pending"):
        t.add_row(name, *(f"{_mid(r, name):.0f}" for r in found), "")
    console().print(t)
    faster = sum(y["makespan_s"] < x["makespan_s"] for x, y in zip(a, b, strict=True))
    print(f"B is faster with {faster} of {plural(len(a), 'seed')}")


def bars(lanes: Sequence[Sequence[Any]], length: float) -> list[tuple[str, str]]:
    """(label, WIDTH characters) of each slot, or of as many slots together as leave MOST_LINES lines."""
    each = -(-len(lanes) // MOST_LINES) or 1
    scale = WIDTH / max(length, 1e-9)
    out = []
    for at in range(0, len(lanes), each):
        some = lanes[at : at + each]
        work, vain = [0.0] * WIDTH, [0.0] * WIDTH
        for start, end, kind, _, _, tuned, *_ in (segment for _, _, segments in some for segment in segments):
            low, high = start * scale, (length if end is None else end) * scale
            # of an attempt that ended badly, the last shape was in vain
            bad = low + (high - low) * tuned / (tuned + 1) if kind in ("fault", "lost", "cancelled") else high
            for i in range(int(low), min(WIDTH, int(high) + 1)):
                work[i] += max(0.0, min(high, i + 1) - max(low, i))
                vain[i] += max(0.0, min(high, i + 1) - max(bad, i))
        bar = ""
        for w, v in zip(work, vain, strict=True):
            bar += "x" if v > w / 2 else SHADES[round(min(1.0, w / len(some)) * (len(SHADES) - 1))]
        ends = some if each == 1 else (some[0], some[-1])
        out.append((" to ".join(f"{node} slot {slot}" for node, slot, _ in ends), bar))
    return out
