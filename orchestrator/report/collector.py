"""Makes the document of a report page from a run's ledger, and updates it during the run."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from orchestrator import __version__
from orchestrator.command_hints import command, program
from orchestrator.errors import OrchestratorError
from orchestrator.ledger.reader import Counts, LedgerReader, Replay
from orchestrator.paths import RunConfig, RunPaths, holder
from orchestrator.policy.model import SlotId, State
from orchestrator.report.measured import (
    Measurements,
    Roofs,
    Winner,
    by_backend,
    columns,
    geomean,
    noise,
    rounded,
    shape_rows,
)
from orchestrator.results.export import measured_on, unpromised
from orchestrator.results.recheck import noise_note
from orchestrator.tables.tuned import Key, read_table
from orchestrator.view.status import GOING, RunHeader, awaited, flag_words, flags, sessions_until, state_now, time_left
from orchestrator.view.words import (
    failures,
    incidents,
    lanes,
    left_words,
    slot_words,
    timeline,
    wait_words,
    worked_words,
)
from worker.families import Family
from worker.text import and_more, plural
from worker.tuners.catalog import recorded_tuner

MAX_BYTES = 64 << 20


@dataclass(slots=True)
class PreviousTable:
    """The table before the run: `us` by (gfx, cu_num, *key). `counts`: rows of the merge by action; {} before it."""

    source: str = ""
    us: dict[Key, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    note: str = ""


def previous_table(paths: RunPaths, db: str | None, family: Family) -> PreviousTable:
    """The table before this run. Never raises for bad files: the note names the fault."""
    if paths.merge.is_file():
        try:
            return _of_merge(paths.merge, family)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            return PreviousTable(note=f"{paths.merge.name} cannot be read: {type(e).__name__}: {e}")
    if db is None:
        return PreviousTable(note="No tuned table was named (--db), so there is nothing to compare with.")
    table = Path(db)
    if not table.is_file():
        return PreviousTable(note=f"{db} does not exist (yet), so there is nothing to compare with.")
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
        if key is not None and isinstance(old, (int, float)) and not isinstance(old, bool) and old > 0:
            out.us[key] = float(old)
    return out


def _key(raw: Mapping[str, Any], family: Family) -> Key | None:
    names = ("gfx", "cu_num", *family.key_names)
    return tuple(raw[n] for n in names) if all(n in raw for n in names) else None


def _request(
    config: RunConfig, total: int, places: Collection[SlotId], devices: Sequence[str], *, bench: bool
) -> str:  # fmt: skip
    """Sentence on the request, and on where it was measured."""
    nodes = len({node for node, _ in places})
    where = f"{plural(len(places), 'slot')} on {plural(nodes, 'node')}" if nodes else "nodes that are not up yet"
    what = f" ({', '.join(devices)})" if devices else ""
    how = "for a bench" if bench else f"with the tuner {config.tuner}"
    shapes = f"{plural(total, 'shape')} of {config.family} {'was' if total == 1 else 'were'}"
    return f"{shapes} requested on {stamp(config.created)}, {how} on {where}{what}."


def _outcome(
    state: str, c: Counts, worked: str, winners: Collection[Winner], unconfirmed: int, *, bench: bool
) -> str:  # fmt: skip
    """Sentence on the progress of the run and the speed of its winners. `worked`: "" before it began."""
    parts = [
        f"{c.tuned:,} {'measured' if bench else 'tuned'}"
        + (f" ({unconfirmed:,} of them unconfirmed)" if unconfirmed else "")
    ]
    rest = (
        (c.skipped, "skipped because the table had them"), (c.failed, "failed"), (c.running, "in flight"),
        (c.pending, "not begun"),
    )  # fmt: skip
    parts += [f"{n:,} {words}" for n, words in rest if n]
    if state in GOING and worked:
        text = f"The run has been going for {worked}: "
    else:
        text = f"The run is {state}{f' after {worked}' if worked else ''}: "
    text += ", ".join(parts)
    if winners:
        text += f"; {'the fastest backends' if bench else 'winners'} run at {_rate(winners)}"
        gains = [w.median_us / w.us for w in winners if w.median_us]
        if gains and not bench:
            text += f", {median(gains):.2f} times as fast as the median candidate"
    return text + "."


def _rate(winners: Collection[Winner]) -> str:
    rates = sorted(w.tflops for w in winners)
    if len(rates) == 1:
        return f"{digits(rates[0])} TFLOPS"
    return f"{digits(rates[0])} to {digits(rates[-1])} TFLOPS (median {digits(median(rates))})"


def digits(x: float) -> str:
    """A number with three digits, and a separator for thousands."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def _next(
    state: str, c: Counts, left: str, name: str, failures: Mapping[str, int], e: PreviousTable, *, bench: bool
) -> str:
    """Sentence on what comes next, or what the user can do. `name`: the run's name on a command line."""
    if state in GOING:
        if c.tuned == 0:
            return "Nothing is measured yet." if bench else "Nothing is tuned yet."
        return f"Time left: {left}." if left else "It goes on."
    if state in ("interrupted", "cancelled") and c.settled < c.total:
        return f"All results so far are kept. To measure the rest: {command(f'resume {name}')}"
    if c.failed:
        why = ", ".join(f"{reason} {n:,}" for reason, n in failures.items())
        return f"{plural(c.failed, 'failure')} to look at ({why}): each is listed below, with advice."
    if bench:
        return "Every shape is measured; bench.csv lists the backends side by side."
    if not c.tuned:
        return "There was nothing to tune."
    if not e.counts:
        return "Every shape is settled; tuned.csv is the table, and nothing was merged."
    done = ", ".join(f"{n:,} {action}" for action, n in e.counts.items())
    return f"Every shape is settled and merged into {e.source}: rows {done}."


