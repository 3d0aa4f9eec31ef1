"""Signs of progress of AITER's tuners: the lines that they print, as events, and the shim's journal of candidates.

Lines of every date, read from base_tuner.py, mp_tuner.py, jit/core.py, jit/utils/file_baton.py and the scripts at the
tags from v0.1.5 on.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from worker.families import BACKENDS, Family, backend_of
from worker.protocol import Row
from worker.protocol.blocklist import CandidateId, is_number
from worker.text import clean

Kind = Literal[
    "tuned",  # key: the shape's winner was chosen
    "refused",  # key: no candidate can be used
    "batch",  # count: batches that are in the files
    "nothing",  # a batch had no result
    "candidate",  # a candidate could not run; text: its info and why
    "timeout",  # AITER gave a task up
    "fault",  # the GPU or a process of the pool died
    "mapping",  # a task ran on a process that the pool does not know: one died before
    "retry",  # a wrapper starts a tuner again that died
    "error",  # an exception ended all batches
    "chip",  # the family is not for this chip
    "jit_start",
    "jit_end",
    "jit_failed",
]

_PREFIX = re.compile(r"^\s*(?:\[aiter\]\s*|\[\d{4}-\d\d-\d\d[^\]]*\]\s*|(?:INFO|WARNING|ERROR)\s*[:\]]\s*)+")
_WRAPPED = re.compile(r"(?:np|numpy)\.\w+\(\s*('[^']*'|[^()]*)\s*\)")
_NAMED = re.compile(r"'?(\w+)'?\s*:\s*(?:'([^']*)'|([^,']+))")
_LINES: tuple[tuple[str, Kind], ...] = (
    (r"\[!\] Task \d+ timed out", "timeout"),
    (r"processed (?P<count>\d+) batches of", "batch"),
    (r"Tuning result for (?P<key>.+?) is (?:kernelId=|libtype=|\S)", "tuned"),
    (r"No kernel can be used for (?P<key>.+)", "refused"),
    (r"(?:error: )?no valid candidate found for (?P<key>\(.+?\)|.+?), please check", "refused"),
    (r"(?P<key>\(.+?\)) >>> Fastest Solution is", "tuned"),
    (r"Memory access fault by GPU|\[GPU Fault\]|Fatal Python error|HSA_STATUS_ERROR|GPU coredump", "fault"),
    (r"\[Mapping Error\]", "mapping"),
    (r"tune result is none or all shape is tuned", "nothing"),
    (r"tuning is not supported in this chip|is not supported on gfx\w+$", "chip"),
    (r"run gpu func (?:warning|error):", "candidate"),
    (r"failed jit build \[|failed !!!!!!", "jit_failed"),
    (r"start build \[", "jit_start"),
    (r"finish build \[", "jit_end"),
    (r"error in batch \d+", "error"),
    (r"!Process killed by signal|Error when run GemmTuner process exitcode|Process creation failed", "retry"),
)
"""A line's pattern, with groups that LineEvent has fields for, and its kind; the first that fits counts."""
_LINES_RE: tuple[tuple[re.Pattern[str], Kind], ...] = tuple((re.compile(p), k) for p, k in _LINES)


@dataclass(frozen=True, slots=True)
class LineEvent:
    """Event of one line. `key`: the shape's cells in the order printed, gfx and cu_num among them where printed."""

    kind: Kind
    text: str = ""
    count: int = -1
    key: tuple[str, ...] = ()
    named: bool = False
    """True if `key` is name=value texts (from a mapping) instead of values alone."""


def parse_line(line: str) -> LineEvent | None:
    """The event of one line, None for lines without meaning here."""
    text = clean(_PREFIX.sub("", clean(line, 4000)), 1000)
    if not text:
        return None
    for pattern, kind in _LINES_RE:
        if m := pattern.search(text):
            found = m.groupdict()
            named, key = key_cells(found["key"]) if "key" in found else (False, ())
            return LineEvent(kind, text, int(found.get("count") or -1), key, named)
    return None


