"""Reads both sides of a comparison: their CSVs into tables of times, and the records of their environments.

Every fault is named with file and line. A record is `NAME.env.json` beside `NAME.csv`, or `environment.json`: one JSON
object of plain values (docs/reference/files.md lists the fields that mean something). `switches` holds an object of
environment variables. A field of another name is shown and compared as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from orchestrator.errors import InputError
from orchestrator.ledger import clean
from orchestrator.tables.faults import Faults, escaped, shown
from orchestrator.tables.locate import locate
from orchestrator.tables.open import csv_records, read_bytes, read_head
from orchestrator.tables.tuned import NULLS
from worker.families import FAMILIES
from worker.text import plural

TIMES = ("us", "time_us")
# columns that name the kernel: the first set of them that is there
KERNELS = (
    ("kernel",), ("backend", "op"), ("kernelName",), ("kernelName1", "kernelName2"), ("kernelName1",), ("backend",),
)  # fmt: skip
RUNS = ("run", "repeat")
CHIP = ("gfx", "cu_num")
CONFIG = "aiter_config"  # file, bucket and values of the config that a row was measured with
_SHAPE = {name for f in FAMILIES.values() for name in f.key_names}
# columns that describe a measurement: they belong neither to the shape nor to the kernel
RESULTS = {
    *(c for f in FAMILIES.values() for c in f.result_columns if c not in ("splitK", "libtype") and c not in _SHAPE),
    "attempt", "node", "slot", "spread", "samples", "margin", "winner", "detail", "unconfirmed", "env",
    "gbps", "GB/s", "tflops", "TFLOPS", "std", "stddev", "min_us", "max_us", "median_us", "mean_us", "error", "errors",
    "captured", "timestamp", "_tag", "op", "timer", "fastest", "order", "status", CONFIG, *TIMES, *RUNS, *CHIP,
}  # fmt: skip
_OK = ("ok", "", "unstable", "short")  # a bench's statuses of rows that have a time
MAX_HEADER = 1 << 16
MAX_REPEATS = 100
MAX_LINES = 1_000_000
FORMAT = 1
MAX_RECORD = 256 * 1024
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
class Side:
    """One side of a comparison: the times of its CSVs, and the records of what they were measured with.

    `rows` has a row for each repeat: `kernel`, the shape's columns as text, `us`, and `aiter_config` if a file has it.
    `fields` are those of all records as one, with the chip that the rows name; `notes` say what was left out.
    """

    name: str
    files: list[Path]
    rows: pd.DataFrame
    records: list[dict[str, str]]
    fields: dict[str, str]
    notes: list[str]


def read_sides(given: Mapping[str, Sequence[str]], runs: Path, dropped: Sequence[str] = ()) -> list[Side]:
    """Reads the sides, each given as files, folders or runs, without the columns that are `dropped`.

    All files must have the same columns of a shape. Raises InputError with the faults of all files.
    """
    faults, sides = list[str](), list[Side]()
    first: tuple[Path, set[str]] | None = None
    for name, names in given.items():
        files, parts, notes = [f for g in names for f in _files(g, runs)], list[pd.DataFrame](), list[str]()
        for n, path in enumerate(files):
            try:
                if path.resolve() in {p.resolve() for p in files[:n]}:
                    raise InputError(f"{escaped(str(path))}: is given twice on one side")
                parts.append(_read(path, dropped, notes))
            except InputError as e:
                faults += e.faults
                continue
            shape = {*parts[-1].columns} - {"us", *CHIP, CONFIG}
            first = first or (path, shape)
            if odd := sorted(shape ^ first[1]):
                faults.append(f"{escaped(str(path))}:1: the columns of its shape differ from those of"
                              f" {escaped(str(first[0]))} by {', '.join(map(shown, odd))}: leave out what is no part"
                              " of a shape with --ignore-column NAME")  # fmt: skip
        if faults:
            continue
        rows = pd.concat(parts, ignore_index=True)
        chip = {n: {*rows.pop(n).dropna()} - NULLS for n in CHIP if n in rows}
        where = ", ".join(escaped(str(p)) for p in files)
        faults += [f"{where}: holds rows of several chips ({n} {', '.join(sorted(v))}): split the file by chip"
                   for n, v in chip.items() if len(v) > 1]  # fmt: skip
        faults += [f"{where}: no row has a time"] * rows.empty
        of_rows = {n: "".join(v) for n, v in chip.items() if v}
        records = read_records(files)
        sides.append(Side(name, files, rows, records, of_rows | joined(records), notes))
    if faults:
        raise InputError(faults)
    return sides


def _files(given: str, runs: Path) -> list[Path]:
    found = locate(given, runs)
    if found.kind == "file":
        return [found.path]
    if found.kind == "folder":
        files = [p for p in sorted(found.path.glob("*.csv")) if p.is_file() and _is_timing(p)]
        why = "holds no CSV of timings (columns kernel, the shape's, us)"
    else:
        files = [p for p in (found.paths.bench_runs, found.paths.profile, found.paths.tuned) if p.is_file()][:1]
        why = "has no bench_runs.csv, profile.csv or tuned.csv; did the run end?"
    if not files:
        raise InputError(f"{escaped(given)}: {why}")
    return files


def _is_timing(path: Path) -> bool:
    """True if a CSV's header is one of timings, and not of a comparison that was written here. Raises InputError."""
    names = read_head(path, MAX_HEADER, InputError).partition("\n")[0].split(",")
    return "verdict" not in names and any(n.strip(' "\r') in TIMES for n in names)


