"""Makes the document of a report page from a run's ledger, and updates it during the run.

`page.py` draws the document as a file, `live.py` sends its changes to a browser. Its sections are made by the other
modules of this room and by `view/`; this one puts them together:

    {"run": "20261129-1", "state": "finished", "going": false, "made": "2026-11-29 10:00:00 UTC", "family": "a8w8",
     "sentences": ["32 shapes of a8w8 were requested on ...", ...], "counts": {"total": 32, "tuned": 30, ...},
     "columns": {"row": ["id", "key", "state", ...], ...}, "shapes": [[1, [16, 512, 128], "tuned", ...], ...],
     "backends": [{"name": "ck", "won": 17, ...}], "roof": {...}, "earlier": {"source": "tuned.csv", ...},
     "fleet": {...}, "failures": [...], "incidents": [...], "unconfirmed": [...], "noise": {...}, "gpus": [...], ...}
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from orchestrator.command_hints import program
from orchestrator.ledger.blocked import BlockedCandidate
from orchestrator.ledger.reader import LedgerReader, Replay, ShapeState, SlotInfo
from orchestrator.pages import Document
from orchestrator.paths import RunConfig, RunPaths, holder
from orchestrator.planning.estimate import Range
from orchestrator.policy.model import State
from orchestrator.report.figures import rounded
from orchestrator.report.measured import Measurements
from orchestrator.report.noise import compare_canaries, noise
from orchestrator.report.origin import describe_origin, stamp
from orchestrator.report.previous_table import PreviousTable, gain_over, read_previous_table
from orchestrator.report.shape_table import Roofs, by_backend, columns, shape_rows
from orchestrator.report.summary import describe_next, describe_outcome, describe_request
from orchestrator.results.export import describe_unpromised
from orchestrator.results.gain import noise_note
from orchestrator.view.formatting import describe_time_left, describe_uncounted_wait, describe_work_time
from orchestrator.view.header import RunHeader
from orchestrator.view.history import failures, incidents
from orchestrator.view.slot_speed import describe_flags
from orchestrator.view.status import UNFINISHED, awaited, sessions_until, state_now
from orchestrator.view.time_left import time_left
from orchestrator.view.timeline import attempts_by_slot, make_timeline
from worker.tuners.catalog import recorded_tuner

FORMAT = 1
MOST_FLAGS = 8
"""Most slots that we name because they stand out; the picture has all."""
MOST_DEVICES = 3
"""Most devices that are named in the first sentence."""


class Collector:
    """Collects the document of a run. `document` reads only new rows. Raises LedgerError, InputError."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.config = RunConfig.read(paths.config)
        self._is_bench = recorded_tuner(self.config.tuner).side_by_side
        self._measured: Measurements | None = None
        self._replay = Replay()
        self._table_before: tuple[object, PreviousTable] | None = None
        """(stamp of the merge's report, table)."""

    def stamp(self) -> tuple[object, ...]:
        """A cheap value that changes whenever the document would change."""
        with self._open() as ledger:
            newest = ledger.query("SELECT (SELECT max(id) FROM journal), (SELECT max(id) FROM rows)")[0]
            return (*newest, self._state(ledger), self._merge_stamp())

    def document(self) -> Document:
        """Everything that the page shows, as JSON values. Texts are as stored: the page makes them safe."""
        with self._open() as ledger, ledger.snapshot():
            if self._measured is None:
                self._measured = Measurements(ledger.family)
            self._measured.update(ledger)
            return self._make_document(ledger, self._measured)

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

    def _previous_table(self, ledger: LedgerReader) -> PreviousTable:
        merge_stamp = self._merge_stamp()
        if self._table_before is None or self._table_before[0] != merge_stamp:
            table = read_previous_table(self.paths, self.config.db, ledger.family)
            self._table_before = (merge_stamp, table)
        return self._table_before[1]

    def _make_document(self, ledger: LedgerReader, measured: Measurements) -> Document:
        config = self.config
        state = ledger.replayed
        run_state = self._state(ledger)
        is_going = run_state in UNFINISHED
        now = time.time()
        start = config.created if state.first_t is None else state.first_t
        end = now if is_going else float(ledger.meta("ended") or state.last_t or config.created)
        end = max(end, state.last_t or end)  # no event is later than the end
        header = RunHeader.of(ledger, config, {})
        before = self._previous_table(ledger)
        slots = ledger.slots()
        devices = [device for device in (slot.device or slot.info for slot in slots) if device]
        sessions = sessions_until(state, end)
        eta = time_left(state, header, now, driven=True) if is_going and state.nodes else None
        left = _describe_left(eta, state)
        unconfirmed = ledger.unconfirmed()
        counts = ledger.counts()
        bench = self._is_bench
        device_names = sorted({str(device["device"]) for device in devices if device.get("device")})[:MOST_DEVICES]
        winners = measured.winners.values()
        worked = describe_work_time(sessions)
        return {
            "format": FORMAT,
            "run": self.paths.run,
            "name": self.paths.named,
            "program": program(),
            "state": run_state,
            "going": is_going,
            "made": stamp(now),
            "family": ledger.family.name,
            "tuner": config.tuner,
            "sentences": [
                describe_request(config, counts.total, attempts_by_slot(state), device_names, bench=bench),
                describe_outcome(run_state, counts, worked, winners, len(unconfirmed), bench=bench),
                describe_next(run_state, counts, left, self.paths.named, ledger.failures(), before, bench=bench),
                *self._doubts(measured, header, slots, state, is_going=is_going),
            ],
            "counts": counts.to_json(),
            "eta_s": rounded(eta.mid_s if eta else None, 3),
            "worked_s": rounded(sum(until - begin for begin, until in sessions) if sessions else None, 6),
            "sessions": len(sessions),
            **_table_of_shapes(ledger, measured, before, devices),
            "fleet": make_timeline(state, header.named, start, end),
            "failures": failures(ledger, header.named, self.paths.named),
            "incidents": incidents(state, self.paths),
            "unconfirmed": [_unconfirmed_shape(shape, blocked, header) for shape, blocked in unconfirmed],
            "noise": noise(winners, state, ledger.reports()),
            "gpus": compare_canaries(state, start),
            "origin": describe_origin(ledger, slots, winners, config, self.paths),
        }

    def _doubts(
        self, measured: Measurements, header: RunHeader, slots: Sequence[SlotInfo], state: State, *, is_going: bool
    ) -> list[str]:
        """Sentences on what is doubtful: once the run has ended, an AITER that we do not know and noisy winners (of a
        bench, whose results are means, none is noisy); always, slots that stand out."""
        notes = []
        if not is_going:
            notes += describe_unpromised(slots)
        if not is_going and not self._is_bench:
            noisy = [header.named(shape) for shape, winner in measured.winners.items() if winner.noisy]
            if noisy:
                notes.append(noise_note(noisy, self.paths.named))
        notes += [f"compared with the other GPUs, {flag}" for flag in describe_flags(state)[:MOST_FLAGS]]
        return [f"{note[:1].upper()}{note[1:]}." for note in notes]


