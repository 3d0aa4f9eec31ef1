"""Export of tuned tables to AITER: rows that it refuses, never selects or must rebuild; names of a model's tables.

Read from ROCm/aiter at e4048607a5: `AITER_CONFIG` in aiter/jit/core.py (merging and duplicates), the dispatch tables of
csrc/ck_gemm_*/*.cu and csrc/ck_batched_gemm_*/*.cu (what is compiled in), aiter/jit/optCompilerConfig.json (from which
tables it is).

AITER merges every file of model_configs whose name holds the family's table name and not the word "untuned"
(`get_config_file` in aiter/jit/core.py). Two forms are in use: `<model>_<table>.csv` and `<table>_<model>.csv`; opus
kernels of bf16 are compiled for the first form alone. Each has a twin that lists the shapes, `untuned` for `tuned`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import InputError, TunedDBError
from orchestrator.files.faults import listed
from orchestrator.files.write import write_csv
from orchestrator.tables.kinds import SHOWN, current_records, kind_of_table, read_records
from orchestrator.tables.locate import family_of, shipped_tables
from orchestrator.tables.rules import REBUILD
from orchestrator.tables.tuned import Table, best, kernel_of, read_table, twice
from worker.aiter_tree.kernels import KernelAvailability, Standing
from worker.families import FAMILIES, Family, backend_of
from worker.text import Finding, plural

if TYPE_CHECKING:
    from orchestrator.tables.check import Build

COMPILED = ("ck", "cktile")
"""Backends whose kernels are compiled from the table that is there when their module is built."""


@dataclass(frozen=True, slots=True)
class Exported:
    """Environment lines that make AITER read the tables, files written, and what AITER would do with the rows."""

    env: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Return whether AITER would fail, or would use none of the rows."""
        return any(f.level == "error" for f in self.findings)


def read(tables: Iterable[Path], family: str | None) -> dict[Family, list[Table]]:
    """Return the tables, or those of runs' folders, by family. Raises InputError with all faults."""
    out: dict[Family, list[Table]] = {}
    faults: list[str] = []
    for path in dict.fromkeys(p / "tuned.csv" if p.is_dir() else p for p in tables):
        try:
            of = family_of(path, family)
            out.setdefault(of, []).append(read_table(path, of, doubled=True))
        except InputError as e:
            faults += e.faults
    if faults:
        raise InputError(faults)
    refuse_own(s for some in out.values() for s in some)
    return out


def export(
    sources: Mapping[Family, Sequence[Table]],
    chips: Iterable[tuple[str, int]],
    build: Build | None,
    *,
    out: Path | None,
    model: str | None,
    form: str | None,
    at: str | None,
    force: bool,
) -> Exported:
    """Make AITER use tables: write files, if `out` or `model` is given, and return the environment lines.

    If AITER would fail, the lines are empty. Raises InputError for a name that is taken or that AITER would not find.
    """
    made, checked = Exported(), [f for some in sources.values() for s in some for f in in_build(s, build)]
    cannot = build is not None and any(f.level == "error" for f in checked)
    for of, some in sources.items() if not cannot else ():
        made.findings.extend(f for s in some for f in never_selected(s, chips))
        paths = [s.path for s in some]
        if out is None and model is None:
            made.findings.extend(duplicates(some))
        else:
            paths = _write(some, out or Path("model_configs"), model, form, force)
            made.files.extend(map(str, paths))
            made.findings.extend(_neighbours(paths[0], of) if model else ())
        if model is None:
            made.env.append(_env_line(of, paths, at))
            text = (
                f"{of.name}: with {of.env} set, AITER reads the listed tables only, none of its own;"
                " name its tables too (with -o DIR) to keep their rows"
            )
            its = f": {build.configs / of.tuned_csv}, ..." if build else ""
            made.findings.append(Finding("note", "tables", "", 0, text + its))
    made.findings.extend(checked)
    if made.failed:
        made.env.clear()
    return made