def _read(path: Path, dropped: Sequence[str], notes: list[str]) -> pd.DataFrame:
    """The rows of a file that have a time; `notes` gets what was left out. Raises InputError with the file's faults."""
    where, faults = escaped(str(path)), Faults(path)
    records = [(n, cells) for n, _, cells in islice(csv_records(path, None), MAX_LINES + 1) if any(cells)]
    if not records:
        raise InputError(f"{where}: is empty")
    (header, cells), *lines = records
    names = [n.removeprefix("\ufeff") for n in cells]
    time = next((t for t in TIMES if t in names), "")
    kernel = next((some for some in KERNELS if {*some} <= {*names}), ())
    shape = [n for n in names if n not in {*RESULTS, *kernel, *dropped}]
    twice = next((n for n in names if names.count(n) > 1), "")
    lacks = (
        (not all(names), "a column has no name: name it or drop it"),
        (twice, f"column {shown(twice)} is there {names.count(twice)} times: drop one"),
        (not time, "has no column us or time_us"),
        (not kernel, "has no column kernel (or kernelName, or backend)"),
        (not shape, "has no column of a shape, such as M,N,K"),
        (not lines, "no row follows the header"),
        (len(lines) == MAX_LINES, f"more than {MAX_LINES:,} lines: compare the tuned tables or a benchmark"),
    )
    if what := next((what for bad, what in lacks if bad), ""):
        raise InputError(f"{where}:{header}: {what}; its columns are {escaped(', '.join(names))[:300]}")
    for line, cells in lines:
        if len(cells) != len(names):
            what = f"has {len(cells)} cells, the header {len(names)}; was the file cut short?"
            faults.add(what, line=line)
    faults.raise_as(InputError)
    frame = pd.DataFrame(
        [cells for _, cells in lines], index=[n for n, _ in lines], columns=pd.Index(names), dtype=object
    )
    measured = frame[frame["status"].isin(_OK)] if "status" in frame else frame
    us = pd.to_numeric(measured[time], errors="coerce").astype(float)
    timed = np.isfinite(us) & (us > 0)
    # in a tuner's table a row without a time is ordinary
    wrong = ~timed if kernel == ("kernel",) else us.isna() & ~measured[time].isin(NULLS)
    for at, cell in measured.loc[wrong, time].items():
        what = f"{shown(cell)} is no time: drop the row, or say so in a column status"
        faults.add(what, line=int(str(at)), column=time)
    left_out = (len(frame) - len(measured), "whose status is not ok"), (int((~timed).sum()), "without a time")
    notes += [f"{where}: left out {plural(n, 'row')} {why}" for n, why in left_out if n]
    rows = measured[timed]
    plain = rows.replace(r"^([0-9]+)\.0$", r"\1", regex=True)  # `128` and `128.0` are one
    out = plain[[*shape, *(n for n in (*CHIP, CONFIG) if n in names)]].assign(us=us[timed])
    named = rows[[*kernel]].itertuples(index=False, name=None)
    out.insert(0, "kernel", [" + ".join(c for c in cells if c not in NULLS) for cells in named])
    key = out.groupby(["kernel", *shape], sort=False)
    nth = key.cumcount()
    run = next((plain[n] for n in RUNS if n in names), nth)
    first = out.index.to_series().groupby([key.ngroup(), run]).transform("first")
    again = "this run of its kernel and shape is in line {} already: drop one, or give the repeats numbers of their own"
    for bad, what in (
        (out["kernel"] == "", "names no kernel"),
        (first != out.index, again),
        (nth == MAX_REPEATS, f"more than {MAX_REPEATS} repeats of one kernel and shape: is a column of it missing?"),
    ):
        for at, before in first[bad].items():
            faults.add(what.format(before), line=int(str(at)))
    faults.raise_as(InputError)
    return out


