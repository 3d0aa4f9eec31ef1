"""Verdict on each changed config file of two config sets: rejected where a shape that reads it became slower.

A row names the file, bucket and values that it read (`aiter_config`). Rows that read the same values on both sides show
what nothing changed looks like. A default file is read by every shape without a file of its own: one that gains shapes
and slows others down is to become files of those shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from orchestrator.analysis.compare.join import Comparison, Row
from worker.text import plural


@dataclass(slots=True)
class ChangedFile:
    """A file of the new set and the rows that read other values from it than before."""

    path: str
    rows: list[Row] = field(default_factory=list)

    @property
    def default(self) -> bool:
        """True for a file that shapes without one of their own read."""
        return "-N=" not in self.path

    @property
    def verdict(self) -> Literal["rejected", "open", "accepted"]:
        """`open`: nothing is slower, and not all rows could be judged."""
        if self.of("regression"):
            return "rejected"
        return "open" if any(r.suspect for r in self.rows) else "accepted"

    def of(self, verdict: str) -> list[Row]:
        """Rows of a verdict."""
        return [r for r in self.rows if r.verdict == verdict]


def changed_files(of: Comparison) -> list[ChangedFile]:
    """The files by path that give a row other values than the golden side has; [] where rows name no configs."""
    files: dict[str, ChangedFile] = {}
    for row in of.rows:
        if _changed(row):
            path = row.configs[1].split(" ")[0]
            files.setdefault(path, ChangedFile(path)).rows.append(row)
    return [files[path] for path in sorted(files)]


def sentences(of: Comparison) -> list[str]:
    """The verdicts with their reasons: shape, old and new time, limit."""
    out = []
    for file in changed_files(of):
        slower, faster = file.of("regression"), file.of("improved")
        kind = "default file, " if file.default else ""
        counts = f"{plural(len(file.rows), 'row')} changed, {len(slower)} slower, {len(faster)} faster"
        out.append(f"{file.verdict}: {file.path} ({kind}{counts})")
        out += [f"  {line}" for line in _reasons(of, slower)]
        if slower and faster and file.default:
            gained = dict.fromkeys(" ".join(f"{n}={v}" for n, v in _shape(of, r) if n in "BNK") for r in faster)
            out.append(f"  files of their own would keep what {'; '.join(gained)} gained")
    same = [r for r in of.rows if all(r.configs) and not _changed(r) and r.verdict == "regression"]
    if same:
        out.append(f"{plural(len(same), 'row')} slower with the same config in both sets: that is no config's doing")
    return out


def document(of: Comparison) -> list[dict[str, Any]]:
    """The same as data."""
    return [
        {"file": f.path, "default": f.default, "verdict": f.verdict, "changed": len(f.rows),
         "faster": len(f.of("improved")), "slower": [_measured(of, r) for r in f.of("regression")]}
        for f in changed_files(of)
    ]  # fmt: skip


def _changed(row: Row) -> bool:
    old, new = (c.split(" ")[2:] for c in row.configs)
    return bool(old and new) and old != new


def _shape(of: Comparison, row: Row) -> Iterator[tuple[str, str]]:
    yield from zip(of.columns[1:], row.key[1:], strict=True)


def _measured(of: Comparison, row: Row) -> dict[str, Any]:
    limit = float(of.rule.limit(np.asarray(row.golden_us))) if row.golden_us else None
    key = dict(zip(of.columns, row.key, strict=True))
    return {"key": key, "old_us": row.golden_us, "new_us": row.tot_us, "limit_us": limit, "configs": list(row.configs)}


def _reasons(of: Comparison, rows: list[Row]) -> Iterator[str]:
    rule = f"{of.rule.rel:g} x old + {of.rule.abs_us:g} us"
    for row in rows:
        m = _measured(of, row)
        shape = " ".join(f"{n}={v}" for n, v in _shape(of, row))
        old, new = (c.partition(" ")[2] for c in row.configs)
        yield (
            f"{row.key[0]} {shape}: {m['old_us']:.2f} -> {m['new_us']:.2f} us, limit {m['limit_us']:.2f} us ({rule});"
            f" {old} -> {new}"
        )
