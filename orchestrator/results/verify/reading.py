"""What a verification printed, held against the tuned rows. Pure.

Two proofs for a row: AITER's log says that the lookup took it (`AITER_LOG_TUNED_CONFIG`: `... found padded_M: .. is
tuned .. in FILE, kernel name is ..`), and the operator's own run was right (`Shape | Kernel(us) | E2E(us) | Status` of
--run_config, with or without the second column; a `keys:` line after each shape since 2026-05).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.ledger import clean
from orchestrator.tables.tuned import NULLS, number_of
from worker.families import Family

MARK = "GEMMFLEET-VERIFY "
Verdict = Literal["ok", "mismatch", "error", "not run"]

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
_STATUS: dict[str, Verdict] = {"OK": "ok", "MISMATCH": "mismatch", "ERROR": "error"}
_TYPED = re.compile(r"\b(dtype|otype|bias|scaleAB|bpreshuffle)='?(torch\.\w+|True|False)")
_COLUMN = {"otype": "outdtype"}
_NUMBER = re.compile(r"\d+")


@dataclass(slots=True)
class Row:
    """A tuned row and what became of it. `us` is end to end, as measured by --run_config."""

    key: dict[str, str]
    kernel: str
    tuned_us: float | None
    selected: bool = False
    verdict: Verdict = "not run"
    us: float | None = None
    why: str = ""

    @property
    def proven(self) -> bool:
        return self.selected and self.verdict == "ok"


@dataclass(slots=True)
class Verified:
    """One node's answer. `told`: which AITER it was; `why`: why nothing could be run, "" where it could."""

    node: str
    rows: list[Row]
    told: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    code: int | None = None
    last: list[str] = field(default_factory=list)


class Reading:
    """Takes the lines of one node as they come."""

    def __init__(self, node: str, rows: Iterable[Mapping[str, str]], family: Family) -> None:
        self._family = family
        self.found = Verified(node, [_row(r, family) for r in rows])
        self._by_numbers: dict[tuple[str, ...], list[Row]] = {}
        for row in self.found.rows:
            numbers = tuple(row.key[c.name] for c in family.columns if c.kind == "int")
            self._by_numbers.setdefault(numbers, []).append(row)
        self._current: list[Row] = []

    def line(self, line: str) -> None:
        """One line, clean."""
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
        try:
            said = json.loads(text)
        except ValueError:
            return
        if not isinstance(said, dict):
            return
        if "code" in said:
            self.found.code = clean.integer(said["code"])
            return
        self.found.told = clean.document(said)
        if not said.get("supported"):
            self.found.why = clean.text(said.get("why"), 500) or "this AITER cannot verify"

    def _hit(self, line: str) -> None:
        """A lookup that took a row: it must be the row with the M that was found, and with its kernel."""
        found = _HIT.search(line)
        table = str(self.found.told.get("table", ""))
        if found is None or (table and f" in {table}" not in line):
            return
        padded = _PADDED.search(line)
        m = padded[1] if padded else found["M"]
        numbers = tuple(x for x in (found["B"], m, found["N"], found["K"]) if x)
        kernel = _KERNEL.search(line)
        kind = _TYPE.search(line)
        for row in self._by_numbers.get(numbers, ()):
            named = kernel is None or not kernel[1] or kernel[1] == row.kernel  # hipBLASLt's are not named
            typed = kind is None or row.key.get("q_dtype_w", kind[1]) == kind[1]
            same = all(row.key.get(name, value) == value for name, value in _types(line).items())
            row.selected = row.selected or (named and typed and same)

    def _moe(self, line: str) -> None:
        found = _FMOE.search(line)
        if found is None:
            return
        numbers = tuple(_NUMBER.findall(found[2].split("Activation")[0]))[-5:]
        for rows in self._by_numbers.values():
            for row in rows:
                own = tuple(row.key[n] for n in self._family.key_names[:5])
                row.selected = row.selected or (own == numbers and row.kernel.split(" + ")[0] == found[1].strip("'"))

    def _result(self, line: str) -> None:
        found = _RESULT.match(line)
        if found is None:
            return
        numbers = _NUMBER.findall(re.sub(r"torch\.\w+", "", found["shape"]))
        want = [c.name for c in self._family.columns if c.kind == "int"]
        rows = self._by_numbers.get(tuple(numbers), []) if len(numbers) == len(want) else []
        if not rows:  # other words around the numbers: all of a row's must be there, in order
            rows = [r for n, some in self._by_numbers.items() if _within(n, numbers) for r in some]
        waiting = [r for r in rows if r.verdict == "not run"]
        types = [r for r in waiting if all(v in line for k, v in r.key.items() if v.startswith("torch."))]
        self._current = (types or waiting)[:1]
        for row in self._current:
            row.verdict = _STATUS.get(found["status"], "error")
            row.us = number_of(found["us"])


def _types(line: str) -> dict[str, str]:
    """The types that a line of a16w16 names."""
    found: list[tuple[str, str]] = _TYPED.findall(line)
    return {_COLUMN.get(name, name): value for name, value in found}


def _within(wanted: Sequence[str], numbers: Sequence[str]) -> bool:
    rest = iter(numbers)
    return all(n in rest for n in wanted)


def _row(cells: Mapping[str, str], family: Family) -> Row:
    names = (cells.get(n, "") for n in ("kernelName", "kernelName1", "kernelName2"))
    kernel = " + ".join(n for n in names if n not in NULLS)
    return Row({n: cells.get(n, "") for n in family.key_names}, kernel, number_of(cells.get("us", "")))
