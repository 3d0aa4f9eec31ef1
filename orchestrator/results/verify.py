"""Proves that AITER uses tuned rows and computes them correctly: runs it on a node's slots and reads its output.

`gemmfleet verify` calls `verify_on` for a node. It deals the rows to the node's slots (`share_rows`), runs the worker
there, gives each line that a slot prints to a `VerifyReader`, and joins the answers of the slots.

A row needs two proofs. First, AITER's log (AITER_LOG_TUNED_CONFIG=1) must say that the lookup took it:

    shape is M:100, N:512, K:1024, found padded_M: 128, N:512, K:1024 is tuned on cu_num = 256 in FILE, kernel name is k

Second, the operator's own run must be correct. --run_config prints a line for each shape, since 2026-05 with a column
for the kernel alone and a `keys:` line; a line with `reason: ` may follow one that failed:

    (128, 512, 1024)     |       4.90 |       5.10 |       OK

An AITER that lacks --run_config gets the operator's run, and such lines, from worker/bench/verify.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from orchestrator import clean
from orchestrator.errors import OrchestratorError
from orchestrator.files.write import csv_text
from orchestrator.pages import Document
from orchestrator.tables.keys import number_of
from orchestrator.tables.row_kernels import kernel_of
from worker.families import Family, backend_of

MARK = "GEMMFLEET-VERIFY "
"""Begins a line of JSON of the worker itself: the AITER that it found, and at last its exit code."""
AT_ONCE = 5
"""Most slots of a node at a time: a connection has this many channels, beside those for cleaning up."""
MOST_LINES = 20
"""Last lines of a slot that are kept for its answer."""
_COMPILED = ("ck", "cktile", "opus")
"""Backends whose kernels AITER compiles when they are first called."""
Cells = Mapping[str, str]
"""A row of a tuned table, by column."""
Files = Callable[[tuple[str, ...]], Mapping[str, bytes]]
"""The files of a verification, given the slots."""
Outcome = Literal["ok", "mismatch", "error", "not run"]

# parts of AITER's line on a lookup: B is a batched family's, and without `found padded_M` the row has the M itself
_HIT = re.compile(r"shape (?:is )?(?:B:(?P<B>\d+), ?)?M:(?P<M>\d+), ?N:(?P<N>\d+), ?K:(?P<K>\d+).{0,400}?\bis tuned\b")
_PADDED = re.compile(r"found padded_M: (\d+)")
_KERNEL = re.compile(r"kernel ?[nN]ame is (\S*?)(?:,| \(|!|$)")
_TYPE = re.compile(r"q_dtype_w:(torch\.\w+)")
# [fused_moe] using 2stage (kernelName1='a', kernelName2='b') for ('gfx950', 256, 16, 7168, 256, 257, 9, 'Activation...)
_FMOE = re.compile(
    r"\[fused_moe\] using [12]stage.{0,20} \(kernelName1=(.{0,400}?), kernelName2=.{0,400}?\) for \(([^()]+)\)"
)
# a line of --run_config; `kernel` is the column for the kernel alone
_RESULT = re.compile(
    r"\(?(?P<shape>[^|]{1,300}?)\)?\s*\|(?:\s*(?P<kernel>[\d.]+|N/A)\s*\|)?\s*(?P<us>[\d.]+|N/A)\s*\|\s*(?P<status>[A-Z]+)\s*$"
)
_STATUS: dict[str, Outcome] = {"OK": "ok", "MISMATCH": "mismatch", "UNSUPPORTED": "not run"}
_TYPED = re.compile(r"\b(dtype|otype|bias|scaleAB|bpreshuffle)='?(torch\.\w+|True|False)")
_COLUMN = {"otype": "outdtype"}
_NUMBER = re.compile(r"\d+")


@dataclass(slots=True)
class VerifiedRow:
    """A tuned row and its proofs. `selected`: AITER's lookup took it. `verdict`: of the operator's run. `us`: its time
    end to end as --run_config measures it, else the operator's device time."""

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

    def to_json(self) -> Document:
        names = ("kernel", "selected", "verdict", "us", "tuned_us", "why")
        return self.key | {name: getattr(self, name) for name in names}


@dataclass(slots=True)
class Verified:
    """The answer of a node, or of one of its slots. `aiter`: what the worker says of the AITER that it found. `why`:
    the reason for which nothing could be run, "" if it could. `code`: the exit code of AITER's own check. `last`: the
    last lines that were printed."""

    node: str
    rows: list[VerifiedRow]
    aiter: Document = field(default_factory=dict)
    why: str = ""
    code: int | None = None
    last: list[str] = field(default_factory=list)

    def to_json(self) -> Document:
        """The answer in the document of `verify`."""
        rows = [row.to_json() for row in self.rows]
        return {"node": self.node, "why": self.why, "aiter": self.aiter, "code": self.code, "rows": rows}


