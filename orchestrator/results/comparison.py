"""Makes the document of `compare`: reads both sides, joins them by kernel and shape, and judges them.

Every fault names file and line. An environment record is `NAME.env.json` beside `NAME.csv`, or `environment.json`: one
JSON object of plain values (docs/reference/files.md lists the known fields). `switches` holds an object of environment
variables. Other fields are shown and compared as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import pandas as pd

from orchestrator import clean
from orchestrator.command_hints import command
from orchestrator.errors import InputError
from orchestrator.files.cells import cell, no_formula
from orchestrator.files.faults import Faults, escaped, shown
from orchestrator.files.read import csv_records, read_bytes
from orchestrator.files.write import csv_text, write_output
from orchestrator.paths import RunPaths
from orchestrator.results.bench import ENV_FORMAT, MEASURED
from orchestrator.results.compare import BOUND, ENOUGH_ROWS, OPEN, STANDARD, VERDICTS, Rule, judge
from orchestrator.results.measurements import read_header
from orchestrator.results.rocprof import GRID, is_rocprof, timings
from orchestrator.tables.run_folders import locate_input
from worker.families import FAMILIES, NULLS
from worker.text import plural

AGAIN_REPEATS = 7
TIMES = ("us", "time_us")
# columns that name the kernel: the first set that the file has
KERNELS = (
    ("kernel",), ("backend", "op"), ("kernelName",), ("kernelName1", "kernelName2"), ("kernelName1",), ("backend",),
)  # fmt: skip
NO_REPEATS = (
    "No row has repeats, so the noise is unknown and no row is judged: measure each three times. --rule-only judges by"
    " the rule alone, but it knows no noise and accuses most unchanged tables."
)
ANY_KERNEL = "any"
"""The kernel of all rows if the column that names it is left out."""
RUNS = ("run", "repeat")
CHIP = ("gfx", "cu_num")
CONFIG = "aiter_config"  # file, bucket and values of the config that a row was measured with
# columns that describe a measurement, and belong neither to the shape nor to the kernel
RESULTS = {
    *({c for f in FAMILIES.values() for c in f.result_columns} - {c for f in FAMILIES.values() for c in f.key_names}
      - {"splitK", "libtype"}),
    "attempt", "node", "slot", "spread", "samples", "margin", "winner", "detail", "unconfirmed", "env",
    "gbps", "GB/s", "tflops", "TFLOPS", "std", "stddev", "min_us", "max_us", "median_us", "mean_us", "error", "errors",
    "captured", "timestamp", "_tag", "op", "timer", "fastest", "order", "status", CONFIG, *TIMES, *RUNS, *CHIP,
}  # fmt: skip
MAX_REPEATS = 100
MAX_LINES = 1_000_000
MAX_RECORD = 256 * 1024
# The meaning of a difference in a field, the most serious first. machine: no verdict on the software is possible.
# method: measured in another way or on another card. test: the comparison is about it. name: no meaning.
KINDS = {
    "machine": ("gfx", "gpu", "cu_num"),
    "method": ("timer", "warmup", "iters", "node", "slot", "gpu_serial", "driver", "clocks"),
    "other": (),
    "test": ("triton_version", "triton_commit", "llvm_commit", "configs"),
    "name": ("format", "env", "captured", "order", "session", "side", "python", "under_test"),
}


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: the times of its CSVs, and the records of the environments that measured them.

    `rows` has a row for each repeat: `kernel`, the shape's columns as text, `us`, and `aiter_config` if a file has it.
    `fields` joins all records, and adds the chip that the rows name. `notes` list the rows that were left out.
    """

    name: str
    files: list[Path]
    rows: pd.DataFrame
    records: list[dict[str, str]]
    fields: dict[str, str]
    notes: list[str]


