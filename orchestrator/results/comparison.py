"""Makes the document of `compare`: joins the sides by kernel and shape, has them judged, and words the summary.

The command reads the sides (`sides.py`), calls `compare` here, writes files with `write`, and shows the document
(`output.py`). `verdicts.py` judges the times; `environment_record.py` says in what the environments differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from orchestrator.command_hints import command
from orchestrator.errors import InputError
from orchestrator.files.cells import cell, no_formula
from orchestrator.files.faults import escaped, shown
from orchestrator.files.write import csv_text, write_output
from orchestrator.pages import Document
from orchestrator.results.environment_record import differences, place_of, refuse_swapped_sides, took_turns
from orchestrator.results.sides import CONFIG, GRID, ComparedSide
from orchestrator.results.verdicts import ENOUGH_ROWS, OPEN, VERDICTS, RegressionRule, judge
from worker.text import plural

AGAIN_REPEATS = 7
"""Repeats of the command that measures rows again which could not be judged."""
NO_REPEATS = (
    "No row has repeats, so the noise is unknown and no row is judged: measure each three times. --rule-only judges by"
    " the rule alone, but it knows no noise and accuses most unchanged tables."
)
Rows = list[Document]
"""Rows of the document, as `{"key": {"kernel": "ck", "M": "16", ...}, "golden_us": 9.9, "verdict": "ok", ...}`. The
figures behind the key are those of `verdicts.judge`. `golden_config` and `tot_config`, as `FILE BUCKET VALUES`, are
there if rows name configs."""


class ConfigRead(NamedTuple):
    """The config that a row was measured with, from `FILE BUCKET VALUES` (`config_read` of worker/bench/config_set.py).

    `FILE` is the path below AITER's configs: `gemm/gfx950-GEMM-A16W16.json M_LEQ_64 BLOCK_SIZE_M=16,...`.
    """

    file: str
    bucket: str
    values: str

    @classmethod
    def parse(cls, text: object) -> ConfigRead | None:
        """The config of a cell; None if the row names none."""
        words = str(text or "").split(" ", 2)
        return cls(*words) if len(words) == 3 else None

    @property
    def entry(self) -> str:
        """Bucket and values, as a row of `_config_files` shows them."""
        return f"{self.bucket} {self.values}"


def compare(
    golden: ComparedSide,
    tot: ComparedSide,
    *,
    rule: RegressionRule,
    bound: float,
    under_test: Sequence[str],
    other_gpu: bool,
    rule_only: bool,
    again_file: str,
) -> Document:
    """Judges `tot` against `golden`, and returns the results as a JSON document (docs/reference/commands.md).

    `bound`: regressions that may be found by chance in a table in which nothing changed. `rule_only`: use only the
    rule, which ignores noise, and give only its figures. `again_file`: where the rows to measure again are written, ""
    for nowhere. Raises InputError if the sides cannot be compared.
    """
    refuse_swapped_sides(golden.records, tot.records)
    paired = took_turns(golden.records, tot.records)
    differing = differences(golden.fields, tot.fields, under_test)
    machine = _describe_differing(differing, "machine")
    method = _describe_differing(differing, "method")
    if machine and not other_gpu:
        raise InputError(
            f"the sides are from different machines ({escaped(machine)}): their times say nothing about the software;"
            " --other-gpu compares them anyway"
        )
    warnings = [*golden.notes, *tot.notes]
    if machine:
        warnings.append(f"the sides are from different machines ({machine}): the verdict is not about software")
    if method:
        warnings.append(f"not measured in the same way ({method})")
    _check_common_rows(golden, tot)
    rows, table_values = _judged_rows(golden, tot, rule, bound, paired)
    noise = {"expected_false_regressions": bound, **table_values}
    if rule_only:
        _judge_by_rule(rows, rule)
        noise = {}
    rows.sort(key=_by_severity)
    counts = dict.fromkeys(VERDICTS, 0) | Counter(row["verdict"] for row in rows)
    results = {
        "counts": counts,
        "rows": rows,
        "rule_only": rule_only,
        "rule": {"rel": rule.rel, "abs_us": rule.abs_us, "ignore_below_us": rule.ignore_below},
        "open": sum(counts[verdict] for verdict in OPEN),
        "paired": paired,
        **noise,
        "environment": {"golden": golden.fields, "tot": tot.fields, "differences": differing},
        "config_files": _config_files(rows, rule),
        "files": {side.name: list(map(str, side.files)) for side in (golden, tot)},
        "again": _commands_again(rows, golden, tot, again_file),
        "warnings": warnings,
    }
    return {"exit_code": _exit_code(results), "summary": list(_summary(results)), **results}


def _exit_code(results: Document) -> int:
    """1 if a row or the table is a regression, else 4 if rows could not be judged."""
    if results["counts"]["regression"] or results.get("table_slower"):
        return 1
    return 4 if results["open"] else 0


def _describe_differing(differing: Sequence[Mapping[str, str]], kind: str) -> str:
    """The fields of this kind that differ, as `gpu: MI300X and MI355X; ...`."""
    return "; ".join(f"{d['field']}: {d['golden']} and {d['tot']}" for d in differing if d["kind"] == kind)


def _check_common_rows(golden: ComparedSide, tot: ComparedSide) -> None:
    """Raise InputError if no row of one side has its kernel and shape on the other. Names the columns that differ."""
    columns = _key_columns(golden)
    if not golden.rows.merge(tot.rows, on=columns).empty:
        return
    disjoint = [c for c in columns if not {*golden.rows[c]} & {*tot.rows[c]}] or columns
    keep = f"columns {', '.join(map(shown, disjoint))} keep"
    if len(disjoint) == 1:
        keep = f"column {shown(disjoint[0])} keeps"
    options = " ".join(f"--ignore-column {quote(column)}" for column in disjoint)
    raise InputError(
        f"golden and tot have no kernel and shape in common: {keep} their rows apart; leave out what is not part of the"
        f" shape, as with {options}"
    )


def _key_columns(side: ComparedSide) -> list[str]:
    return [str(column) for column in side.rows if column not in ("us", CONFIG)]


def _judged_rows(
    golden: ComparedSide, tot: ComparedSide, rule: RegressionRule, bound: float, paired: bool
) -> tuple[Rows, Document]:
    """The joined rows, and the values of the table (`judge`). `golden_repeats` and `tot_repeats` say how many repeats
    agree, such as `1/3`."""
    # the times as (side, row, repeat), NaN for repeats that a row does not have
    all_rows = pd.concat([golden.rows, tot.rows], keys=[0, 1])
    columns = _key_columns(golden)
    side = all_rows.index.get_level_values(0)
    row_number = all_rows.groupby(columns, sort=False).ngroup().to_numpy()
    repeat = all_rows.groupby([side, row_number]).cumcount()
    us = np.full((2, row_number.max() + 1, repeat.max() + 1), np.nan)
    us[side, row_number, repeat] = all_rows["us"]

    # a column for each figure, a row for each kernel and shape
    figures, table_values = judge(us[0], us[1], rule=rule, bound=bound, paired=paired)
    for name in ("golden_repeats", "tot_repeats"):
        agreeing, all_repeats = figures[name]
        figures[name] = [f"{n}/{total}" for n, total in zip(agreeing, all_repeats, strict=True)]
    table = pd.DataFrame({"key": all_rows[columns].drop_duplicates().to_dict("records"), **figures})
    if CONFIG in all_rows:
        configs = all_rows.groupby([row_number, side])[CONFIG].last().unstack()
        table["golden_config"] = configs.get(0)
        table["tot_config"] = configs.get(1)
    table = table.astype(object)
    rows = table.where(table.notna(), None).to_dict("records")
    return rows, {name: np.asarray(value).item() for name, value in table_values.items()}  # type: ignore[return-value]


def _judge_by_rule(rows: Rows, rule: RegressionRule) -> None:
    """Replace the verdicts that know the noise by those of the rule, and drop the figures that rest on the noise."""
    for row in rows:
        del row["p"], row["seen_from"]
        if row["verdict"] in ("new", "missing", "ignored"):
            continue
        if row["beyond_rule"]:
            row["verdict"] = "regression"
        elif row["golden_us"] > rule.limit(row["tot_us"]):
            row["verdict"] = "improved"
        else:
            row["verdict"] = "ok"


def _by_severity(row: Document) -> tuple[int, float]:
    """Key that sorts the worst verdicts first, and the largest changes first among them."""
    return VERDICTS.index(row["verdict"]), -abs(row["change"] or 0.0)


def _config_files(rows: Rows, rule: RegressionRule) -> list[Document]:
    """The files of the new config set, by path, from which a row reads other values than on the golden side.

    `verdict`: `rejected` if a row is a regression, else `open` if a row could not be judged, else `accepted`.
    `default`: the file is read by shapes that have no file of their own. `changed`: number of the rows that read other
    values; `slower`, `faster`: which of them are.
    """
    changed: dict[str, Rows] = {}
    for row in rows:
        old = ConfigRead.parse(row.get("golden_config"))
        new = ConfigRead.parse(row.get("tot_config"))
        if old and new and old.values != new.values:
            changed.setdefault(new.file, []).append({**row, "old": old.entry, "new": new.entry})
    documents = []
    for path, file_rows in sorted(changed.items()):
        slower = [_slower_row(row, rule) for row in file_rows if row["verdict"] == "regression"]
        verdict = "accepted"
        if slower:
            verdict = "rejected"
        elif any(row["verdict"] in OPEN for row in file_rows):
            verdict = "open"
        documents.append(
            {
                "file": path,
                "default": "-N=" not in path,
                "changed": len(file_rows),
                "slower": slower,
                "verdict": verdict,
                "faster": [row["key"] for row in file_rows if row["verdict"] == "improved"],
            }
        )
    return documents


def _slower_row(row: Document, rule: RegressionRule) -> Document:
    return {
        "key": row["key"],
        "old_us": row["golden_us"],
        "new_us": row["tot_us"],
        "old": row["old"],
        "new": row["new"],
        "limit_us": float(rule.limit(row["golden_us"])),
    }


def _summary(results: Document) -> Iterator[str]:
    """The verdict in a few sentences, with its weaknesses."""
    rows = results["rows"]
    if results.get("table_slower"):
        yield f"The table as a whole is slower by {percent(results['table_shift'])}: a regression."
    counts = ", ".join(f"{n} {verdict}" for verdict, n in results["counts"].items() if n)
    yield f"{plural(len(rows), 'row')}: {counts}."
    if results["rule_only"]:
        yield "Judged by the rule alone, which flags nearly every table even if nothing changed."
    else:
        yield from _noise_sentences(results)
    for config in results["config_files"]:
        yield from _config_sentences(config, results["rule"])
    slower = [row for row in rows if row["verdict"] == "regression"]
    same_config = sum(row.get("golden_config", "") == row.get("tot_config") for row in slower)
    if same_config:
        yield f"{plural(same_config, 'row')} slower with the same config in both sets: no config is the cause"
    others = [d["field"] for d in results["environment"]["differences"] if d["kind"] == "other"]
    if others:
        verb = "differs" if len(others) == 1 else "differ"
        yield f"{', '.join(others)} {verb} too, and may cause a change"


def _noise_sentences(results: Document) -> Iterator[str]:
    """Sentences on the chance of a false verdict, and on the drift."""
    if results["averaged"]:
        yield NO_REPEATS
    by_rule = sum(row["beyond_rule"] for row in results["rows"])
    yield (
        f"If nothing had changed, {results['expected_false_regressions']:g} rows of such a table would be called a"
        f" regression by chance (the rule alone flags {by_rule} here)."
    )
    order = "Measured in turn" if results["paired"] else "Unpaired"
    removed = percent(results["shift_removed"])
    if not results["paired"] and results["judged"] < ENOUGH_ROWS:
        removed = "nothing, as so few rows do not tell it (0.7 % is noise)"
    shift = percent(results["table_shift"], sign=True)
    yield f"{order}: the table as a whole shifted by {shift}. Removed as drift: {removed}."


def _config_sentences(config: Document, rule: Mapping[str, float]) -> Iterator[str]:
    """The verdict on a config file; its slower rows; what separate files would keep of a default file's gain."""
    slower = config["slower"]
    kind = "default file, " if config["default"] else ""
    counts = f"{plural(config['changed'], 'row')} changed, {len(slower)} slower, {len(config['faster'])} faster"
    yield f"{config['verdict']}: {config['file']} ({kind}{counts})"
    for row in slower:
        yield (
            f"  {key_text(row['key'])}: {row['old_us']:.2f} -> {row['new_us']:.2f} us, limit {row['limit_us']:.2f} us"
            f" ({rule['rel']:g} x old + {rule['abs_us']:g} us); {row['old']} -> {row['new']}"
        )
    if slower and config["default"] and config["faster"]:
        gained = [{name: key[name] for name in key if name in ("B", "N", "K")} for key in config["faster"]]
        yield f"  separate files would keep the gain of {'; '.join(dict.fromkeys(map(key_text, gained)))}"