def _describe_left(eta: Range | None, state: State) -> str:
    """`about 2 min 05 s, not counting the wait for n1`; "" if the time left is not known."""
    if eta is None:
        return ""
    return describe_time_left(eta.low_s, eta.mid_s, eta.high_s) + describe_uncounted_wait(awaited(state))


def _table_of_shapes(
    ledger: LedgerReader, measured: Measurements, before: PreviousTable, devices: Sequence[Document]
) -> Document:
    """The table, the figures of the backends and the roofline that are drawn beside it, and the gain over the table
    before the run."""
    old_us = _old_times(ledger, measured, before)
    roofs = Roofs.of(ledger.family, devices)
    backends = by_backend(measured)
    gain = gain_over(measured.winners, old_us)
    return {
        "columns": columns(ledger.family, measured.keys),
        "shapes": shape_rows(ledger, measured, [backend["name"] for backend in backends], old_us, roofs),
        "backends": backends,
        "roof": roofs.document(measured.keys),
        "roof_note": roofs.note,
        "earlier": {
            "source": before.source,
            "note": before.note,
            "counts": before.counts,
            **{name: rounded(value) for name, value in gain.items()},
        },
    }


def _unconfirmed_shape(shape: ShapeState, blocked: Sequence[BlockedCandidate], header: RunHeader) -> Document:
    return {
        "id": shape.id,
        "shape": header.named(shape.id),
        "where": f"{shape.node} slot {shape.slot}",
        "detail": shape.detail,
        "withheld": [f"{candidate.name}: {candidate.outcome}" for candidate in blocked],
    }


def _old_times(ledger: LedgerReader, measured: Measurements, before: PreviousTable) -> dict[int, float]:
    """Microseconds in the previous table, by shape, on the chip of the shape's winner."""
    times = {}
    for shape, winner in measured.winners.items():
        key = (*ledger.family.chip(winner.gfx, winner.cu_num or 0), *measured.keys[shape])
        if key in before.us:
            times[shape] = before.us[key]
    return times