def read_sides(given: Mapping[str, Sequence[str]], runs: Path, dropped: Sequence[str] = ()) -> list[Side]:
    """Reads the sides, each given as files, folders or runs, without the `dropped` columns.

    All files must have the same shape columns. A file that is given twice counts once. Raises InputError with the
    faults of all files.
    """
    faults, sides = list[str](), list[Side]()
    first = None
    for name, names in given.items():
        files = list({f.resolve(): f for g in names for f in _files(g, runs)}.values())
        parts, notes = list[pd.DataFrame](), list[str]()
        for path in files:
            try:
                parts.append(_read(path, dropped, notes))
            except InputError as e:
                faults += e.faults
            else:
                shape = {*parts[-1].columns} - {"us", *CHIP, CONFIG}
                first = first or (path, shape)
                if odd := sorted(shape ^ first[1]):
                    faults.append(f"{escaped(str(path))}:1: the columns of its shape differ from those of"
                                  f" {escaped(str(first[0]))} by {', '.join(map(shown, odd))}: leave out columns that"
                                  " are not part of a shape with --ignore-column NAME")  # fmt: skip
        if not faults:
            rows = pd.concat(parts, ignore_index=True)
            chip = {n: {*rows.pop(n).dropna()} - NULLS for n in CHIP if n in rows}
            bad = [f"holds rows of several chips ({n} {', '.join(sorted(v))}): split the file by chip"
                   for n, v in chip.items() if len(v) > 1] + ["no row has a time"] * rows.empty  # fmt: skip
            faults += [f"{', '.join(escaped(str(p)) for p in files)}: {what}" for what in bad]
            beside = [p for f in files for p in (f.with_suffix(".env.json"), f.with_name("environment.json"))]
            records = [read_record(p) for p in dict.fromkeys(beside) if p.is_file()]
            fields = {n: "".join(v) for n, v in chip.items() if v} | joined(records)
            sides.append(Side(name, files, rows, records, fields, notes))
    if faults:
        raise InputError(faults)
    return sides


def _files(given: str, runs: Path) -> list[Path]:
    kind, path = locate_input(given, runs)
    if kind == "file":
        return [path]
    run = RunPaths(path)
    files = [p for p in (run.bench_runs, run.profile, run.tuned) if p.is_file()][:1]
    if kind == "folder":
        files = [p for p in sorted(path.glob("*.csv")) if p.is_file() and {*TIMES} & {*read_header(p)}]
    if not files:
        raise InputError(f"{escaped(given)}: holds no CSV of timings (columns kernel, the shape's, us), and is not"
                         " a finished run (with bench_runs.csv, profile.csv or tuned.csv)")  # fmt: skip
    return files