def _commands_again(rows: Rows, golden: ComparedSide, tot: ComparedSide, again_file: str) -> str:
    """The command that measures the rows of `again_file` again; without such a file, the command that writes one before
    it. "" if all rows are judged, or name no shapes, as a profiler's."""
    kernels = [row["key"]["kernel"] for row in rows if row["verdict"] in OPEN]
    if not kernels or {*rows[0]["key"]} <= {"kernel", *GRID}:
        return ""
    commands = []
    if not again_file:
        sides = []
        for side in (golden, tot):
            sides += [f"--{side.name} {quote(str(path))}" for path in side.files]
        commands.append(f"compare {' '.join(sides)} --again again.csv")
    backends = sorted({kernel.split("/")[0] for kernel in kernels if "/" in kernel}) or ["BACKEND"]
    options = " ".join(dict.fromkeys((*_bench_options(golden), *_bench_options(tot))))
    backend = quote(",".join(backends))
    commands.append(f"bench {quote(again_file or 'again.csv')} --backend {backend} {options} --repeats {AGAIN_REPEATS}")
    return "; ".join(map(command, commands))


def _bench_options(side: ComparedSide) -> Iterator[str]:
    """The options of `bench` that describe a side again: the stack with its variables, and the config set."""
    fields = side.fields
    stack = place_of(fields)
    for name in fields.get("under_test", "").split():
        if name in fields:
            stack += f",{name.removeprefix('switches.')}={fields[name]}"
    if "configs" not in fields:
        yield f"--env {side.name}={quote(stack or 'PYTHON')}"
        return
    if stack:
        yield f"--env stack={quote(stack)}"
    folder = fields["configs"].rpartition(" (")[0]  # of `DIR (3 files, sha256 ...)` (bench/request.py)
    yield f"--config-set {quote(f'{side.name}={folder}')}"