def key_cells(text: str) -> tuple[bool, tuple[str, ...]]:
    """(named, cells) of a key as AITER prints it: the body of a mapping, `M:1, N:2`, or a tuple."""
    plain = _WRAPPED.sub(r"\1", text).strip()
    if not plain.startswith("("):
        found = [f"{m[1]}={(m[2] if m[2] is not None else m[3]).strip()}" for m in _NAMED.finditer(plain)]
        if found:
            return True, tuple(found)
    while plain.startswith("(("):  # an info: the key is its first element
        plain = plain[1:]
    inner = plain[1:].split(")", 1)[0] if plain.startswith("(") else plain
    return False, tuple(part.strip().strip("'\"") for part in inner.split(",") if part.strip())


class ShapeKeys:
    """Shapes by the whole numbers of their key columns, for keys as AITER prints them."""

    def __init__(self, columns: tuple[str, ...], keys: Mapping[int, Mapping[str, int | str]]) -> None:
        self._cells = {i: {c: _cell(k[c]) for c in columns if c in k} for i, k in keys.items()}

    def find(self, key: tuple[str, ...], *, named: bool) -> int | None:
        """The id of the shape, None where it is none of ours or ambiguous."""
        if named:
            printed = dict(part.split("=", 1) for part in key)
            return self._only(
                i
                for i, ours in self._cells.items()
                if any(c in printed for c in ours)
                and all(_same(printed[c], v) for c, v in ours.items() if c in printed)
            )
        if not key:
            return None
        return self._only(i for i, ours in self._cells.items() if _ends_with(key, tuple(ours.values())))

    @staticmethod
    def _only(found: Iterable[int]) -> int | None:
        ids = list(found)
        return ids[0] if len(ids) == 1 else None


def _ends_with(key: tuple[str, ...], ours: tuple[str, ...]) -> bool:
    """True if `key` is `ours` behind gfx and cu_num, or without columns (of text) that are younger than the image."""
    sizes = sum(1 for _ in itertools.takewhile(str.isdigit, ours))
    for skip in (2, 1, 0):
        rest = key[skip:]
        if rest and len(rest) >= sizes and all(_same(a, b) for a, b in zip(rest, ours, strict=False)):
            return True
    return False


def _cell(value: int | str) -> str:
    return str(value).strip()


def _same(theirs: str, ours: str) -> bool:
    a, b = theirs.strip(), ours
    if a == b or a.lower() == b.lower():
        return True
    if a.endswith(".0") and a[:-2] == b:  # numbers that went through a table of floats
        return True
    # enums print in several ways (<QuantType.per_Token: 2>, QuantType.per_Token), and 1x128 stands for 128x128
    return not b.isdigit() and (b in a or (b.endswith("per_128x128") and "per_1x128" in a))


@dataclass(frozen=True, slots=True)
class JournalStep:
    """One line of the journal. `shape` is None where the key is none of ours."""

    event: str
    shape: int | None
    candidate: CandidateId
    pid: int
    us: float = -1.0
    err: float = 1.0


