"""Verdict on each changed config file of two config sets: rejected where a shape that reads it became slower.

A row names the file, bucket and values that it read (`aiter_config`). Rows that read the same values on both sides show
what nothing changed looks like. A default file is read by every shape without a file of its own: one that gains shapes
and slows others down is to become files of those shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from orchestrator.analysis.compare.join import Comparison, Row
from worker.text import plural


def changed_files(of: Comparison) -> list[dict[str, Any]]:
    """The files of the new set, by path, from which a row reads other values than on the golden side; [] where rows
    name no configs.

    `verdict`: `rejected` (a row is a regression), `open` (else, a row could not be judged) or `accepted`; `default`: a
    file that shapes without one of their own read; `changed`, `faster`: rows; `slower`: rows with times and limit.
    """
    files: dict[str, list[Row]] = {}
    for row in of.rows:
        if _changed(row):
            files.setdefault(row.configs[1].split(" ")[0], []).append(row)
    out = []
    for path, rows in sorted(files.items()):
        slower = [_measured(of, r) for r in rows if r.verdict == "regression"]
        faster = [dict(_shape(of, r)) for r in rows if r.verdict == "improved"]
        verdict = "rejected" if slower else "open" if any(r.second_look for r in rows) else "accepted"
        out.append({"file": path, "default": "-N=" not in path, "verdict": verdict, "changed": len(rows),
                    "faster": faster, "slower": slower})  # fmt: skip
    return out


def sentences(of: Comparison) -> list[str]:
    """The verdicts with their reasons: shape, old and new time, limit."""
    out = []
    for f in changed_files(of):
        counts = f"{plural(f['changed'], 'row')} changed, {len(f['slower'])} slower, {len(f['faster'])} faster"
        out.append(f"{f['verdict']}: {f['file']} ({'default file, ' if f['default'] else ''}{counts})")
        for s in f["slower"]:
            out.append(
                f"  {' '.join(s['key'])}: {s['old_us']:.2f} -> {s['new_us']:.2f} us, limit {s['limit_us']:.2f} us"
                f" ({of.rule.rel:g} x old + {of.rule.abs_us:g} us); {s['old']} -> {s['new']}"
            )
        gained = dict.fromkeys(" ".join(f"{n}={v}" for n, v in key.items() if n in "BNK") for key in f["faster"])
        if f["slower"] and f["default"] and gained:
            out.append(f"  files of their own would keep what {'; '.join(gained)} gained")
    same = sum(all(r.configs) and not _changed(r) and r.verdict == "regression" for r in of.rows)
    if same:
        out.append(f"{plural(same, 'row')} slower with the same config in both sets: that is no config's doing")
    return out


def _changed(row: Row) -> bool:
    old, new = (c.split(" ")[2:] for c in row.configs)
    return bool(old and new) and old != new


def _shape(of: Comparison, row: Row) -> Iterator[tuple[str, str]]:
    return zip(of.columns[1:], row.key[1:], strict=True)


def _measured(of: Comparison, row: Row) -> dict[str, Any]:
    key = [row.key[0], *(f"{n}={v}" for n, v in _shape(of, row))]
    old, new = (c.partition(" ")[2] for c in row.configs)
    limit = float(of.rule.limit(np.asarray(row.golden_us, dtype=float)))
    return {"key": key, "old_us": row.golden_us, "new_us": row.tot_us, "limit_us": limit, "old": old, "new": new}
