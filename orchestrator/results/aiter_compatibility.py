"""What happens to tuned tables when AITER loads them: what it refuses, what it never selects, what it must rebuild.

Read from ROCm/aiter at e4048607a5: `AITER_CONFIG` in aiter/jit/core.py (merging and duplicates), the dispatch tables of
csrc/ck_gemm_*/*.cu and csrc/ck_batched_gemm_*/*.cu (what is compiled in), aiter/jit/optCompilerConfig.json (from which
tables it is).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from orchestrator.tables.faults import listed
from orchestrator.tables.tuned import Key, TunedFile, kernel_of
from orchestrator.tuned_db.compatibility import KindError, refuse_mixture, rows_by_kind
from orchestrator.tuned_db.kinds import describe_own
from orchestrator.tuned_db.records import known_records
from worker.families import backend_of
from worker.text import plural

if TYPE_CHECKING:
    from orchestrator.tuned_db.aiter_build import Build, Standing

COMPILED = ("ck", "cktile")
"""Backends whose kernels are compiled from the table that is there when their module is built."""
SHOWN = 5
Level = Literal["fatal", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`fatal`: AITER does not start, or uses nothing of the table."""

    level: Level
    text: str


def duplicates(sources: Sequence[TunedFile]) -> list[Finding]:
    """Keys that come more than once over all tables of a family, which AITER merges at its start."""
    seen: dict[tuple[Key, str], str] = {}
    doubled = []
    for source in sources:
        for row in source.table.rows:
            here = f"{source.path}:{row.line}"
            first = seen.setdefault((row.key, row.tag), here)
            if first != here:
                doubled.append(f"{here} has the key of {first}")
    if not doubled:
        return []
    what = (
        f"{sources[0].family.name}: {plural(len(doubled), 'row has', 'rows have')} the key of another row:"
        " AITER since 2026-04-01 rewrites"
        " the tables and stops with an error at its start; -o DIR writes one table with the fastest row of each key"
    )
    return [Finding("fatal", "\n".join((what, *listed(doubled, SHOWN))))]


def never_selected(source: TunedFile, chips: Iterable[tuple[str, int]]) -> list[Finding]:
    """Rows of another chip than those in use: (gfx, cu_num) is part of the key."""
    targets = set(chips)
    if not targets:
        return []
    there = {(str(r.key[0]), int(r.key[1])) for r in source.table.rows}
    out = []
    for gfx, cu_num in sorted(targets - there):
        has = ", ".join(f"{g or '?'} with {c}" for g, c in sorted(there)) or "nothing"
        text = (
            f"{source.path}: no row is for {gfx} with {cu_num} compute units (it has {has}): AITER selects none there"
        )
        out.append(Finding("fatal", text))
    other = sum((str(r.key[0]), int(r.key[1])) not in targets for r in source.table.rows)
    if other and not out:
        rows = plural(other, "row is", "rows are")
        out.append(Finding("note", f"{source.path}: {rows} for other chips and never selected"))
    return out


def rebuild(source: TunedFile) -> list[Finding]:
    """Rows whose kernels AITER may have to compile before it can use them, where no build is at hand to ask."""
    need, opus = [], 0
    for row in source.table.rows:
        cells = source.cells(row)
        backend = backend_of(source.family.name, cells)
        opus += backend == "opus" and source.family.name == "a16w16"
        if backend in COMPILED and not source.family.two_stages:
            need.append(f"{','.join(map(str, row.key))} {cells.get('kernelName', '')}")
    out = []
    if need:
        text = (
            f"{source.path}: {len(need)} of {plural(len(source.table.rows), 'row')} with CK winners that may be"
            " outside what the image holds: --build TREE|IMAGE checks it; start once with AITER_REBUILD=1 and the line"
            " above set, or build the image with this table"
        )
        out.append(Finding("warning", "\n".join((text, *listed(need, SHOWN)))))
    if opus:
        out.append(_opus(source, opus))
    return out


def against_build(source: TunedFile, build: Build) -> list[Finding]:
    """What a build makes of the rows of a table: `fatal` where it cannot load one, or cannot be asked."""
    found: dict[Standing, list[str]] = {}
    opus = 0
    for row in source.table.rows:
        cells = source.cells(row)
        answer = build.answer(source.family, row.key, cells)
        opus += answer.opus and answer.standing == "rebuild" and source.family.name == "a16w16"
        why = f": {answer.why}" if answer.standing != "rebuild" else f" {kernel_of(cells)}"
        found.setdefault(answer.standing, []).append(f"{source.path}:{row.line}: {','.join(map(str, row.key))}{why}")
    rows = len(source.table.rows)
    out = []
    if bad := found.get("cannot"):
        text = f"{source.path}: {len(bad)} of {plural(rows, 'row')} cannot be loaded by {build.name}, rebuilt or not"
        out.append(Finding("fatal", "\n".join((text, *listed(bad, SHOWN)))))
    if unread := found.get("unread"):
        text = f"{source.path}: {len(unread)} of {plural(rows, 'row')} could not be checked against {build.name}"
        out.append(Finding("fatal", "\n".join((text, *listed([*build.problems, *unread], SHOWN)))))
    if need := found.get("rebuild"):
        text = (
            f"{source.path}: {len(need)} of {plural(rows, 'row')} with CK winners outside what {build.name} was"
            " compiled from: start once with AITER_REBUILD=1 and the line above set, or build the image with this table"
        )
        if not bad and not unread:
            out.append(Finding("warning", "\n".join((text, *listed(need, SHOWN)))))
    if opus and not bad:
        out.append(_opus(source, opus))
    return out


def _opus(source: TunedFile, rows: int) -> Finding:
    text = (
        f"{source.path}: {plural(rows, 'row names an opus kernel', 'rows name opus kernels')}, which AITER compiles"
        " only for tables called"
        " model_configs/*_bf16_tuned_gemm.csv: export with --model and start once with AITER_REBUILD=1"
    )
    return Finding("warning", text)


def refuse_own(sources: Iterable[TunedFile]) -> None:
    """Raise KindError for tables with rows of our own tuners, by file and line."""
    for s in sources:
        known = known_records(s.table)
        refuse_mixture(s.path, s.table, known)
        if own := rows_by_kind(s.table, known).get("own"):
            lines = (f"{s.path}:{r.line}: {describe_own(s.cells(r))}" for r in own)
            what = f"{s.path}: is a table of gemmfleet's own kernels: AITER loads none of them"
            raise KindError([what, *listed(lines, SHOWN)])


def best_rows(sources: Sequence[TunedFile]) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """(header, rows) of one table with the fastest row of each key; gfx is filled in where a table lacks it."""
    header = dict.fromkeys(sources[0].family.tuned_header)
    for s in sources:
        header |= dict.fromkeys(s.table.header)
    best: dict[tuple[Key, str], tuple[float, dict[str, str]]] = {}
    for s in sources:
        for row in s.table.rows:
            cells = {**s.cells(row), "gfx": str(row.key[0])}
            us = row.us if row.us is not None else float("inf")
            at = (row.key, row.tag)
            if at not in best or us < best[at][0]:
                best[at] = (us, cells)
    there = {name for _, cells in best.values() for name in cells}
    names = tuple(n for n in header if n in there)
    return names, [cells for _, cells in best.values()]