def _read(path: Path, dropped: Sequence[str], notes: list[str]) -> pd.DataFrame:
    """The rows of a file that have a time. Adds the rows left out to `notes`. Raises InputError with the file's
    faults."""
    where, faults = escaped(str(path)), Faults(path)
    records = [(n, cells) for n, _, cells in islice(csv_records(path, None), MAX_LINES + 1) if any(cells)]
    (header, cells), *lines = records or [(1, [])]
    names = [n.removeprefix("\ufeff") for n in cells]
    profiled = is_rocprof(names)
    if profiled:
        names, lines = timings(names, lines, MAX_REPEATS, where)
    time = next((t for t in TIMES if t in names), "")
    kernel = next((some for some in KERNELS if {*some} <= {*names}), ())
    shape = [n for n in names if n not in {*RESULTS, *kernel, *dropped}]
    unnamed = bool({"kernel", *kernel} & {*dropped})
    twice = next((n for n in names if names.count(n) > 1), "")
    lacks = (
        (not records, "is empty"),
        (not all(names), "a column has no name: name it or drop it"),
        (twice, f"column {shown(twice)} is there {names.count(twice)} times: drop one"),
        (not time, "has no column us or time_us"),
        (not kernel, "has no column kernel (or kernelName, or backend)"),
        (not shape and (not profiled or unnamed), "has no column of a shape, such as M,N,K"),
        (len(lines) == MAX_LINES, f"more than {MAX_LINES:,} lines: compare the tuned tables or a benchmark"),
    )
    if what := next((what for bad, what in lacks if bad), ""):
        raise InputError(f"{where}:{header}: {what} (columns: {escaped(', '.join(names))[:300] or 'none'})")
    for n, cells in ((n, cells) for n, cells in lines if len(cells) != len(names)):
        faults.add(f"has {len(cells)} cells, the header {len(names)}; was the file cut short?", line=n)
    faults.raise_as(InputError)
    frame = pd.DataFrame([c for _, c in lines], index=[n for n, _ in lines], columns=pd.Index(names), dtype=object)
    measured = frame[frame["status"].isin(("", *MEASURED))] if "status" in frame else frame
    us = pd.to_numeric(measured[time], errors="coerce").astype(float)
    timed = np.isfinite(us) & (us > 0)
    # rows without a time are normal in a tuner's table
    wrong = ~timed if kernel == ("kernel",) else us.isna() & ~measured[time].isin(NULLS)
    for line, text in measured.loc[wrong, time].items():
        what = f"{shown(text)} is not a time: drop the row, or mark it in a column status"
        faults.add(what, line=int(str(line)), column=time)
    left_out = (len(frame) - len(measured), "whose status is not ok"), (int((~timed).sum()), "without a time")
    notes += [f"{where}: left out {plural(n, 'row')} {why}" for n, why in left_out if n]
    rows = measured[timed].replace(r"^([0-9]+)\.0$", r"\1", regex=True)  # `128` and `128.0` are the same
    out = rows[[*shape, *(n for n in (*CHIP, CONFIG) if n in names)]].assign(us=us[timed])
    named = measured.loc[timed, [*kernel]].itertuples(index=False, name=None)
    kernels = [ANY_KERNEL if unnamed else " + ".join(c for c in cells if c not in NULLS) for cells in named]
    out.insert(0, "kernel", kernels)
    key = out.groupby(["kernel", *shape], sort=False)
    nth = key.cumcount()
    run = next((rows[n] for n in RUNS if n in names), nth)
    first = out.index.to_series().groupby([key.ngroup(), run]).transform("first")
    for bad, what in (
        (out["kernel"] == "", "names no kernel"),
        (first != out.index, "this run of its kernel and shape is in line {} already: drop one, or number the repeats"),
        (nth == MAX_REPEATS, f"more than {MAX_REPEATS} repeats of one kernel and shape: is a column of it missing?"),
    ):
        for line, before in first[bad].items():
            faults.add(what.format(before), line=int(str(line)))
    faults.raise_as(InputError)
    return out


