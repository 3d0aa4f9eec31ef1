"""The two sides of a comparison: their CSVs, and the environment records of what they were measured with.

A record is `NAME.env.json` beside `NAME.csv`, or `environment.json`: one JSON object of plain values
(docs/reference/files.md lists the fields that mean something); `switches` holds an object of environment variables. A
field of another name is shown and compared as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from orchestrator.analysis.compare.reading import Timings, header_of, is_timing, read_side
from orchestrator.errors import InputError
from orchestrator.ledger import clean
from orchestrator.paths import RunPaths
from orchestrator.tables.faults import escaped
from orchestrator.tables.locate import locate
from orchestrator.tables.open import read_bytes

FORMAT = 1
MAX_BYTES = 256 * 1024
FOLDER_RECORD = "environment.json"
INTERLEAVED = "interleaved"

MACHINE = ("gfx", "gpu", "cu_num")
"""Fields of the machine; with a difference in one of them no verdict on the software is possible."""
METHOD = ("timer", "warmup", "iters", "node", "slot", "gpu_serial", "driver", "clocks")
"""Fields of the measurement; a difference in one of them means another method or another card."""
NAMES = ("format", "env", "captured", "order", "session", "side", "python", "under_test")
"""Names of a side or its session; differences mean nothing."""
UNDER_TEST = ("triton_version", "triton_commit", "llvm_commit", "configs")
"""The compiler stack and AITER's Triton configs: differences here are what a comparison is for. A record's `under_test`
names further fields, with spaces between."""

Kind = Literal["machine", "method", "test", "other", "name"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A field that differs; "" where a side does not have it."""

    name: str
    golden: str
    tot: str
    kind: Kind


def record_beside(csv: Path) -> Path | None:
    """The record that belongs to a CSV, or None."""
    return next((p for p in (csv.with_suffix(".env.json"), csv.with_name(FOLDER_RECORD)) if p.is_file()), None)


def read_record(path: Path) -> dict[str, str]:
    """A record as flat text fields, `switches.NAME` for what is nested. Raises InputError."""
    data = read_bytes(path, MAX_BYTES, InputError)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as e:
        at = getattr(e, "lineno", 1)
        raise InputError(f"{escaped(str(path))}:{at}: is no JSON: correct it or move it away") from None
    if not isinstance(document, dict):
        raise InputError(f"{escaped(str(path))}:1: is no environment record: it must be one JSON object")
    if document.get("format", FORMAT) != FORMAT:
        raise InputError(f"{escaped(str(path))}: is of another format than {FORMAT}: it needs another gemmfleet")
    return dict(_flat("", clean.document(document)))


def record_of_provenance(path: Path) -> dict[str, str]:
    """The environment in a run's provenance.json: chip, images, tuner. Raises InputError."""
    try:
        document = clean.document(json.loads(read_bytes(path, 64 * 2**20, InputError)))
    except (ValueError, RecursionError):
        raise InputError(f"{escaped(str(path))}: is no JSON: collect or finish the run again") from None
    measured = [m for m in document.get("measured_on") or [] if isinstance(m, dict)]
    images = document.get("images")
    found = {
        "env": [document.get("run")],
        "captured": [document.get("written")],
        "tuner": [document.get("tuner")],
        "gfx": [m.get("gfx") for m in measured],
        "cu_num": [m.get("cu_num") for m in measured],
        "node": [m.get("node") for m in measured],
        "image": list(images.values()) if isinstance(images, dict) else [],
    }
    return {name: join_values(map(str, filter(None, values))) for name, values in found.items() if any(values)}


