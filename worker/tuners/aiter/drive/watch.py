"""Candidates as they begin and end: whether the shim may be used on a tree, and the reading of its journal.

The shim (shim/sitecustomize.py) is a workaround like others: used only where its predicate holds on the files, recorded
with their hashes. Without it AITER's own lines are all that is known, and a shape of a process that died cannot be
salvaged.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.families import BACKENDS, Family, backend_of
from worker.protocol import Row
from worker.tuners.aiter.drive.lines import Keys

SHIM = Path(__file__).parent / "shim"
MP_TUNER = "aiter/utility/mp_tuner.py"


@dataclass(frozen=True, slots=True)
class Watchable:
    """Whether the shim fits a tree's mp_tuner.py; `why` says why not. Hashes are sha256."""

    fits: bool
    why: str
    target_sha256: str = ""
    shim_sha256: str = ""

    def as_json(self) -> dict[str, str]:
        """For provenance."""
        return {
            "name": "candidate_journal", "target": MP_TUNER, "sha256": self.target_sha256,
            "shim_sha256": self.shim_sha256, "state": "used" if self.fits else f"not used: {self.why}",
        }  # fmt: skip


def watchable(package: Path) -> Watchable:
    """Read `package`/utility/mp_tuner.py (`package`: the folder `aiter`). Needs no import and no GPU."""
    path = package / "utility" / "mp_tuner.py"
    try:
        source = path.read_bytes()
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError) as e:
        return Watchable(False, f"{MP_TUNER} cannot be read: {e}")
    defs = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    target = hashlib.sha256(source).hexdigest()
    shim = hashlib.sha256((SHIM / "sitecustomize.py").read_bytes()).hexdigest()
    worker, group = defs.get("worker"), defs.get("work_group")
    if worker is None or group is None:
        return Watchable(False, "it has no functions worker and work_group", target, shim)
    names = [a.arg for a in worker.args.args]
    if "info" not in names:
        return Watchable(False, "its function worker takes no info", target, shim)
    calls = [n for n in ast.walk(group) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "worker"]
    if not calls:
        return Watchable(False, "its function work_group does not call worker", target, shim)
    returns = [n.value for n in ast.walk(worker) if isinstance(n, ast.Return)]
    if not returns or not all(isinstance(r, ast.Tuple) and len(r.elts) == 3 for r in returns):
        return Watchable(False, "its function worker does not return (info, us, error)", target, shim)
    return Watchable(True, "", target, shim)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One candidate of one shape as the journal names it; equal in every process of an image."""

    key: tuple[str, ...]
    ident: tuple[str, ...]

    def as_json(self) -> dict[str, list[str]]:
        """An entry of the file of blocked candidates."""
        return {"key": list(self.key), "candidate": list(self.ident)}

    def describe(self) -> str:
        """For people: `kernelId=3 splitK=0 a4w4_blockscale_...`."""
        numbers = [v for v in self.ident if _is_number(v)]
        words = [v for v in self.ident if v and not _is_number(v) and v not in ("True", "False")]
        named = [f"{n}={v}" for n, v in zip(("kernelId", "splitK"), numbers, strict=False)]
        return " ".join([*named, *words]) or "unnamed"


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the journal. `shape` is None where the key is none of ours."""

    event: str
    shape: int | None
    candidate: Candidate
    pid: int
    us: float = -1.0
    err: float = 1.0


class Journal:
    """Reads the journal as it grows."""

    def __init__(self, path: Path, columns: tuple[str, ...], shapes: dict[int, dict[str, int | str]]) -> None:
        self._path = path
        self._keys = Keys(columns, shapes)
        self._at = 0
        self._rest = b""
        self._open: dict[int, Step] = {}
        self._new: list[Step] = []
        self.ended: dict[int, list[Step]] = {}

    def new(self) -> list[Step]:
        """The steps that nobody took yet, read or not."""
        self.read()
        steps, self._new = self._new, []
        return steps

    def read(self) -> None:
        """Look into the file."""
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
    def open(self) -> list[Step]:
        """The candidates that began and did not end, the last first."""
        return list(self._open.values())[::-1]

    def named_in(self, text: str) -> Step | None:
        """The candidate that a line names by its info, the last of those that ended or are at work."""
        steps = [*(s for ended in self.ended.values() for s in ended), *self._open.values()]
        for step in steps[::-1]:
            shown = ", ".join(v if _is_number(v) else repr(v) for v in step.candidate.ident[:3])
            if step.shape is not None and f"), {shown}" in text and step.candidate.key[-1] in text:
                return step
        return None

    def _parse(self, line: bytes) -> Step | None:
        try:
            raw: Any = json.loads(line)
            candidate = Candidate(tuple(map(str, raw["key"])), tuple(map(str, raw["candidate"])))
            us, err = float(raw.get("us", -1)), float(raw.get("err", 1))
            shape = self._keys.find(candidate.key, named=False)
            return Step(str(raw["event"]), shape, candidate, int(raw["pid"]), us, err)
        except (ValueError, KeyError, TypeError):
            return None


class Names:
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


def journal_row(family: Family, step: Step, limit: float, names: Names, detail: str = "") -> Row:
    """A candidate of the journal as a row; `names`: kernel names where the journal has none."""
    numbers = [int(v) for v in step.candidate.ident if _is_number(v)]
    words = [v for v in step.candidate.ident if v and not _is_number(v) and v not in ("True", "False", "None")]
    libtypes = [w for w in words if w in BACKENDS]
    kernels = [w for w in words if w not in BACKENDS and not w.startswith(("stage", "asm_1stage"))]
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
    return row


def _is_number(text: str) -> bool:
    return text.lstrip("-").isdigit()