def _write(some: Sequence[Table], folder: Path, model: str | None, form: str | None, force: bool) -> list[Path]:
    """Write one table with the fastest row of each key, and for a model the list of its shapes beside it."""
    of, (header, rows) = some[0].family, best_rows(some)
    names = [of.tuned_csv] if model is None else model_names(model, of, form, rows)
    shapes = list({tuple(r.get(n, "") for n in of.key_names): r for r in rows}.values())
    paths = [folder / name for name in names]
    folder.mkdir(parents=True, exist_ok=True)
    there = [str(p) for p in paths if p.exists()]
    if there and not force:
        raise InputError(f"{', '.join(there)}: exists; name another folder with -o, or --force to replace")
    for path, (columns, table) in zip(paths, ((header, rows), (of.key_names, shapes)), strict=False):
        write_csv(path, of.to_aiter(columns), ([row.get(c, "") for c in columns] for row in table))
    return paths


def _neighbours(written: Path, of: Family) -> list[Finding]:
    """Return duplicates of keys in the same model_configs folder, and in the configs folder above it."""
    folder, above = written.parent, written.parent.parent / of.tuned_csv
    files = [*([above] if above.is_file() and folder.name == "model_configs" else []), *shipped_tables(folder, of)]
    return duplicates([read_table(p, of, lenient=True) for p in files])


def _env_line(of: Family, paths: Iterable[Path], at: str | None) -> str:
    words = [f"{at.rstrip('/')}/{p.name}" if at is not None else str(p.absolute()) for p in paths]
    bad = [w for w in words if os.pathsep in w]
    if bad:
        raise InputError(f"{bad[0]}: AITER splits the variable at {os.pathsep!r}; give the table another name or place")
    doubled = {w for w in words if words.count(w) > 1}
    if doubled:
        raise InputError(f"--at {at}: two tables would be {min(doubled)}; write one with -o DIR")
    return f"export {of.env}={shlex.quote(os.pathsep.join(words))}"


def duplicates(sources: Sequence[Table]) -> list[Finding]:
    """Keys that come more than once over all tables of a family, which AITER merges at its start."""
    keyed = ((row.place, f"{source.path}:{row.line}") for source in sources for row in source.rows)
    doubled = [f"{here} has the key of {first}" for here, first in twice(keyed)]
    if not doubled:
        return []
    what = (
        f"{sources[0].family.name}: {plural(len(doubled), 'row has', 'rows have')} the key of another row:"
        " AITER since 2026-04-01 rewrites"
        " the tables and stops with an error at its start; -o DIR writes one table with the fastest row of each key"
    )
    return [Finding("error", "duplicate", str(sources[0].path), 0, "\n".join((what, *listed(doubled, SHOWN))))]


def never_selected(source: Table, chips: Iterable[tuple[str, int]]) -> list[Finding]:
    """Rows of another chip than those in use: (gfx, cu_num) is part of the key."""
    targets = {source.family.chip(gfx, cu_num) for gfx, cu_num in chips}
    there, path = Counter((str(r.key[0]), int(r.key[1])) for r in source.rows), str(source.path)
    has = ", ".join(f"{g or '?'} with {c}" if c else g or "?" for g, c in sorted(there)) or "nothing"
    out = []
    for gfx, cu_num in sorted(targets - there.keys()):
        mine = f"{gfx} with {cu_num} compute units" if cu_num else gfx
        text = f"{path}: no row is for {mine} (it has {has}): AITER selects none there"
        out.append(Finding("error", "chip", path, 0, text))
    if targets and not out and (other := sum(n for chip, n in there.items() if chip not in targets)):
        rows = plural(other, "row is", "rows are")
        out.append(Finding("note", "chip", path, 0, f"{path}: {rows} for other chips and never selected"))
    return out