def _flat(prefix: str, value: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(f"{prefix}{name}.", inner)
        elif inner is not None and inner != "":
            yield prefix + name, inner if isinstance(inner, str) else json.dumps(inner)


def join_values(values: Iterable[str]) -> str:
    """Distinct values as one text."""
    return " | ".join(sorted(set(values)))


def merge_records(records: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The records of one side as one: values that differ are joined."""
    names = dict.fromkeys(name for r in records for name in r)
    return {name: join_values(r[name] for r in records if name in r) for name in names}


def differences(
    golden: Mapping[str, str], tot: Mapping[str, str], under_test: Sequence[str] = UNDER_TEST
) -> list[Difference]:
    """The differences of two environments, the gravest first.

    Without a record on one side, differences of machine and method count only where both sides name them.
    """
    out = []
    under_test = [*under_test, *(w for side in (golden, tot) for w in side.get("under_test", "").split())]
    for name in dict.fromkeys((*golden, *tot)):
        a, b = golden.get(name, ""), tot.get(name, "")
        kind = _kind(name, under_test)
        if a != b and not (kind in ("machine", "method") and not (a and b)):
            out.append(Difference(name, a, b, kind))
    order: tuple[Kind, ...] = ("machine", "method", "other", "test", "name")
    return sorted(out, key=lambda d: order.index(d.kind))


def _kind(name: str, under_test: Sequence[str]) -> Kind:
    if name in under_test:
        return "test"
    if name in MACHINE:
        return "machine"
    if name in METHOD:
        return "method"
    return "name" if name in NAMES else "other"


def interleaved(golden: Sequence[Mapping[str, str]], tot: Sequence[Mapping[str, str]]) -> bool:
    """True where all records of both sides say that the sides were measured in turn, in the same sessions."""
    in_turn = all(r.get("order") == INTERLEAVED for r in (*golden, *tot))
    same = {r.get("session", "") for r in golden} == {r.get("session", "") for r in tot}
    return bool(golden and tot) and in_turn and same


def refuse_swapped(golden: Sequence[Mapping[str, str]], tot: Sequence[Mapping[str, str]]) -> None:
    """Raise InputError if the records of one bench say that the golden side is its later `--env`."""
    for a in golden:
        for b in tot:
            places = a.get("side", ""), b.get("side", "")
            if (
                a.get("session") == b.get("session")
                and all(map(str.isdecimal, places))
                and int(places[0]) > int(places[1])
            ):
                raise InputError(
                    f"the sides are swapped: in the bench {escaped(a.get('session', ''))} the golden side here"
                    f" ({escaped(a.get('env', ''))}) was --env number {places[0]}, and the tot side"
                    f" ({escaped(b.get('env', ''))}) was number {places[1]}. Give the file of the earlier --env first"
                )


@dataclass(slots=True)
class Side:
    """One side: its CSVs, what they hold and what they were measured with (a record a CSV that has one)."""

    name: str
    files: list[Path]
    side: Timings
    records: list[dict[str, str]] = field(default_factory=list)

    @property
    def fields(self) -> dict[str, str]:
        """The records as one, with the chip that the rows name."""
        of_rows = {n: join_values(v) for n, v in self.side.chip.items() if v}
        return of_rows | merge_records(self.records)

    @property
    def interleaved(self) -> bool:
        """True where the order columns say so."""
        return self.side.in_turn


def read_source(name: str, given: Sequence[str], runs: Path, dropped: Sequence[str] = ()) -> Side:
    """Read one side. Raises InputError."""
    files = [f for g in given for f in _files(g, runs)]
    source = Side(name, files, read_side(files, dropped))
    for path in dict.fromkeys(p for f in files if (p := record_beside(f))):
        source.records.append(read_record(path))
    if not source.records:
        for root in dict.fromkeys(f.parent for f in files):
            provenance = RunPaths(root).provenance
            if provenance.is_file():
                source.records.append(record_of_provenance(provenance))
    return source


def _files(given: str, runs: Path) -> list[Path]:
    found = locate(given, runs)
    if found.kind == "file":
        return [found.path]
    if found.kind == "folder":
        files = [p for p in sorted(found.path.glob("*.csv")) if p.is_file() and is_timing(header_of(p))]
        if not files:
            raise InputError(f"{escaped(given)}: holds no CSV of timings (columns kernel, the shape's, us)")
        return files
    run = found.paths
    there = [p for p in (run.bench_runs, run.bench, run.profile, run.tuned) if p.is_file()]
    if not there:
        raise InputError(f"{escaped(given)}: has no bench.csv, profile.csv or tuned.csv; did the run end?")
    return there[:1]
