"""Proves that AITER uses tuned rows and computes them correctly: runs it on a node's slots and reads its output.

A row needs two proofs. AITER's log says that the lookup took it (`AITER_LOG_TUNED_CONFIG`: `... found padded_M: .. is
tuned .. in FILE, kernel name is ..`). And the operator's own run was correct (`Shape | Kernel(us) | E2E(us) | Status`
of --run_config, with or without the second column; a `keys:` line after each shape since 2026-05). An AITER that lacks
--run_config gets the operator's run, and such lines, from worker/bench/verify.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from orchestrator import clean
from orchestrator.errors import OrchestratorError
from orchestrator.files.write import csv_text
from orchestrator.tables.keys import number_of
from orchestrator.tables.row_kernels import kernel_of
from worker.families import Family, backend_of

MARK = "GEMMFLEET-VERIFY "
Outcome = Literal["ok", "mismatch", "error", "not run"]

_HIT = re.compile(r"shape (?:is )?(?:B:(?P<B>\d+), ?)?M:(?P<M>\d+), ?N:(?P<N>\d+), ?K:(?P<K>\d+).{0,400}?\bis tuned\b")
_PADDED = re.compile(r"found padded_M: (\d+)")
_KERNEL = re.compile(r"kernel ?[nN]ame is (\S*?)(?:,| \(|!|$)")
_TYPE = re.compile(r"q_dtype_w:(torch\.\w+)")
_FMOE = re.compile(
    r"\[fused_moe\] using [12]stage.{0,20} \(kernelName1=(.{0,400}?), kernelName2=.{0,400}?\) for \(([^()]+)\)"
)
_RESULT = re.compile(
    r"\(?(?P<shape>[^|]{1,300}?)\)?\s*\|(?:\s*(?P<kernel>[\d.]+|N/A)\s*\|)?\s*(?P<us>[\d.]+|N/A)\s*\|\s*(?P<status>[A-Z]+)\s*$"
)
_STATUS: dict[str, Outcome] = {"OK": "ok", "MISMATCH": "mismatch", "UNSUPPORTED": "not run"}
_TYPED = re.compile(r"\b(dtype|otype|bias|scaleAB|bpreshuffle)='?(torch\.\w+|True|False)")
_COLUMN = {"otype": "outdtype"}
_NUMBER = re.compile(r"\d+")


@dataclass(slots=True)
class VerifiedRow:
    """A tuned row and its proofs. `us` is end to end as --run_config measures it, else the operator's device time."""

    key: dict[str, str]
    kernel: str
    tuned_us: float | None
    selected: bool = False
    verdict: Outcome = "not run"
    us: float | None = None
    why: str = ""

    @property
    def proven(self) -> bool:
        return self.selected and self.verdict == "ok"


@dataclass(slots=True)
class Verified:
    """One node's answer. `aiter`: the version that AITER reports. `why`: the reason why nothing could be run, "" if it
    could."""

    node: str
    rows: list[VerifiedRow]
    aiter: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    code: int | None = None
    last: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The answer in the document of `verify`."""
        names = ("kernel", "selected", "verdict", "us", "tuned_us", "why")
        rows = [{**r.key, **{n: getattr(r, n) for n in names}} for r in self.rows]
        return {"node": self.node, "why": self.why, "aiter": self.aiter, "code": self.code, "rows": rows}


class Reading:
    """Reads the lines of one node as they arrive."""

    def __init__(self, node: str, rows: Iterable[Mapping[str, str]], family: Family) -> None:
        self._family = family
        self.found = Verified(node, [
            VerifiedRow({n: r.get(n, "") for n in family.key_names}, kernel_of(r), number_of(r.get("us", "")))
            for r in rows
        ])  # fmt: skip
        self._by_numbers: dict[tuple[str, ...], list[VerifiedRow]] = {}
        for row in self.found.rows:
            numbers = tuple(row.key[c.name] for c in family.columns if c.kind == "int")
            self._by_numbers.setdefault(numbers, []).append(row)
        self._current: list[VerifiedRow] = []

    def line(self, line: str) -> None:
        """Read one clean line."""
        if line.startswith(MARK):
            self._marked(line.removeprefix(MARK))
            return
        self.found.last = [*self.found.last[-19:], line] if line else self.found.last
        if "is tuned" in line:
            self._hit(line)
        elif "[fused_moe]" in line:
            self._moe(line)
        elif "|" in line:
            self._result(line)
        elif line.startswith("reason: "):
            for row in self._current:
                row.why = line.removeprefix("reason: ")[:300]

    def _marked(self, text: str) -> None:
        """Read a line of the worker itself, not of AITER."""
        document: dict[str, Any] = {}
        with suppress(ValueError, RecursionError):
            document = clean.document(json.loads(text))
        if "code" in document:
            self.found.code = clean.integer(document["code"])
        elif document:
            self.found.aiter = document
            self.found.why = "" if document.get("supported") else str(document.get("why") or "this AITER cannot verify")

    def _hit(self, line: str) -> None:
        """Read a line on a lookup that took a row. The row must have the M, the kernel and the types of the line."""
        found, table = _HIT.search(line), str(self.found.aiter.get("table", ""))
        if found is None or (table and f" in {table}" not in line):
            return
        padded, kernel, kind = _PADDED.search(line), _KERNEL.search(line), _TYPE.search(line)
        sizes = (found["B"], padded[1] if padded else found["M"], found["N"], found["K"])
        types = {_COLUMN.get(name, name): value for name, value in _TYPED.findall(line)}
        types |= {"q_dtype_w": kind[1]} if kind else {}
        for row in self._by_numbers.get(tuple(x for x in sizes if x), ()):
            if kernel is None or kernel[1] in ("", row.kernel):  # hipBLASLt's are not named
                row.selected |= all(row.key.get(name, value) == value for name, value in types.items())

    def _moe(self, line: str) -> None:
        if found := _FMOE.search(line):
            numbers = _NUMBER.findall(found[2].split("Activation")[0])[-5:]
            for row in self.found.rows:
                same = numbers == [row.key[n] for n in self._family.key_names[:5]]
                row.selected |= same and row.kernel.split(" + ")[0] == found[1].strip("'")

    def _result(self, line: str) -> None:
        found = _RESULT.match(line)
        if found is None:
            return
        numbers = _NUMBER.findall(re.sub(r"torch\.\w+", "", found["shape"]))
        rows = self._by_numbers.get(tuple(numbers), [])
        if not rows:  # other text around the numbers: all numbers of a row must be there, in order
            rows = [r for n, some in self._by_numbers.items() if _within(n, numbers) for r in some]
        waiting = [r for r in rows if r.verdict == "not run"]
        types = [r for r in waiting if all(v in line for v in r.key.values() if v.startswith("torch."))]
        self._current = (types or waiting)[:1]
        for row in self._current:
            row.verdict, row.us = _STATUS.get(found["status"], "error"), number_of(found["us"])


def _within(wanted: Sequence[str], numbers: Sequence[str]) -> bool:
    rest = iter(numbers)
    return all(n in rest for n in wanted)


AT_ONCE = 5
"""Most slots of a node at a time: a connection has this many channels, beside those for cleaning up."""
_COMPILED = ("ck", "cktile", "opus")
Cells = Mapping[str, str]
Files = Callable[[tuple[str, ...]], Mapping[str, bytes]]
"""The files of a verification, given the slots."""


class Host(Protocol):
    """A node with a deployed folder that runs worker commands."""

    @property
    def slots(self) -> tuple[str, ...]:
        """The node's slots."""

    def run(self, words: Sequence[str], line: Callable[[str], None]) -> str:
        """Run a worker command to its end and return how it ended. `line` gets each line."""


