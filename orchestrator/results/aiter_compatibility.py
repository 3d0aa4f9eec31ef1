"""Tuned tables as AITER loads them: rows that it refuses, never selects or must rebuild; names of a model's tables.

Read from ROCm/aiter at e4048607a5: `AITER_CONFIG` in aiter/jit/core.py (merging and duplicates), the dispatch tables of
csrc/ck_gemm_*/*.cu and csrc/ck_batched_gemm_*/*.cu (what is compiled in), aiter/jit/optCompilerConfig.json (from which
tables it is).

AITER merges every file of model_configs whose name holds the family's table name and not the word "untuned"
(`get_config_file` in aiter/jit/core.py). Two forms are in use: `<model>_<table>.csv` and `<table>_<model>.csv`; opus
kernels of bf16 are compiled for the first form alone. Each has a twin that lists the shapes, `untuned` for `tuned`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from orchestrator.errors import InputError
from orchestrator.tables.faults import listed
from orchestrator.tables.tuned import Key, Table, kernel_of
from orchestrator.tuned_db.compatibility import KindError, refuse_mixture, rows_by_kind
from orchestrator.tuned_db.kinds import describe_own
from orchestrator.tuned_db.records import known_records
from worker.families import FAMILIES, Family, backend_of
from worker.text import plural

if TYPE_CHECKING:
    from orchestrator.tuned_db.aiter_build import Build, Standing

COMPILED = ("ck", "cktile")
"""Backends whose kernels are compiled from the table that is there when their module is built."""
SHOWN = 5
Level = Literal["fatal", "warning", "note"]


@dataclass(frozen=True, slots=True)
class LoadFinding:
    """`fatal`: AITER does not start, or uses nothing of the table."""

    level: Level
    text: str


def duplicates(sources: Sequence[Table]) -> list[LoadFinding]:
    """Keys that come more than once over all tables of a family, which AITER merges at its start."""
    seen: dict[tuple[Key, str], str] = {}
    doubled = []
    for source in sources:
        for row in source.rows:
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
    return [LoadFinding("fatal", "\n".join((what, *listed(doubled, SHOWN))))]


def never_selected(source: Table, chips: Iterable[tuple[str, int]]) -> list[LoadFinding]:
    """Rows of another chip than those in use: (gfx, cu_num) is part of the key."""
    targets = {source.family.chip(gfx, cu_num) for gfx, cu_num in chips}
    if not targets:
        return []
    there = {(str(r.key[0]), int(r.key[1])) for r in source.rows}
    out = []
    for gfx, cu_num in sorted(targets - there):
        has = ", ".join(f"{g or '?'} with {c}" if c else g or "?" for g, c in sorted(there)) or "nothing"
        mine = f"{gfx} with {cu_num} compute units" if cu_num else gfx
        text = f"{source.path}: no row is for {mine} (it has {has}): AITER selects none there"
        out.append(LoadFinding("fatal", text))
    other = sum((str(r.key[0]), int(r.key[1])) not in targets for r in source.rows)
    if other and not out:
        rows = plural(other, "row is", "rows are")
        out.append(LoadFinding("note", f"{source.path}: {rows} for other chips and never selected"))
    return out


def routed(source: Table) -> list[LoadFinding]:
    """Rows that AITER's dispatch routes to its Triton kernels: the image's own files have their tile sizes."""
    rows = sum(backend_of(source.family.name, source.cells(r)) == "triton" for r in source.rows)
    if not rows:
        return []
    text = (
        f"{source.path}: {plural(rows, 'row is', 'rows are')} routed to AITER's Triton kernels, whose tile sizes are in"
        " JSON files of the image (aiter/ops/triton/configs): with other files the times are others"
    )
    return [LoadFinding("note", text)]


def rebuild(source: Table) -> list[LoadFinding]:
    """Rows whose kernels AITER may have to compile before it can use them, where no build is at hand to ask."""
    need, opus = [], 0
    for row in source.rows:
        cells = source.cells(row)
        backend = backend_of(source.family.name, cells)
        opus += backend == "opus" and source.family.name == "a16w16"
        if backend in COMPILED and not source.family.two_stages:
            need.append(f"{','.join(map(str, row.key))} {cells.get('kernelName', '')}")
    out = []
    if need:
        text = (
            f"{source.path}: {len(need)} of {plural(len(source.rows), 'row')} with CK winners that may be"
            " outside what the image holds: --build TREE|IMAGE checks it; start once with AITER_REBUILD=1 and the line"
            " above set, or build the image with this table"
        )
        out.append(LoadFinding("warning", "\n".join((text, *listed(need, SHOWN)))))
    if opus:
        out.append(_opus(source, opus))
    return out


def against_build(source: Table, build: Build) -> list[LoadFinding]:
    """Findings on a table's rows in a build of AITER: `fatal` where it cannot load one, or cannot be read."""
    found: dict[Standing, list[str]] = {}
    opus = 0
    for row in source.rows:
        cells = source.cells(row)
        answer = build.answer(source.family, row.key, cells)
        opus += answer.opus and answer.standing == "rebuild" and source.family.name == "a16w16"
        why = f": {answer.why}" if answer.standing != "rebuild" else f" {kernel_of(cells)}"
        found.setdefault(answer.standing, []).append(f"{source.path}:{row.line}: {','.join(map(str, row.key))}{why}")
    rows = len(source.rows)
    out = []
    if bad := found.get("cannot"):
        text = f"{source.path}: {len(bad)} of {plural(rows, 'row')} cannot be loaded by {build.name}, rebuilt or not"
        out.append(LoadFinding("fatal", "\n".join((text, *listed(bad, SHOWN)))))
    if unread := found.get("unread"):
        text = f"{source.path}: {len(unread)} of {plural(rows, 'row')} could not be checked against {build.name}"
        out.append(LoadFinding("fatal", "\n".join((text, *listed([*build.problems, *unread], SHOWN)))))
    if need := found.get("rebuild"):
        text = (
            f"{source.path}: {len(need)} of {plural(rows, 'row')} with CK winners outside what {build.name} was"
            " compiled from: start once with AITER_REBUILD=1 and the line above set, or build the image with this table"
        )
        if not bad and not unread:
            out.append(LoadFinding("warning", "\n".join((text, *listed(need, SHOWN)))))
    if opus and not bad:
        out.append(_opus(source, opus))
    return out


