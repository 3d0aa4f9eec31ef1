"""The document of `compare`: both sides read, joined by kernel and shape, and judged.

Every fault is named with file and line. A record of an environment is `NAME.env.json` beside `NAME.csv`, or
`environment.json`: one JSON object of plain values (docs/reference/files.md lists the fields that mean something).
`switches` holds an object of environment variables. A field of another name is shown and compared as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import expm1
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import pandas as pd

from orchestrator import clean
from orchestrator.command_hints import command
from orchestrator.errors import InputError
from orchestrator.paths import RunPaths
from orchestrator.results.compare import BOUND, ENOUGH_ROWS, OPEN, STANDARD, VERDICTS, Judged, Rule, judge
from orchestrator.tables.locate import locate
from orchestrator.tables.textfiles import Faults, csv_records, escaped, read_bytes, read_head, shown
from orchestrator.tables.write import cell, no_formula, write_atomic, write_csv
from worker.families import FAMILIES, NULLS
from worker.text import plural

AGAIN_REPEATS = 7
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
    kind, path = locate(given, runs)
    if kind == "file":
        return [path]
    if kind == "folder":
        files = [p for p in sorted(path.glob("*.csv")) if p.is_file() and _is_timing(p)]
        why = "holds no CSV of timings (columns kernel, the shape's, us)"
    else:
        run = RunPaths(path)
        files = [p for p in (run.bench_runs, run.profile, run.tuned) if p.is_file()][:1]
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
    for at, text in measured.loc[wrong, time].items():
        what = f"{shown(text)} is no time: drop the row, or say so in a column status"
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


Rows = list[dict[str, Any]]


def compare(
    golden: Side, tot: Side, *, rule: Rule = STANDARD, bound: float = BOUND, under_test: Sequence[str] = (),
    other_gpu: bool = False, rule_only: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Judges `tot` against `golden`, and returns all that is known as a JSON document (docs/reference/commands.md).

    `rule_only`: by the rule alone, which knows no noise; its figures alone are given. Raises InputError if the sides
    cannot be compared.
    """
    refuse_swapped(golden.records, tot.records)
    found = differences(golden.fields, tot.fields, under_test)
    machine, method = (
        "; ".join(f"{d['field']}: {d['golden']} and {d['tot']}" for d in found if d["kind"] == kind)
        for kind in ("machine", "method")
    )
    if machine and not other_gpu:
        raise InputError(f"the sides are of different machines ({escaped(machine)}): their times say nothing of the"
                         " software; --other-gpu compares them all the same")  # fmt: skip
    warnings = [
        *golden.notes, *tot.notes,
        *[f"the sides are of different machines ({machine}): a verdict is not one on the software"] * bool(machine),
        *[f"not measured in the same way ({method})"] * bool(method),
    ]  # fmt: skip
    paired = in_turn(golden.records, tot.records)
    rows, judged = _judged(golden, tot, rule, bound, paired, rule_only)
    if not any(r["golden_us"] and r["tot_us"] for r in rows):
        a, b = (shown(" ".join(s.rows.drop(columns="us").iloc[0].map(str)), 120) for s in (golden, tot))
        warnings.append(f"no row is on both sides; golden has {a}, tot {b}")
    counts = {v: sum(r["verdict"] == v for r in rows) for v in VERDICTS}
    noise: dict[str, Any] = {} if rule_only else {
        "expected_false_regressions": bound, "threshold": float(judged.threshold), "judged": int(judged.rows),
        "averaged": judged.averaged, "table_shift": float(judged.shift), "shift_removed": float(judged.removed),
        "table_slower": bool(judged.slower),
    }  # fmt: skip
    out = {
        "counts": counts,
        "rows": rows,
        "rule_only": rule_only,
        "rule": {"rel": rule.rel, "abs_us": rule.abs_us, "ignore_below_us": rule.ignore_below},
        "open": sum(counts[v] for v in OPEN),
        "paired": paired,
        **noise,
        "environment": {"golden": golden.fields, "tot": tot.fields, "differences": found},
        "config_files": _config_files(rows, rule),
        "files": {s.name: [str(f) for f in s.files] for s in (golden, tot)},
        "again": _again([r for r in rows if r["verdict"] in OPEN], golden, tot),
        "warnings": warnings,
    }
    regression = out.get("table_slower") or counts["regression"]
    return {"exit_code": 1 if regression else 4 if out["open"] else 0, "summary": _summary(out), **out}