def percent(share: float | None, *, sign: bool = False) -> str:
    """A share as `+1.2 %`; "" for None."""
    if share is None:
        return ""
    digits = 1 if abs(share) >= 0.0995 else 2
    return f"{100 * share:{'+z' if sign else ''}.{digits}f} %"


def key_text(key: Mapping[str, str]) -> str:
    """A row's key as `kernel M=16 N=512 K=128`."""
    return " ".join(value if name == "kernel" else f"{name}={value}" for name, value in key.items())


def write(results: Document, out: Path | None, again: Path | None) -> None:
    """Write all rows to `out`, the worst first, and to `again` the keys of those that could not be judged. Raises
    InputError."""
    rows = results["rows"]
    keys = list(rows[0]["key"])
    figures = list(rows[0])[1:]
    if out:
        _write_rows(out, [*keys, *figures], ([*row["key"].values(), *(row[n] for n in figures)] for row in rows))
    if again:
        _write_rows(again, keys, (list(row["key"].values()) for row in rows if row["verdict"] in OPEN))


def _write_rows(path: Path, header: Sequence[str], rows: Iterator[list[Any]]) -> None:
    cells = ([no_formula(value) if isinstance(value, str) else cell(value) for value in row] for row in rows)
    write_output(path, csv_text(header, cells))
