"""The summary of a run: its outcome in three sentences, against the previous table, and the origin of its numbers."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from orchestrator import __version__
from orchestrator.command_hints import command
from orchestrator.errors import OrchestratorError
from orchestrator.ledger import LedgerReader
from orchestrator.ledger.model import Counts
from orchestrator.paths import RunConfig, RunPaths
from orchestrator.planning.estimate import Range
from orchestrator.report.measured import Winner, geomean
from orchestrator.results.export import measured_on
from orchestrator.tables.tuned import Key, read_table
from orchestrator.view.status import GOING
from orchestrator.view.words import left_words
from worker.families import Family
from worker.text import and_more, plural
from worker.tuners.catalog import recorded_tuner

MAX_BYTES = 64 << 20


@dataclass(slots=True)
class PreviousTable:
    """`us` by (gfx, cu_num, *key). `counts`: what the merge did, by action; {} before it."""

    source: str = ""
    us: dict[Key, float] = field(default_factory=dict)
    actions: dict[Key, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    note: str = ""


def previous_table(paths: RunPaths, db: str | None, family: Family) -> PreviousTable:
    """The table before this run. Never raises for the content of files: the note names the fault."""
    if paths.merge.is_file():
        try:
            return _of_merge(paths.merge, family)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            return PreviousTable(note=f"{paths.merge.name} cannot be read: {type(e).__name__}: {e}")
    if db is None:
        return PreviousTable(note="No tuned table was named (--db), so there is nothing to compare with.")
    table = Path(db)
    if not table.is_file():
        return PreviousTable(note=f"{db} is not there (yet), so there is nothing to compare with.")
    try:
        rows = read_table(table, family).rows
    except OrchestratorError as e:
        return PreviousTable(note=str(e).partition("\n")[0])
    return PreviousTable(db, {tuple(r.key): r.us for r in rows if r.us is not None and r.us > 0})


def _of_merge(path: Path, family: Family) -> PreviousTable:
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES} bytes")
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    out = PreviousTable(source=str(raw.get("path", "")))
    for row in raw["rows"]:
        key, old, action = _key(row["key"], family), row.get("old_us"), str(row["action"])
        out.counts[action] = out.counts.get(action, 0) + 1
        if key is None:
            continue
        out.actions[key] = action
        if isinstance(old, (int, float)) and not isinstance(old, bool) and old > 0:
            out.us[key] = float(old)
    return out


def _key(raw: Mapping[str, Any], family: Family) -> Key | None:
    names = ("gfx", "cu_num", *family.key_names)
    return tuple(raw[n] for n in names) if all(n in raw for n in names) else None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The facts of the sentences. `name`: the run's name on a command line; `worked` "": no time yet."""

    config: RunConfig
    state: str
    counts: Counts
    nodes: int
    slots: int
    devices: Sequence[str]
    winners: Sequence[Winner]
    gains: Sequence[float]
    earlier: PreviousTable
    failures: Mapping[str, int]
    worked: str
    left: Range | None
    name: str
    unconfirmed: int = 0

    @property
    def bench(self) -> bool:
        """True for backends side by side, which tune nothing."""
        return recorded_tuner(self.config.tuner).side_by_side


def sentences(t: RunSummary) -> list[str]:
    """Sentences: the request, the outcome, the next step."""
    return [_request(t), _outcome(t), _next(t)]


def _request(t: RunSummary) -> str:
    where = f"{plural(t.slots, 'slot')} on {plural(t.nodes, 'node')}" if t.nodes else "nodes that are not up yet"
    what = f" ({', '.join(t.devices)})" if t.devices else ""
    how = "for a bench" if t.bench else f"with the tuner {t.config.tuner}"
    shapes = f"{plural(t.counts.total, 'shape')} of {t.config.family} {'was' if t.counts.total == 1 else 'were'}"
    return f"{shapes} requested on {stamp(t.config.created)}, {how} on {where}{what}."


def _outcome(t: RunSummary) -> str:
    c = t.counts
    parts = [
        f"{c.tuned:,} {'measured' if t.bench else 'tuned'}"
        + (f" ({t.unconfirmed:,} of them unconfirmed)" if t.unconfirmed else "")
    ]
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
        text += f"; {'the fastest backends' if t.bench else 'winners'} run at {_rate(t.winners)}"
        if t.gains and not t.bench:
            text += f", {median(t.gains):.2f} times as fast as the median candidate"
    return text + "."


def _rate(winners: Sequence[Winner]) -> str:
    rates = sorted(w.tflops for w in winners)
    if len(rates) == 1:
        return f"{digits(rates[0])} TFLOPS"
    return f"{digits(rates[0])} to {digits(rates[-1])} TFLOPS (median {digits(median(rates))})"