def _judged(
    golden: Side, tot: Side, rule: Rule, bound: float, paired: bool, rule_only: bool
) -> tuple[Rows, Judged]:  # fmt: skip
    """The joined rows, the worst first, and how they were judged.

    `change` and `seen_from` are shares of the golden time, None if nothing is known; `golden_repeats` says how many
    repeats agree of all, as `1/3`; `golden_config` is there if rows name configs.
    """
    every = pd.concat([golden.rows, tot.rows], keys=[0, 1])
    columns = [c for c in golden.rows if c not in ("us", CONFIG)]
    side, at = every.index.get_level_values(0), every.groupby(columns, sort=False).ngroup().to_numpy()
    nth = every.groupby([side, at]).cumcount()
    us = np.full((2, at.max() + 1, nth.max() + 1), np.nan)
    us[side, at, nth] = every["us"]
    j = judge(us[0], us[1], rule=rule, bound=bound, paired=paired)
    figures: dict[str, Any] = {
        "golden_us": j.golden.us, "tot_us": j.tot.us, "change": j.tot.us / j.golden.us - 1, "verdict": j.verdicts,
        "p": j.p, "seen_from": j.seen_from, "beyond_rule": j.beyond,
    }  # fmt: skip
    for name, of, n in zip(("golden", "tot"), (j.golden, j.tot), np.isfinite(us).sum(axis=2), strict=True):
        figures[f"{name}_repeats"] = [f"{kept}/{there}" for kept, there in zip(of.count * of.stable, n, strict=True)]
    table = pd.DataFrame(figures)
    if rule_only:
        faster = j.golden.us > rule.limit(j.tot.us)
        verdict = np.select([j.beyond, faster], ["regression", "improved"], "ok")
        table["verdict"] = table["verdict"].where(table["verdict"].isin(("new", "missing", "ignored")), verdict)
        table = table.drop(columns=["p", "seen_from"])
    if CONFIG in every:
        configs = every.groupby([at, side])[CONFIG].last().unstack()
        table["golden_config"], table["tot_config"] = configs.get(0), configs.get(1)
    order = np.lexsort((-table["change"].abs().fillna(0), table["verdict"].map(VERDICTS.index)))
    keys = every[columns].drop_duplicates(ignore_index=True).iloc[order].to_dict("records")
    table = table.iloc[order].astype(object)
    cells = table.where(table.notna(), None).to_dict("records")
    return [
        {"key": key} | {str(name): value for name, value in row.items()} for key, row in zip(keys, cells, strict=True)
    ], j


def _config_files(rows: Rows, rule: Rule) -> list[dict[str, Any]]:
    """The files of the new config set, by path, from which a row reads other values than on the golden side.

    A row names the file, bucket and values that it read. `verdict`: `rejected` (a row is a regression), `open` (else, a
    row could not be judged) or `accepted`; `default`: a file that shapes without one of their own read.
    """
    files: dict[str, Rows] = {}
    for r in rows:
        old, new = (str(r.get(f"{s}_config") or "").split(" ", 2) for s in ("golden", "tot"))
        if len(old) == len(new) == 3 and old[2] != new[2]:
            files.setdefault(new[0], []).append({**r, "old": " ".join(old[1:]), "new": " ".join(new[1:])})
    out: list[dict[str, Any]] = []
    for path, of in sorted(files.items()):
        slower = [
            {"key": r["key"], "old_us": r["golden_us"], "new_us": r["tot_us"], "old": r["old"], "new": r["new"],
             "limit_us": float(rule.limit(r["golden_us"]))}
            for r in of if r["verdict"] == "regression"
        ]  # fmt: skip
        unsure = any(r["verdict"] in OPEN for r in of)
        out.append({"file": path, "default": "-N=" not in path, "changed": len(of), "slower": slower,
                    "verdict": "rejected" if slower else "open" if unsure else "accepted",
                    "faster": [r["key"] for r in of if r["verdict"] == "improved"]})  # fmt: skip
    return out