class CandidateJournal:
    """The journal of candidates, read as it grows."""

    def __init__(self, path: Path, columns: tuple[str, ...], shapes: dict[int, dict[str, int | str]]) -> None:
        self._path = path
        self._keys = ShapeKeys(columns, shapes)
        self._at = 0
        self._rest = b""
        self._open: dict[int, JournalStep] = {}
        self._new: list[JournalStep] = []
        self.ended: dict[int, list[JournalStep]] = {}

    def new(self) -> list[JournalStep]:
        """The steps since the last call."""
        self.read()
        steps, self._new = self._new, []
        return steps

    def read(self) -> None:
        """Read on in the file."""
        try:
            with open(self._path, "rb") as f:
                f.seek(self._at)
                data = f.read(4 * 1024 * 1024)
        except FileNotFoundError:
            return
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        steps = [s for s in (self._parse(line) for line in lines) if s is not None]
        for s in steps:
            if s.event == "begin":
                self._open[s.pid] = s
            else:
                self._open.pop(s.pid, None)
                if s.shape is not None:
                    self.ended.setdefault(s.shape, []).append(s)
        self._new += steps

    @property
    def open(self) -> list[JournalStep]:
        """The candidates that began and did not end, the last first."""
        return list(self._open.values())[::-1]

    def named_in(self, text: str) -> JournalStep | None:
        """The candidate that a line names by its info, the last of those that ended or are at work."""
        steps = [*(s for ended in self.ended.values() for s in ended), *self._open.values()]
        for step in steps[::-1]:
            shown = ", ".join(v if is_number(v) else repr(v) for v in step.candidate.ident[:3])
            if step.shape is not None and f"), {shown}" in text and step.candidate.key[-1] in text:
                return step
        return None

    def _parse(self, line: bytes) -> JournalStep | None:
        try:
            raw: Any = json.loads(line)
            candidate = CandidateId(tuple(map(str, raw["key"])), tuple(map(str, raw["candidate"])))
            us, err = float(raw.get("us", -1)), float(raw.get("err", 1))
            shape = self._keys.find(candidate.key, named=False)
            return JournalStep(str(raw["event"]), shape, candidate, int(raw["pid"]), us, err)
        except (ValueError, KeyError, TypeError):
            return None


class KernelNames:
    """Kernel names as tables have them, by backend and number: each backend of a family counts from 0."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], str] = {}

    def learn(self, row: Row) -> None:
        """Keep the name that a row of a table has."""
        if row["kernelName"] and "kernelId" in row:
            self._known[row.get("libtype", ""), row["kernelId"]] = row["kernelName"]

    def find(self, libtype: str, number: int) -> str:
        """The kernel's name; "" where it is not known, or where backends differ and it is not known whose it is."""
        if libtype:
            return self._known.get((libtype, number), "")
        found = {name for (_, known), name in self._known.items() if known == number}
        return found.pop() if len(found) == 1 else ""


def journal_row(family: Family, step: JournalStep, limit: float, names: KernelNames, detail: str = "") -> Row:
    """A candidate of the journal as a row; `names`: kernel names where the journal has none."""
    numbers = [int(v) for v in step.candidate.ident if is_number(v)]
    words = [v for v in step.candidate.ident if v and not is_number(v) and v not in ("True", "False", "None")]
    libtypes = [w for w in words if w in BACKENDS]
    kernels = [w for w in words if w not in BACKENDS and w != step.candidate.stage]
    row = Row(us=-1.0, kernelName=kernels[0] if kernels else "")
    if numbers and not family.two_stages:
        row["kernelId"] = numbers[0]
        if len(numbers) > 1:
            row["splitK"] = numbers[1]
    row["libtype"] = libtypes[0] if libtypes else backend_of(family.name, dict(row))
    if "kernelId" in row and not row["kernelName"]:
        row["kernelName"] = names.find(row["libtype"], row["kernelId"])
        row["libtype"] = row["libtype"] or backend_of(family.name, dict(row))
    if step.event != "end":
        row["status"], row["detail"] = "error", detail or step.event
    elif not math.isfinite(step.us) or step.us <= 0:
        row["status"] = "error" if math.isinf(step.us) else "unsupported"
    else:
        row["us"], row["errRatio"] = step.us, step.err
        row["status"] = "ok" if step.err <= limit else "wrong"
    if step.candidate.stage:
        _of_a_stage(row, step.candidate.stage, numbers)
    return row


def _of_a_stage(row: Row, stage: str, numbers: list[int]) -> None:
    """fmoe's own columns. The time of one stage is no time of the shape: `us` is -1, as where nothing was measured."""
    name, us = row["kernelName"], row["us"]
    if numbers:
        row["block_m"] = numbers[0]
    if stage == "stage2":
        row["kernelName1"], row["kernelName2"] = "", name
        if us > 0:
            row["us2"], row["err2"] = us, f"{row['errRatio']:.1%}"
    else:
        row["kernelName1"] = name
        if us > 0:
            row["us1"], row["err1"] = us, f"{row['errRatio']:.1%}"
    if stage.startswith("stage"):
        row["us"] = -1.0
    else:
        row["run_1stage"] = 1