def joined(records: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The fields of several records as one record. Values that differ are listed side by side."""
    names = dict.fromkeys(name for r in records for name in r)
    return {name: " | ".join(sorted({r[name] for r in records if name in r})) for name in names}


def read_record(path: Path) -> dict[str, str]:
    """A record as text fields; members of an object become `switches.NAME`. Raises InputError."""
    where = escaped(str(path))
    try:
        document = json.loads(read_bytes(path, MAX_RECORD, InputError))
    except (ValueError, RecursionError) as e:
        raise InputError(f"{where}:{getattr(e, 'lineno', 1)}: is not JSON: correct it or move it away") from None
    if not isinstance(document, dict) or document.get("format", ENV_FORMAT) != ENV_FORMAT:
        raise InputError(f"{where}:1: is not an environment record, which is one JSON object of format {ENV_FORMAT}")
    fields = [
        item
        for name, value in clean.document(document).items()
        for item in ([(f"{name}.{n}", v) for n, v in value.items()] if isinstance(value, dict) else [(name, value)])
    ]
    return {n: v if isinstance(v, str) else json.dumps(v) for n, v in fields if v not in (None, "")}


def differences(
    golden: Mapping[str, str], tot: Mapping[str, str], under_test: Sequence[str] = ()
) -> list[dict[str, str]]:
    """The fields that differ, the most serious first: `field`, the values `golden` and `tot` ("" for none), and `kind`.

    Differences of machine and method count only if both sides name them, because a side may have no record.
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
    """Return whether all records say that the sides took turns in the same sessions.

    Raises InputError if the records of one bench say that the golden side is its later `--env`.
    """
    for a, b in ((a, b) for a in golden for b in tot if a.get("session") == b.get("session")):
        one, other = a.get("side", ""), b.get("side", "")
        if one.isdecimal() and other.isdecimal() and int(one) > int(other):
            raise InputError(
                f"the sides are swapped: in the bench {escaped(a.get('session', ''))} the golden side here"
                f" ({escaped(a.get('env', ''))}) was --env number {one}, and the tot side"
                f" ({escaped(b.get('env', ''))}) was number {other}. Give the file of the earlier --env first"
            )
    one_side, other_side = ({(r.get("order"), r.get("session", "")) for r in side} for side in (golden, tot))
    return bool(one_side) and one_side == other_side and {order for order, _ in one_side} == {"interleaved"}


Rows = list[dict[str, Any]]


def compare(
    golden: Side, tot: Side, *, rule: Rule = STANDARD, bound: float = BOUND, under_test: Sequence[str] = (),
    other_gpu: bool = False, rule_only: bool = False, again: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Judges `tot` against `golden`, and returns the results as a JSON document (docs/reference/commands.md).

    `rule_only`: use only the rule, which ignores noise, and give only its figures. `again`: the file for the rows to
    measure again, "" for none. Raises InputError if the sides cannot be compared.
    """
    paired = in_turn(golden.records, tot.records)
    found = differences(golden.fields, tot.fields, under_test)
    machine, method = (
        "; ".join(f"{d['field']}: {d['golden']} and {d['tot']}" for d in found if d["kind"] == kind)
        for kind in ("machine", "method")
    )
    if machine and not other_gpu:
        raise InputError(f"the sides are from different machines ({escaped(machine)}): their times say nothing about"
                         " the software; --other-gpu compares them anyway")  # fmt: skip
    _check_common_rows(golden, tot)
    rows, facts = _judged(golden, tot, rule, bound, paired, rule_only)
    counts = {v: sum(r["verdict"] == v for r in rows) for v in VERDICTS}
    out = {
        "counts": counts,
        "rows": rows,
        "rule_only": rule_only,
        "rule": {"rel": rule.rel, "abs_us": rule.abs_us, "ignore_below_us": rule.ignore_below},
        "open": sum(counts[v] for v in OPEN),
        "paired": paired,
        **({} if rule_only else {"expected_false_regressions": bound, **facts}),
        "environment": {"golden": golden.fields, "tot": tot.fields, "differences": found},
        "config_files": _config_files(rows, rule),
        "files": {s.name: [str(f) for f in s.files] for s in (golden, tot)},
        "again": _again([r for r in rows if r["verdict"] in OPEN], golden, tot, again),
        "warnings": [
            *golden.notes, *tot.notes,
            *[f"the sides are from different machines ({machine}): the verdict is not about software"] * bool(machine),
            *[f"not measured in the same way ({method})"] * bool(method),
        ],
    }  # fmt: skip
    regression = out.get("table_slower") or counts["regression"]
    return {"exit_code": 1 if regression else 4 if out["open"] else 0, "summary": _summary(out), **out}


def _check_common_rows(golden: Side, tot: Side) -> None:
    """Raise InputError if no row of one side has its kernel and shape on the other. Names the columns that differ."""
    columns = [str(c) for c in golden.rows if c not in ("us", CONFIG)]
    if not golden.rows.merge(tot.rows, on=columns).empty:
        return
    apart = [c for c in columns if not {*golden.rows[c]} & {*tot.rows[c]}] or columns
    keep = f"column {shown(apart[0])} keeps" if len(apart) == 1 else f"columns {', '.join(map(shown, apart))} keep"
    options = " ".join(f"--ignore-column {quote(c)}" for c in apart)
    raise InputError(
        f"golden and tot have no kernel and shape in common: {keep} their rows apart; leave out what is not part of the"
        f" shape, as with {options}"
    )


def _judged(
    golden: Side, tot: Side, rule: Rule, bound: float, paired: bool, rule_only: bool
) -> tuple[Rows, dict[str, Any]]:
    """The joined rows, the worst first, and the values of the table (`judge`).

    `change` and `seen_from` are shares of the golden time, None if unknown. `golden_repeats` says how many repeats
    agree, such as `1/3`. `golden_config` is there if rows name configs.
    """
    every = pd.concat([golden.rows, tot.rows], keys=[0, 1])
    columns = [c for c in golden.rows if c not in ("us", CONFIG)]
    side, at = every.index.get_level_values(0), every.groupby(columns, sort=False).ngroup().to_numpy()
    nth = every.groupby([side, at]).cumcount()
    us = np.full((2, at.max() + 1, nth.max() + 1), np.nan)
    us[side, at, nth] = every["us"]
    figures, facts = judge(us[0], us[1], rule=rule, bound=bound, paired=paired)
    repeats = {n: map("{}/{}".format, *figures[n]) for n in ("golden_repeats", "tot_repeats")}
    keys = every[columns].drop_duplicates().to_dict("records")
    table = pd.DataFrame({"key": keys, **figures, **{n: list(texts) for n, texts in repeats.items()}})
    if rule_only:
        kept, faster = ("new", "missing", "ignored"), figures["golden_us"] > rule.limit(figures["tot_us"])
        by_rule = np.select([figures["beyond_rule"], faster], ["regression", "improved"], "ok")
        table = table.drop(columns=["p", "seen_from"])
        table["verdict"] = table["verdict"].where(table["verdict"].isin(kept), by_rule)
    if CONFIG in every:
        configs = every.groupby([at, side])[CONFIG].last().unstack()
        table["golden_config"], table["tot_config"] = configs.get(0), configs.get(1)
    order = np.lexsort((-table["change"].abs().fillna(0), table["verdict"].map(VERDICTS.index)))
    table = table.iloc[order].astype(object)
    rows = [{str(n): v for n, v in r.items()} for r in table.where(table.notna(), None).to_dict("records")]
    return rows, {n: np.asarray(v).item() for n, v in facts.items()}


def _config_files(rows: Rows, rule: Rule) -> list[dict[str, Any]]:
    """The files of the new config set, by path, from which a row reads other values than on the golden side.

    A row names the file, bucket and values that it read. `verdict`: `rejected` if a row is a regression, else `open` if
    a row could not be judged, else `accepted`. `default`: the file is read by shapes that have no file of their own.
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
        sure = not any(r["verdict"] in OPEN for r in of)
        out.append({"file": path, "default": "-N=" not in path, "changed": len(of), "slower": slower,
                    "verdict": "rejected" if slower else "accepted" if sure else "open",
                    "faster": [r["key"] for r in of if r["verdict"] == "improved"]})  # fmt: skip
    return out


def _summary(of: Mapping[str, Any]) -> list[str]:
    """The verdict in a few sentences, with its weaknesses."""
    rows, shift = of["rows"], of.get("table_shift")
    counts = ", ".join(f"{n} {verdict}" for verdict, n in of["counts"].items() if n)
    out = [
        *[f"The table as a whole is slower by {percent(shift)}: a regression."] * bool(of.get("table_slower")),
        f"{plural(len(rows), 'row')}: {counts}.",
        *["Judged by the rule alone, which flags nearly every table even if nothing changed."] * of["rule_only"],
        *[NO_REPEATS] * bool(of.get("averaged")),
    ]
    if not of["rule_only"]:
        few = not of["paired"] and of["judged"] < ENOUGH_ROWS
        out += [
            f"If nothing had changed, {of['expected_false_regressions']:g} rows of such a table would be called a"
            f" regression by chance (the rule alone flags {sum(r['beyond_rule'] for r in rows)} here).",
            f"{'Measured in turn' if of['paired'] else 'Unpaired'}: the table as a whole shifted by"
            f" {percent(shift, sign=True)}. Removed as drift:"
            f" {'nothing, as so few rows do not tell it (0.7 % is noise)' if few else percent(of['shift_removed'])}.",
        ]
    for f in of["config_files"]:
        told = f"{plural(f['changed'], 'row')} changed, {len(f['slower'])} slower, {len(f['faster'])} faster"
        out.append(f"{f['verdict']}: {f['file']} ({'default file, ' if f['default'] else ''}{told})")
        out += [f"  {key_text(s['key'])}: {s['old_us']:.2f} -> {s['new_us']:.2f} us, limit {s['limit_us']:.2f} us"
                f" ({of['rule']['rel']:g} x old + {of['rule']['abs_us']:g} us); {s['old']} -> {s['new']}"
                for s in f["slower"]]  # fmt: skip
        if f["slower"] and f["default"] and f["faster"]:
            gained = (key_text({n: v for n, v in key.items() if n in "BNK"}) for key in f["faster"])
            out.append(f"  separate files would keep the gain of {'; '.join(dict.fromkeys(gained))}")
    if same := sum(r["verdict"] == "regression" and r.get("golden_config", "") == r.get("tot_config") for r in rows):
        out.append(f"{plural(same, 'row')} slower with the same config in both sets: no config is the cause")
    if other := [d["field"] for d in of["environment"]["differences"] if d["kind"] == "other"]:
        out.append(f"{', '.join(other)} differ{'s' * (len(other) == 1)} too, and may cause a change")
    return out


def _again(rows: Rows, golden: Side, tot: Side, listed: str) -> str:
    """The command that measures the rows of `listed` again, after the command that lists them; "" if all are judged or
    the rows name no shapes, as a profiler's.

    Its options describe each side again: the stack with its variables, and the config set.
    """
    options = dict[str, None]()
    if not rows or {*rows[0]["key"]} <= {"kernel", *GRID}:
        return ""
    for side in (golden, tot):
        fields, given = side.fields, side.fields.get("under_test", "").split()
        stack = fields.get("env", "").partition(" (")[2].removesuffix(")")  # a bench of ours writes `NAME (PLACE)`
        stack += "".join(f",{n.removeprefix('switches.')}={fields[n]}" for n in given if n in fields)
        if "configs" in fields:
            options |= {f"--env stack={quote(stack)}": None} if stack else {}
            options[f"--config-set {quote(side.name + '=' + fields['configs'].rpartition(' (')[0])}"] = None
        else:
            options[f"--env {side.name}={quote(stack or 'PYTHON')}"] = None
    backends = ",".join(sorted({k.split("/")[0] for r in rows if "/" in (k := r["key"]["kernel"])})) or "BACKEND"
    sides = " ".join(f"--{s.name} {quote(str(f))}" for s in (golden, tot) for f in s.files)
    words = f"bench {quote(listed or 'again.csv')} --backend {quote(backends)} {' '.join(options)}"
    commands = [*([] if listed else [f"compare {sides} --again again.csv"]), f"{words} --repeats {AGAIN_REPEATS}"]
    return "; ".join(map(command, commands))


def percent(share: float | None, *, sign: bool = False) -> str:
    """A share as `+1.2 %`; "" for None."""
    return "" if share is None else f"{100 * share:{'+z' if sign else ''}.{1 if abs(share) >= 0.0995 else 2}f} %"


def key_text(key: Mapping[str, str]) -> str:
    """A row's key as `kernel M=16 N=512 K=128`."""
    return " ".join(v if n == "kernel" else f"{n}={v}" for n, v in key.items())


def write(of: Mapping[str, Any], out: Path | None, again: Path | None) -> None:
    """Write all rows, the worst first, and the keys of rows that could not be judged. Raises InputError."""
    rows, (_, *figures) = of["rows"], of["rows"][0]
    names = list(rows[0]["key"])
    every = ([*r["key"].values(), *(r[n] for n in figures)] for r in rows)
    left = (r["key"].values() for r in rows if r["verdict"] in OPEN)
    for path, header, lines in ((out, [*names, *figures], every), (again, names, left)):
        if path:
            cells = ([no_formula(v) if isinstance(v, str) else cell(v) for v in line] for line in lines)
            write_output(path, csv_text(header, cells))
