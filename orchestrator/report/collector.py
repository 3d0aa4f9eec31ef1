"""The document of a report page, made from a run's ledger and updated while the run goes on."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from orchestrator.command_hints import program
from orchestrator.ledger import LedgerReader, Replay
from orchestrator.paths import RunConfig, RunPaths, holder
from orchestrator.policy.model import State
from orchestrator.report.measured import Measurements, noise, rounded
from orchestrator.report.shapes import Roofs, by_backend, columns, shape_rows
from orchestrator.report.summary import (
    PreviousTable,
    RunSummary,
    gain_over,
    origin,
    previous_table,
    sentences,
    stamp,
)
from orchestrator.results.export import unpromised
from orchestrator.results.gain import noise_note
from orchestrator.view.slot_speeds import flags
from orchestrator.view.status import GOING, RunHeader, flag_words, sessions_until, state_now, time_left
from orchestrator.view.timeline import failures, incidents, lanes, timeline
from orchestrator.view.words import slot_words, worked_words
from worker.tuners.catalog import recorded_tuner

FORMAT = 1
MOST_FLAGS = 8
"""Slots that stand out are named up to here; the picture has all."""


class Collector:
    """Reader of a run. `document` reads only the rows that are new. Raises LedgerError, InputError."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.config = RunConfig.read(paths.config)
        self._measured: Measurements | None = None
        self._replay = Replay()
        self._earlier: tuple[object, PreviousTable] | None = None

    def stamp(self) -> tuple[object, ...]:
        """Changes whenever the document would; cheap."""
        with self._open() as ledger:
            return (
                *ledger.query("SELECT (SELECT max(id) FROM journal), (SELECT max(id) FROM rows)")[0],
                self._state(ledger), self._merge_stamp(),
            )  # fmt: skip

    def document(self) -> dict[str, Any]:
        """All that the page shows, as JSON values. Texts are as they were kept: the page makes them safe."""
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
        noisy = "" if bench else noise_note([named(i) for i, w in measured.winners.items() if w.noisy])
        notes = [] if going else [*unpromised(ledger), *([noisy] if noisy else [])]
        notes += [f"beside the other GPUs {words}" for words in flag_words(state)[:MOST_FLAGS]]
        backends = by_backend(measured)
        eta = time_left(state, about, now, driven=True) if going and state.nodes else None
        summary = RunSummary(
            config, word, counts, nodes=len({node for node, _ in by_slot}), slots=len(by_slot),
            devices=sorted({str(d["device"]) for d in devices if d.get("device")})[:3],
            winners=list(measured.winners.values()),
            gains=[w.median_us / w.us for w in measured.winners.values() if w.median_us],
            earlier=before, failures=ledger.failures(),
            worked=worked_words(sessions), left=eta, name=run,
            unconfirmed=len(unconfirmed),
        )  # fmt: skip
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
            "sentences": [*sentences(summary), *map(_sentence, notes)],
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
            "incidents": incidents(state),
            "unconfirmed": [
                {"id": u.id, "shape": named(u.id), "where": f"{u.node} slot {u.slot}", "detail": u.detail,
                 "withheld": [f"{w.name}: {w.outcome}" for w in left_out]}
                for u, left_out in unconfirmed
            ],
            "noise": noise(measured.winners.values(), state, ledger.reports()),
            "gpus": beside_each_other(state, start),
            "origin": origin(ledger, config, self.paths),
        }  # fmt: skip


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


MOST_POINTS = 4000
"""Timed canaries of the page; of each slot the latest."""


def beside_each_other(state: State, start: float) -> list[dict[str, Any]]:
    """A document a slot: name, flag, and points: seconds since `start`, compute and memory time over the median of the
    slots of its device (None where unknown)."""
    times = {s.id: s.timed for n in state.nodes.values() for s in n.slots.values() if s.timed}
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