def digits(x: float) -> str:
    """Three digits, thousands apart."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def _next(t: RunSummary) -> str:
    if t.state in GOING:
        if t.counts.tuned == 0:
            return "Nothing is measured yet." if t.bench else "Nothing is tuned yet."
        return (
            f"What is left takes {left_words(t.left.low_s, t.left.mid_s, t.left.high_s)}." if t.left else "It goes on."
        )
    if t.state in ("interrupted", "cancelled") and t.counts.settled < t.counts.total:
        return f"What was measured is kept, and the rest goes on with: {command(f'resume {t.name}')}"
    if t.counts.failed:
        why = ", ".join(f"{reason} {n:,}" for reason, n in t.failures.items())
        return f"{plural(t.counts.failed, 'failure')} to look at ({why}): each is below, with what can be done."
    if t.bench:
        return "Every shape is measured; bench.csv has its backends side by side."
    return _merged(t.earlier) if t.counts.tuned else "There was nothing to tune."


def _merged(e: PreviousTable) -> str:
    if not e.counts:
        return "Every shape is settled; tuned.csv is the table, and nothing was merged."
    done = ", ".join(f"{n:,} {action}" for action, n in e.counts.items())
    return f"Every shape is settled and merged into {e.source}: rows {done}."


def gain_over(winners: Mapping[int, Winner], old: Mapping[int, float]) -> dict[str, float | int | None]:
    """Gain over the previous table: n, faster, slower, geomean of old over new."""
    ratios = [old[i] / w.us for i, w in winners.items() if i in old]
    return {
        "n": len(ratios),
        "faster": sum(r > 1.0 for r in ratios),
        "slower": sum(r < 1.0 for r in ratios),
        "geomean": geomean(ratios),
    }


MOST_SLOTS = 64
Pairs = list[list[str]]


def origin(ledger: LedgerReader, config: RunConfig, paths: RunPaths) -> list[dict[str, Any]]:
    """Sections: title and pairs of text."""
    request: Pairs = [
        ["run", config.run],
        ["begun", stamp(config.created)],
        ["command", shlex.join(["gemmfleet", *map(str, config.argv)])],
        ["shapes", f"{config.shapes} (sha256 {config.shapes_sha256[:16]})"],
        ["inventory", config.inventory],
        ["family, tuner", f"{config.family}, {config.tuner}"],
        ["error limit", f"{config.err_ratio:g} of the elements"],
        ["tuned table", config.db or "none named"],
    ]
    request += [[f"option {name}", str(value)] for name, value in config.options.items()]
    code = sorted({str(s.info.get("code", "")) for s in ledger.slots()} - {""})
    made: Pairs = [
        ["gemmfleet", f"{config.version} tuned, {__version__} wrote this page"],
        ["worker's code", ", ".join(code) or "not known yet"],
        ["controller", str(ledger.meta("controller", ""))],
    ]
    on: Pairs = [[node, f"{n:,} winners on {gfx} with {cu_num} CUs"] for gfx, cu_num, node, n in measured_on(ledger)]
    spent: Pairs = [[kind, f"{seconds:,.1f} s"] for kind, seconds in sorted(ledger.spent().items())]
    files: Pairs = [[p.name, f"{p.stat().st_size:,} bytes"] for p in paths.results() if p.is_file()]
    sections = [
        ("Asked", request), ("Made with", made), ("Measured on", on), ("Devices", _devices(ledger)),
        ("Seconds of the workers", spent), ("Files of the run", files),
    ]  # fmt: skip
    return [{"title": title, "pairs": pairs} for title, pairs in sections if pairs]


def stamp(t: float) -> str:
    """A time of the controller's clock, with its zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(t))


def _devices(ledger: LedgerReader) -> Pairs:
    """Devices and software with their slots; slots with the same facts are one line."""
    places: dict[str, list[str]] = {}
    for slot in ledger.slots():
        facts = {**slot.info, **slot.device}
        words = [str(facts[k]) for k in ("device", "gfx") if facts.get(k)]
        words += [f"{k} {facts[k]}" for k in ("cu_num", "torch", "triton", "rocm", "hip", "aiter") if facts.get(k)]
        if slot.info.get("image"):
            words.append(f"image {slot.info['image']}")
        places.setdefault(", ".join(words) or "unknown", []).append(f"{slot.node}/{slot.slot}")
    return [[and_more(where, 4), what] for what, where in list(places.items())[:MOST_SLOTS]]