def verify_on(
    deployed: Callable[[Files], AbstractContextManager[Host]],
    node: str,
    of: Family,
    rows: Sequence[Cells],
    say: Callable[[str], None],
) -> Verified:
    """The node's answer for all rows, even if it cannot verify. `deployed` deploys the files to the node. `say` gets
    each line that AITER prints, with its slot."""
    shares: dict[str, list[int]] = {}

    def files(slots: tuple[str, ...]) -> dict[str, bytes]:
        shares.update(zip(slots, shared(rows, of.name, len(slots)), strict=True))
        return {_file(slot): _table([rows[i] for i in mine]) for slot, mine in shares.items() if mine}

    def one(place: Host, slot: str) -> Verified:
        reading = Reading(node, [rows[i] for i in shares[slot]], of)

        def line(text: str) -> None:
            reading.line(text)
            say(f"{slot}: {text}")

        try:
            ended = place.run(["verify", _file(slot), "--family", of.name, "--slot", slot, "--until-eof"], line)
        except OrchestratorError as e:
            ended = e.reason
        if not reading.found.aiter and not reading.found.why:
            reading.found.why = f"the worker {ended}"
        return reading.found

    try:
        with deployed(files) as place:
            busy = [s for s in place.slots if shares[s]]
            with ThreadPoolExecutor(max_workers=max(1, min(AT_ONCE, len(busy)))) as pool:
                found = dict(zip(busy, pool.map(lambda s: one(place, s), busy), strict=True))
    except OrchestratorError as e:
        return Verified(node, Reading(node, rows, of).found.rows, why=e.reason)
    return _together(node, len(rows), shares, found)


def shared(rows: Sequence[Cells], family: str, slots: int) -> list[list[int]]:
    """The numbers of the rows for each slot. Rows with the same compiled kernel stay together, so that it is compiled
    once."""
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        compiled = backend_of(family, row) in _COMPILED
        groups.setdefault(row.get("kernelName", "") if compiled else f"\0{i}", []).append(i)
    out: list[list[int]] = [[] for _ in range(slots)]
    for group in sorted(groups.values(), key=lambda g: (-len(g), g)):
        min(out, key=len).extend(group)
    return [sorted(mine) for mine in out]


def _together(name: str, rows: int, shares: Mapping[str, Sequence[int]], found: Mapping[str, Verified]) -> Verified:
    """Join the answers of the slots. If a slot could not verify, its rows stay unproven, with its reason."""
    good = [v for v in found.values() if not v.why]
    first = (good or list(found.values()))[0]
    by_row = {}
    for slot, one in found.items():
        for i, row in zip(shares[slot], one.rows, strict=True):
            row.why = row.why or (f"slot {slot}: {one.why}" if one.why else "")
            by_row[i] = row
    failed = next((v for v in found.values() if v.code), first)
    why = "" if good else first.why
    return Verified(name, [by_row[i] for i in range(rows)], first.aiter, why, failed.code, failed.last)


def _file(slot: str) -> str:
    return f"verify-{slot}.csv"


def _table(rows: Sequence[Cells]) -> bytes:
    header = list(dict.fromkeys(name for row in rows for name in row))
    return csv_text(header, ([row.get(n, "") for n in header] for row in rows)).encode()