class VerifyReader:
    """Reads the lines of one slot as they arrive. `answer`: the rows of that slot with their proofs so far."""

    def __init__(self, node: str, rows: Iterable[Cells], family: Family) -> None:
        self._family = family
        self.answer = Verified(node, [])
        self._by_numbers: dict[tuple[str, ...], list[VerifiedRow]] = {}
        """The rows by their sizes, as the numbers stand in AITER's lines."""
        sizes = [column.name for column in family.columns if column.kind == "int"]
        for cells in rows:
            key = {name: cells.get(name, "") for name in family.key_names}
            row = VerifiedRow(key, kernel_of(cells), number_of(cells.get("us", "")))
            self.answer.rows.append(row)
            self._by_numbers.setdefault(tuple(key[name] for name in sizes), []).append(row)
        self._current: list[VerifiedRow] = []
        """The row of the last line of results, to which a `reason: ` belongs."""

    def read_line(self, line: str) -> None:
        """Read one clean line."""
        if line.startswith(MARK):
            self._read_document(line.removeprefix(MARK))
            return
        if line:
            self.answer.last = [*self.answer.last, line][-MOST_LINES:]
        if "is tuned" in line:
            self._read_lookup(line)
        elif "[fused_moe]" in line:
            self._read_moe_lookup(line)
        elif "|" in line:
            self._read_result(line)
        elif line.startswith("reason: "):
            for row in self._current:
                row.why = line.removeprefix("reason: ")[:300]

    def _read_document(self, text: str) -> None:
        """Read a line of the worker itself, not of AITER."""
        document: Document = {}
        with suppress(ValueError, RecursionError):
            document = clean.document(json.loads(text))
        if "code" in document:
            self.answer.code = clean.integer(document["code"])
        elif document:
            self.answer.aiter = document
            self.answer.why = ""
            if not document.get("supported"):
                self.answer.why = str(document.get("why") or "this AITER cannot verify")

    def _read_lookup(self, line: str) -> None:
        """Read a line on a lookup that took a row. The row must have the M, the kernel and the types of the line."""
        hit = _HIT.search(line)
        table = str(self.answer.aiter.get("table", ""))
        if hit is None or (table and f" in {table}" not in line):
            return
        padded = _PADDED.search(line)
        m = padded[1] if padded else hit["M"]
        sizes = tuple(size for size in (hit["B"], m, hit["N"], hit["K"]) if size)
        types = {_COLUMN.get(name, name): value for name, value in _TYPED.findall(line)}
        kind = _TYPE.search(line)
        if kind:
            types["q_dtype_w"] = kind[1]
        kernel = _KERNEL.search(line)
        # several rows of a table may have these sizes and differ in their types
        for row in self._by_numbers.get(sizes, ()):
            if kernel and kernel[1] not in ("", row.kernel):  # hipBLASLt's are not named
                continue
            if all(row.key.get(name, value) == value for name, value in types.items()):
                row.selected = True

    def _read_moe_lookup(self, line: str) -> None:
        """Read a line on a mixture of experts that took a row. It names the first kernel and the five sizes."""
        hit = _FMOE.search(line)
        if hit is None:
            return
        kernel = hit[1].strip("'")
        numbers = _NUMBER.findall(hit[2].split("Activation")[0])[-5:]
        for row in self.answer.rows:
            sizes = [row.key[name] for name in self._family.key_names[:5]]
            if sizes == numbers and row.kernel.split(" + ")[0] == kernel:
                row.selected = True

    def _read_result(self, line: str) -> None:
        """Read a line of results. It belongs to the first row of its shape, and of its types, that has no result."""
        result = _RESULT.match(line)
        if result is None:
            return
        numbers = _NUMBER.findall(re.sub(r"torch\.\w+", "", result["shape"]))
        rows = self._by_numbers.get(tuple(numbers))
        if rows is None:  # other text around the numbers
            rows = []
            for sizes, same_sizes in self._by_numbers.items():
                if _is_within(sizes, numbers):
                    rows += same_sizes
        waiting = [row for row in rows if row.verdict == "not run"]
        typed = [row for row in waiting if all(text in line for text in _types_of(row))]
        self._current = (typed or waiting)[:1]
        for row in self._current:
            row.verdict = _STATUS.get(result["status"], "error")
            row.us = number_of(result["us"])