def _opus(source: Table, rows: int) -> LoadFinding:
    text = (
        f"{source.path}: {plural(rows, 'row names an opus kernel', 'rows name opus kernels')}, which AITER compiles"
        " only for tables called"
        " model_configs/*_bf16_tuned_gemm.csv: export with --model and start once with AITER_REBUILD=1"
    )
    return LoadFinding("warning", text)


def refuse_own(sources: Iterable[Table]) -> None:
    """Raise KindError for tables with rows of our own tuners, by file and line."""
    for s in sources:
        known = known_records(s)
        refuse_mixture(s.path, s, known)
        if own := rows_by_kind(s, known).get("own"):
            lines = (f"{s.path}:{r.line}: {describe_own(s.cells(r))}" for r in own)
            what = f"{s.path}: is a table of gemmfleet's own kernels: AITER loads none of them"
            raise KindError([what, *listed(lines, SHOWN)])


def best_rows(sources: Sequence[Table]) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """(header, rows) of one table with the fastest row of each key; gfx is filled in where a table lacks it."""
    header = dict.fromkeys(sources[0].family.tuned_header)
    for s in sources:
        header |= dict.fromkeys(s.header)
    best: dict[tuple[Key, str], tuple[float, dict[str, str]]] = {}
    for s in sources:
        for row in s.rows:
            cells = {**s.cells(row), "gfx": str(row.key[0])}
            us = row.us if row.us is not None else float("inf")
            at = (row.key, row.tag)
            if at not in best or us < best[at][0]:
                best[at] = (us, cells)
    there = {name for _, cells in best.values() for name in cells}
    names = tuple(n for n in header if n in there)
    return names, [cells for _, cells in best.values()]


Form = Literal["model-first", "table-first"]
FORMS: tuple[Form, ...] = ("model-first", "table-first")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}\Z")
_BITS = {"float8": "8", "int8": "8", "float4": "4", "int4": "4", "bfloat16": "16", "float16": "16"}


def usual_form(family: Family) -> Form:
    """The form that AITER's own files of the family mostly have."""
    return "table-first" if family.aiter.model_last else "model-first"


def model_names(model: str, family: Family, form: Form, rows: Iterable[Mapping[str, str]] = ()) -> tuple[str, str]:
    """(name of the tuned table, name of its untuned twin). `rows`: fmoe tables are also called by their types.

    Raises InputError where AITER would not find the name, or take it for another family's.
    """
    if not _MODEL.match(model):
        raise InputError(f"--model {model[:80]!r}: write letters, digits, '.', '_' and '-' only, such as llama70B")
    stem = Path(family.tuned_csv).stem
    if family.two_stages:
        model = f"{model}_{_types(rows)}" if form == "model-first" else model
    tuned = f"{model}_{stem}.csv" if form == "model-first" else f"{stem}_{model}.csv"
    if "untuned" in tuned:
        raise InputError(f"--model {model!r}: AITER passes over names with 'untuned' in them")
    takers = [f.name for f in FAMILIES.values() if Path(f.tuned_csv).stem in tuned]
    if takers != [family.name]:
        others = ", ".join(t for t in takers if t != family.name)
        raise InputError(
            f"--model {model!r}: AITER would take {tuned} for a table of {others}, too; choose another name"
        )
    return tuned, tuned.replace(stem, "untuned".join(stem.rsplit("tuned", 1)))


def _types(rows: Iterable[Mapping[str, str]]) -> str:
    """fp8, fp4, bf16, i4 or aXwY, as AITER's fmoe files are called."""
    kinds = Counter((r.get("q_dtype_a", ""), r.get("q_dtype_w", "")) for r in rows)
    if not kinds:
        return "bf16"
    a, w = (name.removeprefix("torch.").split("_")[0] for name in kinds.most_common(1)[0][0])
    if a == w:
        return {"float8": "fp8", "float4": "fp4", "bfloat16": "bf16", "float16": "fp16", "int8": "i8"}.get(a, a)
    return f"a{_BITS.get(a, '16')}w{_BITS.get(w, '16')}"
