"""Finds the CSVs of a side, and reads the environment records of what they were measured with.

A record is `NAME.env.json` beside `NAME.csv`, or `environment.json`: one JSON object of plain values
(docs/reference/files.md lists the fields that mean something). `switches` holds an object of environment variables. A
field of another name is shown and compared as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.analysis.compare.reading import Side, is_timing, read_side
from orchestrator.errors import InputError
from orchestrator.ledger import clean
from orchestrator.paths import RunPaths
from orchestrator.tables.faults import escaped
from orchestrator.tables.locate import locate
from orchestrator.tables.open import read_bytes

FORMAT = 1
MAX_BYTES = 256 * 1024
INTERLEAVED = "interleaved"
# What a difference in a field means, the gravest first. machine: no verdict on the software is possible; method:
# measured in another way or on another card; test: what the comparison is for; name: nothing.
KINDS = {
    "machine": ("gfx", "gpu", "cu_num"),
    "method": ("timer", "warmup", "iters", "node", "slot", "gpu_serial", "driver", "clocks"),
    "other": (),
    "test": ("triton_version", "triton_commit", "llvm_commit", "configs"),
    "name": ("format", "env", "captured", "order", "session", "side", "python", "under_test"),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """A field that differs; "" if a side does not have it."""

    name: str
    golden: str
    tot: str
    kind: str


def read_source(name: str, given: Sequence[str], runs: Path, dropped: Sequence[str] = ()) -> Side:
    """Reads one side. Raises InputError."""
    files = [f for g in given for f in _files(g, runs)]
    side = read_side(name, files, dropped)
    beside = (p for f in files for p in (f.with_suffix(".env.json"), f.with_name("environment.json")) if p.is_file())
    of_runs = (p for f in files if (p := RunPaths(f.parent).provenance).is_file())
    side.records = [read_record(p) for p in dict.fromkeys(beside)]
    side.records = side.records or [record_of_provenance(p) for p in dict.fromkeys(of_runs)]
    return side


def read_record(path: Path) -> dict[str, str]:
    """A record as flat text fields, `switches.NAME` for what is nested. Raises InputError."""
    document = _json(path, MAX_BYTES)
    if not isinstance(document, dict):
        raise InputError(f"{escaped(str(path))}:1: is no environment record: it must be one JSON object")
    if document.get("format", FORMAT) != FORMAT:
        raise InputError(f"{escaped(str(path))}: is of another format than {FORMAT}: it needs another gemmfleet")
    return dict(_flat("", clean.document(document)))


def record_of_provenance(path: Path) -> dict[str, str]:
    """The environment in a run's provenance.json: chip, images, tuner. Raises InputError."""
    document = clean.document(_json(path, 64 * 2**20))
    measured = [m for m in document.get("measured_on") or [] if isinstance(m, dict)]
    images = document.get("images")
    found = {"env": [document.get("run")], "captured": [document.get("written")], "tuner": [document.get("tuner")]}
    found |= {name: [m.get(name) for m in measured] for name in ("gfx", "cu_num", "node")}
    found["image"] = list(images.values()) if isinstance(images, dict) else []
    return {name: _joined(map(str, filter(None, values))) for name, values in found.items() if any(values)}


def fields_of(side: Side) -> dict[str, str]:
    """The records of a side as one, with the chip that its rows name; values that differ are joined."""
    names = dict.fromkeys(name for r in side.records for name in r)
    of_rows = {n: _joined(v) for n, v in side.chip.items() if v}
    return of_rows | {name: _joined(r[name] for r in side.records if name in r) for name in names}


def differences(golden: Mapping[str, str], tot: Mapping[str, str], under_test: Sequence[str] = ()) -> list[Difference]:
    """The differences of two environments, the gravest first.

    Differences of machine and method count only if both sides name them: a side may have no record.
    """
    kinds = {name: kind for kind, names in KINDS.items() for name in names}
    kinds |= dict.fromkeys((*under_test, *(w for r in (golden, tot) for w in r.get("under_test", "").split())), "test")
    found = [
        Difference(name, golden.get(name, ""), tot.get(name, ""), kinds.get(name, "other"))
        for name in dict.fromkeys((*golden, *tot))
    ]
    differing = (d for d in found if d.golden != d.tot)
    counting = (d for d in differing if d.kind not in ("machine", "method") or (d.golden and d.tot))
    return sorted(counting, key=lambda d: list(KINDS).index(d.kind))


def in_turn(golden: Side, tot: Side) -> bool:
    """True if the rows, or the records of one session, say that the sides were measured in turn."""
    said = all(r.get("order") == INTERLEAVED for r in (*golden.records, *tot.records))
    one, other = ({r.get("session", "") for r in side.records} for side in (golden, tot))
    return (golden.in_turn and tot.in_turn) or bool(golden.records and tot.records and said and one == other)


def refuse_swapped(golden: Side, tot: Side) -> None:
    """Raises InputError if the records of one bench say that the golden side is its later `--env`."""
    for a, b in ((a, b) for a in golden.records for b in tot.records if a.get("session") == b.get("session")):
        one, other = a.get("side", ""), b.get("side", "")
        if one.isdecimal() and other.isdecimal() and int(one) > int(other):
            raise InputError(
                f"the sides are swapped: in the bench {escaped(a.get('session', ''))} the golden side here"
                f" ({escaped(a.get('env', ''))}) was --env number {one}, and the tot side"
                f" ({escaped(b.get('env', ''))}) was number {other}. Give the file of the earlier --env first"
            )


def _json(path: Path, most: int) -> Any:
    try:
        return json.loads(read_bytes(path, most, InputError))
    except (ValueError, RecursionError) as e:
        where = f"{escaped(str(path))}:{getattr(e, 'lineno', 1)}"
        raise InputError(f"{where}: is no JSON: correct it or move it away") from None


def _flat(prefix: str, value: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(f"{prefix}{name}.", inner)
        elif inner is not None and inner != "":
            yield prefix + name, inner if isinstance(inner, str) else json.dumps(inner)


def _joined(values: Iterable[str]) -> str:
    return " | ".join(sorted(set(values)))


def _files(given: str, runs: Path) -> list[Path]:
    found = locate(given, runs)
    if found.kind == "file":
        return [found.path]
    if found.kind == "folder":
        files = [p for p in sorted(found.path.glob("*.csv")) if p.is_file() and is_timing(p)]
        why = "holds no CSV of timings (columns kernel, the shape's, us)"
    else:
        run = found.paths
        files = [p for p in (run.bench_runs, run.bench, run.profile, run.tuned) if p.is_file()][:1]
        why = "has no bench.csv, profile.csv or tuned.csv; did the run end?"
    if not files:
        raise InputError(f"{escaped(given)}: {why}")
    return files
