"""The document of a comparison: both sides joined by kernel and shape and judged; printed as tables, Markdown, CSV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import expm1
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import pandas as pd

from orchestrator.command_hints import command
from orchestrator.errors import InputError
from orchestrator.results.compare import (
    AGAIN_BOUND,
    BOUND,
    ENOUGH_ROWS,
    OPEN,
    STANDARD,
    VERDICTS,
    Judged,
    Rule,
    judge,
)
from orchestrator.results.compare_sides import CONFIG, Side, differences, in_turn, refuse_swapped
from orchestrator.results.grid import Grid, marked, safe
from orchestrator.tables.faults import escaped, shown
from orchestrator.tables.write import cell, no_formula, write_csv
from worker.text import plural

AGAIN_REPEATS = 7
MOST_ROWS = 60
MEANS = {"machine": "another machine", "method": "measured differently", "other": "differs too", "test": "under test"}
HEADS = {
    "golden_us": "golden us", "tot_us": "tot us", "change": "change", "verdict": "verdict", "p": "p",
    "seen_from": "seen from", "golden_repeats": "golden runs", "tot_repeats": "tot runs",
}  # fmt: skip
"""The columns of a row's figures, by their names in the document."""
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
    warnings = [*golden.notes, *tot.notes]
    if machine:
        warnings.append(f"the sides are of different machines ({machine}): a verdict is not one on the software")
    if method:
        warnings.append(f"not measured in the same way ({method})")
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


def environments(of: Mapping[str, Any]) -> Grid:
    """The fields of the environment records that differ, and what that means."""
    found = [d for d in of["environment"]["differences"] if d["kind"] in MEANS]
    rows = [(d["field"], d["golden"], d["tot"], MEANS[d["kind"]]) for d in found]
    return Grid(("environment", "golden", "tot", ""), rows, ("environment", "golden", "tot", ""))


def table(of: Mapping[str, Any]) -> Grid:
    """The first rows, and all that regressed or could not be judged."""
    told = [r for i, r in enumerate(of["rows"]) if i < MOST_ROWS or r["verdict"] in ("regression", *OPEN)]
    names = [n for n in HEADS if n in told[0]]
    cells = [(*r["key"].values(), *(_figure(n, r[n]) for n in names)) for r in told]
    keys = list(told[0]["key"])
    bold = [len(keys) + names.index("verdict") if r["verdict"] == "regression" else None for r in told]
    return Grid([*keys, *(HEADS[n] for n in names)], cells, ("kernel", "verdict"), bold)


def _figure(name: str, value: Any) -> str:
    if name in ("change", "seen_from"):
        return percent(value, sign=True)
    text = f"{value:.2g}" if name == "p" and value is not None else value
    return "" if text is None else text if isinstance(text, str) else f"{text:.2f}"


def sentences(of: Mapping[str, Any], listed: str) -> list[str]:
    """The verdict in sentences, and the command that measures what could not be judged; `listed`: see `--again`."""
    out = list(of["summary"])
    if left := len(of["rows"]) - len(table(of).rows):
        out.insert(0, f"... and {plural(left, 'more row')} (all with --out or --json)")
    if of["open"]:
        sides = " ".join(f"--{name} {quote(f)}" for name, files in of["files"].items() for f in files)
        again = of["again"].replace("again.csv", quote(listed or "again.csv"), 1)
        first = "" if listed else command(f"compare {sides} --again again.csv") + "; "
        bound = "" if of["rule_only"] else f" with --bound {AGAIN_BOUND:g}"
        out.append(f"{plural(of['open'], 'row')} could not be judged. Measure again, in turn and seven times, and"
                   f" compare the new files{bound}:")  # fmt: skip
        out.append(f"  {first}{again}")
    return out


def markdown(of: Mapping[str, Any]) -> Iterator[str]:
    """Lines of Markdown for a pull request."""
    head = {0: "No regression", 1: "Regression", 4: "Not all could be judged"}[of["exit_code"]]
    yield from (f"### {head}: golden against tot", "")
    yield from (f"- {safe(line.strip())}" for line in (*sentences(of, ""), *of["warnings"]))
    yield from marked(environments(of))
    yield from marked(table(of))


def write_rows(of: Mapping[str, Any], path: Path) -> None:
    """Writes all rows as CSV, the worst first. Raises OSError."""
    keys, *figures = of["rows"][0]
    rows = ([*r[keys].values(), *(r[n] for n in figures)] for r in of["rows"])
    cells = ([no_formula(v) if isinstance(v, str) else cell(v) for v in row] for row in rows)
    write_csv(path, [*of["rows"][0][keys], *figures], cells)


def write_again(of: Mapping[str, Any], path: Path) -> None:
    """Writes the kernels and shapes that could not be judged, for a benchmark. Raises OSError."""
    rows = [map(no_formula, r["key"].values()) for r in of["rows"] if r["verdict"] in OPEN]
    write_csv(path, list(of["rows"][0]["key"]), rows)