def gain_over(winners: Mapping[int, Winner], old: Mapping[int, float]) -> dict[str, float | int | None]:
    """The gain over the previous table: n, faster, slower, geomean of old over new."""
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
    """The sections on the origin of the data, each a title and pairs of text."""
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
    """Devices and software with their slots. Slots with the same facts share a line."""
    places: dict[str, list[str]] = {}
    for slot in ledger.slots():
        facts = {**slot.info, **slot.device}
        words = [str(facts[k]) for k in ("device", "gfx") if facts.get(k)]
        words += [f"{k} {facts[k]}" for k in ("cu_num", "torch", "triton", "rocm", "hip", "aiter") if facts.get(k)]
        if slot.info.get("image"):
            words.append(f"image {slot.info['image']}")
        places.setdefault(", ".join(words) or "unknown", []).append(f"{slot.node}/{slot.slot}")
    return [[and_more(where, 4), what] for what, where in list(places.items())[:MOST_SLOTS]]


FORMAT = 1
MOST_FLAGS = 8
"""Most slots that we name because they stand out; the picture has all."""


class Collector:
    """Collects the document of a run. `document` reads only new rows. Raises LedgerError, InputError."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.config = RunConfig.read(paths.config)
        self._measured: Measurements | None = None
        self._replay = Replay()
        self._earlier: tuple[object, PreviousTable] | None = None

    def stamp(self) -> tuple[object, ...]:
        """A cheap value that changes whenever the document would change."""
        with self._open() as ledger:
            return (
                *ledger.query("SELECT (SELECT max(id) FROM journal), (SELECT max(id) FROM rows)")[0],
                self._state(ledger), self._merge_stamp(),
            )  # fmt: skip

    def document(self) -> dict[str, Any]:
        """Everything that the page shows, as JSON values. Texts are as stored: the page makes them safe."""
        with self._open() as ledger, ledger.snapshot():
            measured = self._measured = self._measured or Measurements(ledger.family)
            measured.update(ledger)
            return self._made(ledger, measured)

    def _open(self) -> LedgerReader:
        at_rest = not holder(self.paths.lock)
        return LedgerReader.open_readonly(self.paths.ledger, at_rest=at_rest, replay=self._replay)

    def _state(self, ledger: LedgerReader) -> str:
        return state_now(ledger.state, driven=bool(holder(self.paths.lock)))

    def _merge_stamp(self) -> object:
        try:
            stat = self.paths.merge.stat()
        except OSError:
            return None
        return (stat.st_mtime_ns, stat.st_size)

    def _before(self, ledger: LedgerReader) -> PreviousTable:
        stamp_ = self._merge_stamp()
        if self._earlier is None or self._earlier[0] != stamp_:
            self._earlier = (stamp_, previous_table(self.paths, self.config.db, ledger.family))
        return self._earlier[1]

    def _made(self, ledger: LedgerReader, measured: Measurements) -> dict[str, Any]:
        config, word, now, state = self.config, self._state(ledger), time.time(), ledger.replayed
        going = word in GOING
        end = now if going else float(ledger.meta("ended") or state.last_t or config.created)
        end = max(end, state.last_t or end)
        start = config.created if state.first_t is None else state.first_t
        about = RunHeader.of(ledger, config, {})
        before, named, run = self._before(ledger), about.named, self.paths.named
        sessions, by_slot = sessions_until(state, end), lanes(state)
        old = {
            i: before.us[key]
            for i, w in measured.winners.items()
            if (key := (*ledger.family.chip(w.gfx, w.cu_num or 0), *measured.keys[i])) in before.us
        }
        slots, counts = ledger.slots(), ledger.counts()
        devices = [s.device or s.info for s in slots]
        roofs = Roofs.of(ledger.family, [d for d in devices if d])
        unconfirmed = ledger.unconfirmed()
        bench = recorded_tuner(config.tuner).side_by_side  # its result is the mean of its runs
        noisy = "" if bench else noise_note([named(i) for i, w in measured.winners.items() if w.noisy], run)
        notes = [] if going else [*unpromised(ledger), *([noisy] if noisy else [])]
        notes += [f"compared with the other GPUs, {words}" for words in flag_words(state)[:MOST_FLAGS]]
        backends = by_backend(measured)
        eta = time_left(state, about, now, driven=True) if going and state.nodes else None
        left = left_words(eta.low_s, eta.mid_s, eta.high_s) + wait_words(awaited(state)) if eta else ""
        winners = measured.winners.values()
        names = sorted({str(d["device"]) for d in devices if d.get("device")})[:3]
        sentences = [
            _request(config, counts.total, by_slot, names, bench=bench),
            _outcome(word, counts, worked_words(sessions), winners, len(unconfirmed), bench=bench),
            _next(word, counts, left, run, ledger.failures(), before, bench=bench),
        ]
        return {
            "format": FORMAT,
            "run": self.paths.run,
            "name": run,
            "program": program(),
            "state": word,
            "going": going,
            "made": stamp(now),
            "family": ledger.family.name,
            "tuner": config.tuner,
            "sentences": [*sentences, *(f"{words[:1].upper()}{words[1:]}." for words in notes)],
            "counts": counts.to_json(),
            "eta_s": rounded(eta.mid_s if eta else None, 3),
            "worked_s": rounded(sum(b - a for a, b in sessions) if sessions else None, 6),
            "sessions": len(sessions),
            "columns": columns(ledger.family, measured.keys),
            "shapes": shape_rows(ledger, measured, [b["name"] for b in backends], old, roofs),
            "backends": backends,
            "roof": roofs.document(measured.keys),
            "roof_note": roofs.note,
            "earlier": {
                "source": before.source, "note": before.note, "counts": before.counts,
                **{k: rounded(v) for k, v in gain_over(measured.winners, old).items()},
            },
            "fleet": timeline(state, named, start, end),
            "failures": failures(ledger, named, run),
            "incidents": incidents(state, self.paths),
            "unconfirmed": [
                {"id": u.id, "shape": named(u.id), "where": f"{u.node} slot {u.slot}", "detail": u.detail,
                 "withheld": [f"{w.name}: {w.outcome}" for w in left_out]}
                for u, left_out in unconfirmed
            ],
            "noise": noise(measured.winners.values(), state, ledger.reports()),
            "gpus": beside_each_other(state, start),
            "origin": origin(ledger, config, self.paths),
        }  # fmt: skip


MOST_POINTS = 4000
"""Most timed canaries on the page; the latest of each slot."""


def beside_each_other(state: State, start: float) -> list[dict[str, Any]]:
    """One document for each slot: name, flag and points. A point has seconds since `start`, and compute and memory time
    over the median of the slots of its device (None if unknown)."""
    times = {s.id: s.timed_canaries for n in state.nodes.values() for s in n.slots.values() if s.timed_canaries}
    standing_out = flags(state)
    each = max(1, MOST_POINTS // max(1, len(times)))
    usual: dict[tuple[str, str], float] = {}
    for name in ("compute_us", "memory_us"):
        by: dict[str, list[float]] = {}
        for seen in times.values():
            known = [v for _, r in seen if (v := getattr(r, name)) > 0]
            by.setdefault(seen[-1][1].device, []).extend([median(known)] if known else [])
        usual |= {(name, device): median(values) for device, values in by.items() if values}

    def over(r: Any, name: str) -> float | None:
        us, middle = getattr(r, name), usual.get((name, r.device))
        return rounded(us / middle, 4) if us > 0 and middle else None

    return [
        {
            "name": slot_words(state, *slot),
            "flag": standing_out.get(slot, ""),
            "points": [[rounded(t - start, 5), over(r, "compute_us"), over(r, "memory_us")] for t, r in seen[-each:]],
        }
        for slot, seen in sorted(times.items(), key=lambda s: (s[0][0], len(s[0][1]), s[0][1]))
    ]