def in_build(source: Table, build: Build | None) -> list[Finding]:
    """Findings on a table's rows in a build of AITER: errors where it cannot load one, or cannot be read.

    Without a build, AITER may have to compile the rows of CK kernels. Rows that AITER's dispatch routes to its Triton
    kernels are noted: the image's own files have their tile sizes.
    """
    family, path, rows = source.family, str(source.path), plural(len(source.rows), "row")
    found: dict[Standing, list[str]] = {}
    opus = triton = 0
    for row in source.rows:
        cells = source.cells(row)
        backend = backend_of(family.name, cells)
        answer = build.answer(family, row.key, cells) if build else _unbuilt(family, backend)
        opus += answer.opus and (answer.standing == "rebuild" or build is None) and family.name == "a16w16"
        triton += backend == "triton"
        why = f": {answer.why}" if answer.standing != "rebuild" else f" {kernel_of(cells)}"
        found.setdefault(answer.standing, []).append(f"{path}:{row.line}: {','.join(map(str, row.key))}{why}")
    name, problems = (build.name, build.problems) if build else ("", ())
    bad, unread, need = (found.get(s, []) for s in ("cannot", "unread", "rebuild"))
    outside = f"outside what {name} was compiled from:" if build else (
        "that may be outside what the image holds: --build TREE|IMAGE checks it;"
    )  # fmt: skip
    way_out = "start once with AITER_REBUILD=1 and the line above set, or build the image with this table"
    out = []
    for rule, lines, said, text in (
        ("build: cannot", bad, [], f"cannot be loaded by {name}, rebuilt or not"),
        ("build: unread", unread, problems, f"could not be checked against {name}"),
        (REBUILD, [] if bad or unread else need, [], f"with CK winners {outside} {way_out}"),
    ):
        if lines:
            words = (f"{path}: {len(lines)} of {rows} {text}", *listed([*said, *lines], SHOWN))
            out.append(Finding("warning" if rule == REBUILD else "error", rule, path, 0, "\n".join(words)))
    if opus and not bad:
        text = (
            f"{path}: {plural(opus, 'row names an opus kernel', 'rows name opus kernels')}, which AITER compiles only"
            " for tables called model_configs/*_bf16_tuned_gemm.csv: export with --model and start once with"
            " AITER_REBUILD=1"
        )
        out.append(Finding("warning", "opus", path, 0, text))
    if triton:
        text = (
            f"{path}: {plural(triton, 'row is', 'rows are')} routed to AITER's Triton kernels, whose tile sizes are in"
            " JSON files of the image (aiter/ops/triton/configs): with other files the times are others"
        )
        out.append(Finding("note", "triton", path, 0, text))
    return out


def _unbuilt(family: Family, backend: str) -> KernelAvailability:
    """The answer where no build is at hand to ask."""
    standing: Standing = "rebuild" if backend in COMPILED and not family.two_stages else "loads"
    return KernelAvailability(standing, opus=backend == "opus")


def refuse_own(sources: Iterable[Table]) -> None:
    """Raise TunedDBError for tables with rows of our own tuners."""
    for s in sources:
        kind, _ = kind_of_table(s, current_records(s, read_records(s.path)))
        if kind == "own":
            raise TunedDBError(
                f"{s.path}: is a table of gemmfleet's own kernels, and AITER loads none of them;"
                " tune with --tuner aiter for one of AITER's"
            )


def best_rows(sources: Sequence[Table]) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """(header, rows) of one table with the fastest row of each key; gfx is filled in where a table lacks it."""
    every = ((source, row) for source in sources for row in source.rows)
    won = best(every, lambda e: e[1].place, lambda e: float("inf") if e[1].us is None else e[1].us)
    rows = [{**source.cells(row), "gfx": str(row.key[0])} for source, row in won.values()]
    there = {name for cells in rows for name in cells}
    header = dict.fromkeys(n for names in (sources[0].family.tuned_header, *(s.header for s in sources)) for n in names)
    return tuple(n for n in header if n in there), rows


FORMS = ("model-first", "table-first")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}\Z")
_BITS = {"float8": "8", "int8": "8", "float4": "4", "int4": "4", "bfloat16": "16", "float16": "16"}


def model_names(
    model: str, family: Family, form: str | None, rows: Iterable[Mapping[str, str]] = ()
) -> tuple[str, str]:
    """(name of the tuned table, name of its untuned twin). `form`: None for the one that AITER's own files of the
    family mostly have. `rows`: fmoe tables are also called by their types.

    Raises InputError for another form, and where AITER would not find the name, or take it for another family's.
    """
    form = form or ("table-first" if family.aiter.model_last else "model-first")
    if form not in FORMS:
        raise InputError(f"--form {form[:40]!r}: give {' or '.join(FORMS)}")
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
