"""Reads the records of the shim: which candidate of which shape began, how it ended, or that it was left out.

shim/sitecustomize.py appends a line of JSON for each step, from every process of AITER's pool:

    {"event": "begin", "key": ["gfx950", "256", "16", "512", "1024"], "candidate": ["3", "0", ""], "pid": 71, "t": 1.5}
    {"event": "end", "key": [...], "candidate": [...], "us": "12.5", "err": "0.0", "pid": 71, "t": 1.7}

`said` is AITER's output while the candidate ran, if it has no time. tracker.py reads the records as they come.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from worker.families import BACKENDS, Family, backend_of
from worker.protocol import Row
from worker.text import clean
from worker.tuners.aiter.blocked import CandidateId
from worker.tuners.aiter.rows import KernelNames, to_row
from worker.tuners.aiter.tables import Keys, ShapeKeys

READ_AT_ONCE = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class JournalStep:
    """One record of the shim."""

    event: str
    """`begin`, `end`, or for a candidate that is not measured `blocked` (it faulted before), `skipped` (not wanted)."""
    shape: int | None
    """Our id of the shape; None if the key is not one of ours."""
    candidate: CandidateId
    pid: int
    us: float = -1.0
    err: float = 1.0
    said: str = ""


class Journal:
    """The shim's records, read as they come."""

    def __init__(self, path: Path, columns: tuple[str, ...], shapes: Keys) -> None:
        self._path = path
        self._keys = ShapeKeys(columns, shapes)
        self._offset = 0
        self._rest = b""
        """The beginning of a line that is not complete yet."""
        self.open: dict[int, JournalStep] = {}
        """The candidate at work, by process."""
        self.ended: dict[int, list[JournalStep]] = {}
        """The candidates that ended or were left out, by shape."""

    def read(self) -> list[JournalStep]:
        """The steps since the last call."""
        try:
            with open(self._path, "rb") as f:
                f.seek(self._offset)
                data = f.read(READ_AT_ONCE)
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        steps = []
        for line in lines:
            step = self._parse(line)
            if step is not None:
                self._take(step)
                steps.append(step)
        return steps

    def _take(self, step: JournalStep) -> None:
        self.open.pop(step.pid, None)
        if step.event == "begin":
            self.open[step.pid] = step
        elif step.shape is not None:
            self.ended.setdefault(step.shape, []).append(step)

    def _parse(self, line: bytes) -> JournalStep | None:
        """The step of a record; None if the line is not a record."""
        try:
            raw = json.loads(line)
            candidate = CandidateId.parse(raw)
            return JournalStep(
                event=str(raw["event"]),
                shape=self._keys.of_values(candidate.key),
                candidate=candidate,
                pid=int(raw["pid"]),
                us=float(raw.get("us", -1)),
                err=float(raw.get("err", 1)),
                said=clean(str(raw.get("said", "")), 1000),
            )
        except (ValueError, KeyError, TypeError):
            return None


def step_row(family: Family, step: JournalStep, limit: float, names: KernelNames, detail: str = "") -> Row:
    """A candidate of the shim's records as a row.

    `names`: kernel names, because many records have none. `detail`: why the candidate was left out, if it was.
    """
    candidate = step.candidate
    numbers = candidate.numbers
    cells = {"us": repr(step.us), "errRatio": repr(step.err), "err": repr(step.err), "libtype": "", "kernelName": ""}
    for word in candidate.words:
        column = "libtype" if word in BACKENDS else "kernelName"
        if word not in ("None", candidate.stage) and not cells[column]:
            cells[column] = word
    if not family.two_stages:
        cells |= dict(zip(("kernelId", "splitK"), numbers, strict=False))
        if numbers and not cells["kernelName"]:
            libtype = cells["libtype"] or backend_of(family.name, cells)
            cells["kernelName"] = names.find(libtype, int(numbers[0]))
    row = to_row(family, cells, limit)
    if step.event != "end":
        row["status"] = "error"
        row["detail"] = detail or step.event
    return _stage_row(row, candidate.stage, numbers) if candidate.stage else row


def _stage_row(row: Row, stage: str, numbers: Sequence[str]) -> Row:
    """The row of one stage of fmoe. A stage's time is not the shape's time, so `us` is -1, as if it had not run."""
    number = "2" if stage == "stage2" else "1"
    columns: Row = {"kernelName1": "", f"kernelName{number}": row["kernelName"]}
    if numbers:
        columns["block_m"] = int(numbers[0])
    if row["us"] > 0:
        columns[f"us{number}"] = row["us"]
        columns[f"err{number}"] = f"{row.get('errRatio', 1.0):.1%}"
    if stage.startswith("stage"):
        columns["us"] = -1.0
    else:
        columns["run_1stage"] = 1
    return {**row, **columns}
