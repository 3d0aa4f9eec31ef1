"""The document that a page shows, made from a run's ledger; again and again for a run that goes on."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

from orchestrator.analysis.report.course import Course
from orchestrator.analysis.report.earlier import Earlier, earlier
from orchestrator.analysis.report.failures import failures, incidents
from orchestrator.analysis.report.fleet import lanes
from orchestrator.analysis.report.measured import Measured
from orchestrator.analysis.report.noise import noise
from orchestrator.analysis.report.origin import origin, stamp
from orchestrator.analysis.report.roof import Roofs
from orchestrator.analysis.report.shapes import Named, by_backend, columns, shape_rows
from orchestrator.analysis.report.summary import GOING, Told, gain_over, sentences
from orchestrator.analysis.report.values import short
from orchestrator.dispatch.lock import holder
from orchestrator.ledger import LedgerReader
from orchestrator.paths import RunPaths
from orchestrator.runs import RunConfig

FORMAT = 1


class Collector:
    """Reads a run. What was read once is kept: `document` reads what came since. Raises LedgerError, InputError."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.config = RunConfig.read(paths.config)
        self._measured: Measured | None = None
        self._course = Course()
        self._journal = 0
        self._earlier: tuple[object, Earlier] | None = None

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
            measured = self._measured = self._measured or Measured(ledger.family, self.config.err_ratio)
            measured.update(ledger)
            self._read_journal(ledger)
            return self._made(ledger, measured)

    def _open(self) -> LedgerReader:
        return LedgerReader.open_readonly(self.paths.ledger, at_rest=not holder(self.paths.lock))

    def _state(self, ledger: LedgerReader) -> str:
        state = ledger.state
        if state in ("preparing", "running") and not holder(self.paths.lock):
            return "interrupted"  # its controller died without a word
        return state

    def _read_journal(self, ledger: LedgerReader) -> None:
        last = int(ledger.query("SELECT coalesce(max(id), 0) FROM journal")[0][0])
        if last > self._journal:
            for t, record in ledger.journal_records(self._journal):
                self._course.feed(t, record)
            self._journal = last

    def _merge_stamp(self) -> object:
        try:
            stat = self.paths.merge.stat()
        except OSError:
            return None
        return (stat.st_mtime_ns, stat.st_size)

    def _before(self, ledger: LedgerReader) -> Earlier:
        stamp_ = self._merge_stamp()
        if self._earlier is None or self._earlier[0] != stamp_:
            self._earlier = (stamp_, earlier(self.paths, self.config.db, ledger.family))
        return self._earlier[1]

    def _made(self, ledger: LedgerReader, measured: Measured) -> dict[str, Any]:
        course, config, state, now = self._course, self.config, self._state(ledger), time.time()
        going = state in GOING
        end = now if going else float(ledger.meta("ended") or course.last or config.created)
        end = max(end, course.last or end)
        before, named, run = self._before(ledger), Named(ledger.family, measured.keys), self.run_name()
        old = {
            i: before.us[key]
            for i, w in measured.winners.items()
            if (key := (w.gfx, w.cu_num or 0, *measured.keys[i])) in before.us
        }
        slots, counts = ledger.slots(), ledger.counts()
        devices = [s.device or s.info for s in slots]
        roofs = Roofs.of(ledger.family, [d for d in devices if d])
        backends = by_backend(measured)
        rate = ledger.rate(now) if going else None
        eta = (counts.pending + counts.running) / rate if rate else None
        told = Told(
            config, state, counts, nodes=len({node for node, _ in course.lanes}), slots=len(course.lanes),
            devices=sorted({str(d["device"]) for d in devices if d.get("device")})[:3],
            winners=list(measured.winners.values()),
            gains=[w.median_us / w.us for w in measured.winners.values() if w.median_us],
            earlier=before, failures=ledger.failures(),
            took_s=max(0.0, end - config.created) if course.first else None, eta_s=eta, name=run,
        )  # fmt: skip
        return {
            "format": FORMAT,
            "run": self.paths.run,
            "name": run,
            "state": state,
            "going": going,
            "made": stamp(now),
            "family": ledger.family.name,
            "tuner": config.tuner,
            "sentences": sentences(told),
            "counts": counts.to_json(),
            "eta_s": short(eta, 3),
            "columns": columns(ledger.family, measured.keys),
            "shapes": shape_rows(ledger, measured, [b["name"] for b in backends], old, roofs),
            "backends": backends,
            "roof": roofs.document(measured.keys),
            "roof_note": roofs.note,
            "earlier": {
                "source": before.source, "note": before.note, "counts": before.counts,
                **{k: short(v) for k, v in gain_over(measured.winners, old).items()},
            },
            "fleet": lanes(course, named, config.created if course.first is None else course.first, end),
            "failures": failures(ledger, course, named, run),
            "incidents": incidents(course),
            "noise": noise(measured.winners.values(), course, ledger.attempts()),
            "origin": origin(ledger, config, self.paths),
        }  # fmt: skip

    def run_name(self) -> str:
        """How the run is named on a command line."""
        folder = self.paths.root.parent
        return self.paths.run if folder == Path("runs") else f"{self.paths.run} --runs {shlex.quote(str(folder))}"