def read_records(files: Sequence[Path]) -> list[dict[str, str]]:
    """The records beside `files`. Raises InputError."""
    beside = dict.fromkeys(p for f in files for p in (f.with_suffix(".env.json"), f.with_name("environment.json")))
    return [read_record(p) for p in beside if p.is_file()]


def joined(records: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The fields of several records as one record; values that differ stand side by side."""
    names = dict.fromkeys(name for r in records for name in r)
    return {name: " | ".join(sorted({r[name] for r in records if name in r})) for name in names}


def read_record(path: Path) -> dict[str, str]:
    """A record as text fields, `switches.NAME` for what is in an object. Raises InputError."""
    where = escaped(str(path))
    try:
        document = json.loads(read_bytes(path, MAX_RECORD, InputError))
    except (ValueError, RecursionError) as e:
        raise InputError(f"{where}:{getattr(e, 'lineno', 1)}: is no JSON: correct it or move it away") from None
    if not isinstance(document, dict) or document.get("format", FORMAT) != FORMAT:
        raise InputError(f"{where}:1: is no environment record: it must be one JSON object of format {FORMAT}")
    fields = dict[str, Any]()
    for name, value in clean.document(document).items():
        fields |= {f"{name}.{n}": v for n, v in value.items()} if isinstance(value, dict) else {name: value}
    return {n: v if isinstance(v, str) else json.dumps(v) for n, v in fields.items() if v not in (None, "")}


def differences(
    golden: Mapping[str, str], tot: Mapping[str, str], under_test: Sequence[str] = ()
) -> list[dict[str, str]]:
    """The fields that differ, the gravest first: `field`, the values `golden` and `tot` ("" for none), and its `kind`.

    Differences of machine and method count only if both sides name them: a side may have no record.
    """
    kinds = {name: kind for kind, names in KINDS.items() for name in names}
    kinds |= dict.fromkeys((*under_test, *(w for r in (golden, tot) for w in r.get("under_test", "").split())), "test")
    found = [
        {"field": n, "golden": golden.get(n, ""), "tot": tot.get(n, ""), "kind": kinds.get(n, "other")}
        for n in dict.fromkeys((*golden, *tot))
        if golden.get(n) != tot.get(n)
        and (kinds.get(n) not in ("machine", "method") or (n in golden and n in tot))
    ]  # fmt: skip
    return sorted(found, key=lambda d: list(KINDS).index(d["kind"]))


def in_turn(golden: Sequence[Mapping[str, str]], tot: Sequence[Mapping[str, str]]) -> bool:
    """True if all records say that the sides were measured in turn, in the same sessions."""
    said = all(r.get("order") == "interleaved" for r in (*golden, *tot))
    one, other = ({r.get("session", "") for r in side} for side in (golden, tot))
    return bool(golden and tot) and said and one == other


def refuse_swapped(golden: Sequence[Mapping[str, str]], tot: Sequence[Mapping[str, str]]) -> None:
    """Raises InputError if the records of one bench say that the golden side is its later `--env`."""
    for a, b in ((a, b) for a in golden for b in tot if a.get("session") == b.get("session")):
        one, other = a.get("side", ""), b.get("side", "")
        if one.isdecimal() and other.isdecimal() and int(one) > int(other):
            raise InputError(
                f"the sides are swapped: in the bench {escaped(a.get('session', ''))} the golden side here"
                f" ({escaped(a.get('env', ''))}) was --env number {one}, and the tot side"
                f" ({escaped(b.get('env', ''))}) was number {other}. Give the file of the earlier --env first"
            )