def _types_of(row: VerifiedRow) -> list[str]:
    return [value for value in row.key.values() if value.startswith("torch.")]


def _is_within(wanted: Sequence[str], numbers: Sequence[str]) -> bool:
    """Return whether all wanted numbers are there in this order."""
    rest = iter(numbers)
    return all(number in rest for number in wanted)


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
    family: Family,
    rows: Sequence[Cells],
    say: Callable[[str], None],
) -> Verified:
    """The node's answer for all rows, even if it cannot verify. `deployed`: deploys the files to the node for the time
    of a `with`; it calls `Files` with the slots, which are not known before. `say`: gets each line that AITER prints,
    with its slot."""
    verification = _NodeVerification(node, family, rows, say)
    try:
        with deployed(verification.deal_rows) as host:
            return verification.run(host)
    except OrchestratorError as e:
        return Verified(node, VerifyReader(node, rows, family).answer.rows, why=e.reason)


class _NodeVerification:
    """Verifies rows on one node: `deal_rows` when its slots are known, then `run` when the files are there."""

    def __init__(self, node: str, family: Family, rows: Sequence[Cells], say: Callable[[str], None]) -> None:
        self._node = node
        self._family = family
        self._rows = rows
        self._say = say
        self._shares: dict[str, list[int]] = {}
        """The numbers of the rows of each slot."""

    def deal_rows(self, slots: tuple[str, ...]) -> dict[str, bytes]:
        """Deal the rows to the slots, and return a table for each slot that got some, by its file's name."""
        shares = share_rows(self._rows, self._family.name, len(slots))
        self._shares = dict(zip(slots, shares, strict=True))
        return {_file(slot): _table(self._rows_of(slot)) for slot in slots if self._shares[slot]}

    def run(self, host: Host) -> Verified:
        """Run the worker on all slots that have rows, and join their answers."""
        busy = [slot for slot in host.slots if self._shares[slot]]
        with ThreadPoolExecutor(max_workers=max(1, min(AT_ONCE, len(busy)))) as pool:
            answers = list(pool.map(partial(self._verify_slot, host), busy))
        return _join_slots(self._node, len(self._rows), self._shares, dict(zip(busy, answers, strict=True)))

    def _rows_of(self, slot: str) -> list[Cells]:
        return [self._rows[i] for i in self._shares[slot]]

    def _verify_slot(self, host: Host, slot: str) -> Verified:
        reader = VerifyReader(self._node, self._rows_of(slot), self._family)

        def read_line(text: str) -> None:
            reader.read_line(text)
            self._say(f"{slot}: {text}")

        words = ["verify", _file(slot), "--family", self._family.name, "--slot", slot, "--until-eof"]
        try:
            end = host.run(words, read_line)
        except OrchestratorError as e:
            end = e.reason
        answer = reader.answer
        if not answer.aiter and not answer.why:
            answer.why = f"the worker {end}"
        return answer


def share_rows(rows: Sequence[Cells], family: str, slots: int) -> list[list[int]]:
    """The numbers of the rows for each slot. Rows with the same compiled kernel stay together, so that it is compiled
    once."""
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        kernel = row.get("kernelName", "")
        if backend_of(family, row) not in _COMPILED:
            kernel = f"\0{i}"
        groups.setdefault(kernel, []).append(i)
    shares: list[list[int]] = [[] for _ in range(slots)]
    # the largest group first, each to the slot with the fewest rows
    for group in sorted(groups.values(), key=lambda group: (-len(group), group)):
        min(shares, key=len).extend(group)
    return [sorted(share) for share in shares]


def _join_slots(
    node: str, count: int, shares: Mapping[str, Sequence[int]], answers: Mapping[str, Verified]
) -> Verified:
    """Join the answers of the slots. If a slot could not verify, its rows stay unproven, with its reason."""
    rows = {}
    for slot, answer in answers.items():
        for i, row in zip(shares[slot], answer.rows, strict=True):
            if answer.why and not row.why:
                row.why = f"slot {slot}: {answer.why}"
            rows[i] = row
    able = [answer for answer in answers.values() if not answer.why]
    first = next(iter(able or answers.values()))
    failed = next((answer for answer in answers.values() if answer.code), first)
    return Verified(node, [rows[i] for i in range(count)], first.aiter, first.why, failed.code, failed.last)


def _file(slot: str) -> str:
    return f"verify-{slot}.csv"


def _table(rows: Sequence[Cells]) -> bytes:
    header = list(dict.fromkeys(name for row in rows for name in row))
    return csv_text(header, ([row.get(name, "") for name in header] for row in rows)).encode()