def _summary(of: Mapping[str, Any]) -> list[str]:
    """The verdict in a few sentences, and what weakens it."""
    rows = of["rows"]
    out = [f"{plural(len(rows), 'row')}: {', '.join(f'{n} {verdict}' for verdict, n in of['counts'].items() if n)}."]
    out += ["Judged by the rule alone, which accuses nearly every table of unchanged stacks."] * of["rule_only"]
    if not of["rule_only"]:
        if of["table_slower"]:
            out.insert(0, f"The table as a whole is slower by {percent(expm1(of['table_shift']))}: a regression.")
        if of["averaged"]:
            out.append("No row has repeats. Nothing shows their noise, so no row is judged: measure each three times.")
        shift, removed = percent(of["table_shift"], sign=True), percent(of["shift_removed"], sign=True)
        if not of["paired"] and of["judged"] < ENOUGH_ROWS:
            removed = "nothing, as so few rows do not tell drift from a change (0.7 % counts as noise)"
        out += [
            f"If nothing had changed, {of['expected_false_regressions']:g} rows of such a table would be called a"
            f" regression by chance (the rule alone flags {sum(r['beyond_rule'] for r in rows)} here).",
            f"{'Measured in turn' if of['paired'] else 'Unpaired'}: the table as a whole shifted by {shift}. Removed as"
            f" drift: {removed}.",
        ]
    for f in of["config_files"]:
        told = f"{plural(f['changed'], 'row')} changed, {len(f['slower'])} slower, {len(f['faster'])} faster"
        out.append(f"{f['verdict']}: {f['file']} ({'default file, ' if f['default'] else ''}{told})")
        out += [f"  {key_text(s['key'])}: {s['old_us']:.2f} -> {s['new_us']:.2f} us, limit {s['limit_us']:.2f} us"
                f" ({of['rule']['rel']:g} x old + {of['rule']['abs_us']:g} us); {s['old']} -> {s['new']}"
                for s in f["slower"]]  # fmt: skip
        if f["slower"] and f["default"] and f["faster"]:
            gained = dict.fromkeys(key_text({n: v for n, v in key.items() if n in "BNK"}) for key in f["faster"])
            out.append(f"  files of their own would keep what {'; '.join(gained)} gained")
    slower = [r for r in rows if r["verdict"] == "regression"]
    if same := sum(bool(c := r.get("golden_config")) and c == r["tot_config"] for r in slower):
        out.append(f"{plural(same, 'row')} slower with the same config in both sets: that is no config's doing")
    if other := [d["field"] for d in of["environment"]["differences"] if d["kind"] == "other"]:
        verb = "differs" if len(other) == 1 else "differ"
        out.append(f"{', '.join(other)} {verb} too: a change may come from there")
    return out


def _again(rows: Rows, golden: Side, tot: Side) -> str:
    """The command that measures the rows of again.csv anew; "" if all are judged."""
    stacks = " ".join(dict.fromkeys(word for s in (golden, tot) for word in _stack_options(s)))
    backends = ",".join(sorted({k.split("/")[0] for r in rows if "/" in (k := r["key"]["kernel"])})) or "BACKEND"
    words = f"bench again.csv --backend {quote(backends)} {stacks} --repeats {AGAIN_REPEATS}"
    return command(words) if rows else ""


def _stack_options(side: Side) -> list[str]:
    """Options of `bench` that give a side again: its stack with the variables set for it, its config set."""
    fields = side.fields
    stack = fields.get("env", "").partition(" (")[2].removesuffix(")")  # a bench of ours writes `NAME (PLACE)`
    given = [n for n in fields.get("under_test", "").split() if n in fields]
    stack += "".join(f",{n.removeprefix('switches.')}={fields[n]}" for n in given)
    if "configs" not in fields:
        return [f"--env {side.name}={quote(stack or 'PYTHON')}"]
    sets = f"--config-set {quote(side.name + '=' + fields['configs'].rpartition(' (')[0])}"
    return [*([f"--env stack={quote(stack)}"] if stack else []), sets]


def percent(share: float | None, *, sign: bool = False) -> str:
    """A share as `+1.2 %`; "" for none."""
    return "" if share is None else f"{100 * share:{'+z' if sign else ''}.{1 if abs(share) >= 0.0995 else 2}f} %"


def key_text(key: Mapping[str, str]) -> str:
    """A row's key as `kernel M=16 N=512 K=128`."""
    return " ".join(v if n == "kernel" else f"{n}={v}" for n, v in key.items())


def refuse_overwriting(read: Sequence[Path], write: Sequence[Path]) -> None:
    """Raise InputError where an output is one of the inputs, or named twice."""
    paths = [p.resolve() for p in (*dict.fromkeys(read), *write)]
    if twice := next((p for p in write if paths.count(p.resolve()) > 1), None):
        raise InputError(f"{twice}: is one of the inputs, or named twice: name another file")


def write(of: Mapping[str, Any], out: Path | None, again: Path | None, page: Path | None, markdown: str) -> list[str]:
    """Write all rows, those that could not be judged, and a page of Markdown; return what was written in words.

    All rows come with the worst first. Raises InputError.
    """
    keys, *figures = of["rows"][0]
    written = []
    try:
        if out:
            rows = ([*r[keys].values(), *(r[n] for n in figures)] for r in of["rows"])
            cells = ([no_formula(v) if isinstance(v, str) else cell(v) for v in row] for row in rows)
            write_csv(out, [*of["rows"][0][keys], *figures], cells)
            written.append(str(out))
        if again:
            left = [map(no_formula, r["key"].values()) for r in of["rows"] if r["verdict"] in OPEN]
            write_csv(again, list(of["rows"][0]["key"]), left)
            written.append(f"{again} ({plural(of['open'], 'row')} to measure again)")
        if page:
            write_atomic(page, markdown)
            written.append(str(page))
    except OSError as e:
        raise InputError(f"{e.filename or out or again or page}: cannot be written: {e.strerror}") from e
    return written
