"""Export of tuned tables to AITER: environment lines or files, and the rows that it refuses, never selects or must
rebuild.

`db export` calls `read_sources` and `export_tables`; without a build it says what AITER since 2026 does in general.
Read from ROCm/aiter at e4048607a5: `AITER_CONFIG` in aiter/jit/core.py (merging and duplicates), the dispatch tables of
csrc/ck_gemm_*/*.cu and csrc/ck_batched_gemm_*/*.cu (what is compiled in), aiter/jit/optCompilerConfig.json (from which
tables it is). `table_names.py` says how a model's tables are called.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.errors import InputError, TunedDBError
from orchestrator.files.faults import listed
from orchestrator.files.write import write_csv
from orchestrator.tables.aiter_build import Build
from orchestrator.tables.keys import best_by_key, repetitions
from orchestrator.tables.mixing import MAX_EXAMPLES, kind_of_table
from orchestrator.tables.provenance import current_records, read_records
from orchestrator.tables.row_kernels import kernel_of
from orchestrator.tables.rules import REBUILD
from orchestrator.tables.run_folders import fault_of_config_files, table_of
from orchestrator.tables.table import Table, TableRow, read_table
from orchestrator.tables.table_names import family_of, model_names, shipped_tables
from worker.aiter_tree.kernels import KernelAvailability, Standing
from worker.families import Family, backend_of
from worker.text import Finding, Level, plural

COMPILED = ("ck", "cktile")
"""Backends whose kernels are compiled from the table that is there when their module is built."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The outcome of an export."""

    env: list[str] = field(default_factory=list)
    """Lines that make AITER read the tables: `export AITER_CONFIG_GEMM_A8W8=/tables/a8w8.csv`."""
    files: list[str] = field(default_factory=list)
    """Files that were written."""
    findings: list[Finding] = field(default_factory=list)
    """Findings on what AITER would do with the rows."""

    @property
    def failed(self) -> bool:
        """True if AITER would fail, or would use none of the rows."""
        return any(finding.level == "error" for finding in self.findings)


def read_sources(paths: Iterable[Path], wanted: str | None) -> dict[Family, list[Table]]:
    """Return the tables, or those of runs' folders, by family. Raises InputError with all faults."""
    tables: dict[Family, list[Table]] = {}
    faults: list[str] = []
    for path in dict.fromkeys(map(table_of, paths)):
        if fault := fault_of_config_files(path):
            faults.append(fault)
            continue
        try:
            family = family_of(path, wanted)
            tables.setdefault(family, []).append(read_table(path, family, doubled=True))
        except InputError as e:
            faults += e.faults
    if faults:
        raise InputError(faults)
    for family_tables in tables.values():
        for table in family_tables:
            _refuse_own_kernels(table)
    return tables


def _refuse_own_kernels(table: Table) -> None:
    """Raise TunedDBError for a table with rows of our own tuners."""
    kind, _ = kind_of_table(table, current_records(table, read_records(table.path)))
    if kind == "own":
        raise TunedDBError(
            f"{table.path}: is a table of gemmfleet's own kernels, and AITER loads none of them;"
            " tune with --tuner aiter for one of AITER's"
        )


def export_tables(
    sources: Mapping[Family, Sequence[Table]],
    chips: Iterable[tuple[str, int]],
    build: Build | None,
    *,
    folder: Path | None,
    model: str | None,
    form: str | None,
    folder_in_container: str | None,
    force: bool,
) -> Exported:
    """Make AITER use tables: write files, if `folder` or `model` is given, and return the environment lines.

    `chips`: those in use, (gfx, cu_num) each. `folder`: for the files. `model`: the model that they are named by, None
    for AITER's own names; `form`: as of `model_names`. `folder_in_container`: the tables' folder as the container of
    AITER sees it, None if it sees this machine's. `force`: existing files are replaced. If AITER would fail, there are
    no lines. Raises InputError for a name that is taken or that AITER would not find.
    """
    exported = Exported()
    in_build = [
        finding for tables in sources.values() for table in tables for finding in findings_in_build(table, build)
    ]
    can_load = build is None or all(finding.level != "error" for finding in in_build)
    for family, tables in sources.items() if can_load else ():
        for table in tables:
            exported.findings.extend(never_selected(table, chips))
        paths = [table.path for table in tables]
        if folder is None and model is None:
            exported.findings.extend(duplicates(tables))
        else:
            paths = _write_tables(tables, folder or Path("model_configs"), model, form, force=force)
            exported.files.extend(map(str, paths))
        if model is None:
            _add_environment(family, paths, folder_in_container, build, exported)
        else:
            exported.findings.extend(_duplicates_in_folder(paths[0], family))
    exported.findings.extend(in_build)
    if exported.failed:
        exported.env.clear()
    return exported


def _add_environment(
    family: Family, paths: Sequence[Path], folder_in_container: str | None, build: Build | None, exported: Exported
) -> None:
    exported.env.append(_env_line(family, paths, folder_in_container))
    text = (
        f"{family.name}: with {family.env} set, AITER reads the listed tables only, none of its own;"
        " name its tables too (with -o DIR) to keep their rows"
    )
    if build:
        text += f": {build.configs / family.tuned_csv}, ..."
    exported.findings.append(Finding("note", "tables", "", 0, text))


def _write_tables(
    tables: Sequence[Table], folder: Path, model: str | None, form: str | None, *, force: bool
) -> list[Path]:
    """Write one table with the fastest row of each key, and for a model the list of its shapes beside it. `form`: as
    of `model_names`; `force`: existing files are replaced."""
    family = tables[0].family
    header, rows = best_rows(tables)
    contents = [(header, rows)]
    names: Sequence[str] = [family.tuned_csv]
    if model is not None:
        names = model_names(model, family, form, rows)
        shapes = {tuple(row.get(name, "") for name in family.key_names): row for row in rows}
        contents.append((family.key_names, list(shapes.values())))
    paths = [folder / name for name in names]
    folder.mkdir(parents=True, exist_ok=True)
    existing = [str(path) for path in paths if path.exists()]
    if existing and not force:
        raise InputError(f"{', '.join(existing)}: exists; name another folder with -o, or --force to replace")
    for path, (columns, content) in zip(paths, contents, strict=True):
        write_csv(path, family.to_aiter(columns), ([row.get(name, "") for name in columns] for row in content))
    return paths


def _duplicates_in_folder(written: Path, family: Family) -> list[Finding]:
    """Return duplicates of keys in the same model_configs folder, and in the configs folder above it."""
    folder = written.parent
    files = shipped_tables(folder, family)
    above = folder.parent / family.tuned_csv
    if above.is_file() and folder.name == "model_configs":
        files.insert(0, above)
    return duplicates([read_table(path, family, lenient=True) for path in files])


def _env_line(family: Family, paths: Iterable[Path], folder_in_container: str | None) -> str:
    if folder_in_container is None:
        words = [str(path.absolute()) for path in paths]
    else:
        words = [f"{folder_in_container.rstrip('/')}/{path.name}" for path in paths]
    for word in words:
        if os.pathsep in word:
            raise InputError(
                f"{word}: AITER splits the variable at {os.pathsep!r}; give the table another name or place"
            )
    doubled = {word for word in words if words.count(word) > 1}
    if doubled:
        raise InputError(f"--at {folder_in_container}: two tables would be {min(doubled)}; write one with -o DIR")
    return f"export {family.env}={shlex.quote(os.pathsep.join(words))}"


def duplicates(tables: Sequence[Table]) -> list[Finding]:
    """Keys that come more than once over all tables of a family, which AITER merges at its start."""
    keyed = ((row.place, f"{table.path}:{row.line}") for table in tables for row in table.rows)
    doubled = [f"{second} has the key of {first}" for second, first in repetitions(keyed)]
    if not doubled:
        return []
    what = (
        f"{tables[0].family.name}: {plural(len(doubled), 'row has', 'rows have')} the key of another row:"
        " AITER since 2026-04-01 rewrites"
        " the tables and stops with an error at its start; -o DIR writes one table with the fastest row of each key"
    )
    return [_finding_with_rows("error", "duplicate", tables[0], what, doubled)]


def _finding_with_rows(level: Level, rule: str, table: Table, what: str, lines: Sequence[str]) -> Finding:
    return Finding(level, rule, str(table.path), 0, "\n".join((what, *listed(lines, MAX_EXAMPLES))))


def never_selected(table: Table, chips: Iterable[tuple[str, int]]) -> list[Finding]:
    """Rows of another chip than those in use: (gfx, cu_num) is part of the key."""
    path = str(table.path)
    used = {table.family.chip(gfx, cu_num) for gfx, cu_num in chips}
    rows_by_chip = Counter((str(row.key[0]), int(row.key[1])) for row in table.rows)
    has = ", ".join(f"{gfx or '?'} with {cu_num}" if cu_num else gfx or "?" for gfx, cu_num in sorted(rows_by_chip))
    findings = []
    for gfx, cu_num in sorted(used - rows_by_chip.keys()):
        chip = f"{gfx} with {cu_num} compute units" if cu_num else gfx
        text = f"{path}: no row is for {chip} (it has {has or 'nothing'}): AITER selects none there"
        findings.append(Finding("error", "chip", path, 0, text))
    others = sum(count for chip_key, count in rows_by_chip.items() if chip_key not in used)
    if used and others and not findings:
        rows = plural(others, "row is", "rows are")
        findings.append(Finding("note", "chip", path, 0, f"{path}: {rows} for other chips and never selected"))
    return findings


def findings_in_build(table: Table, build: Build | None) -> list[Finding]:
    """Findings on a table's rows in a build of AITER: errors where it cannot load one, or cannot be read.

    Without a build, AITER may have to compile the rows of CK kernels. Rows that AITER's dispatch routes to its Triton
    kernels are noted: the image's own files have their tile sizes.
    """
    lines: dict[Standing, list[str]] = {}
    opus_rows = 0
    triton_rows = 0
    for row in table.rows:
        cells = table.cells(row)
        backend = backend_of(table.family.name, cells)
        answer = (
            build.availability_of(table.family, row.key, cells)
            if build
            else _answer_without_build(table.family, backend)
        )
        lines.setdefault(answer.standing, []).append(_describe_row(table, row, answer))
        if backend == "triton":
            triton_rows += 1
        if answer.opus and table.family.name == "a16w16" and (answer.standing == "rebuild" or build is None):
            opus_rows += 1
    findings = _standing_findings(table, build, lines)
    path = str(table.path)
    if opus_rows and "cannot" not in lines:
        text = (
            f"{path}: {plural(opus_rows, 'row names an opus kernel', 'rows name opus kernels')}, which AITER compiles"
            " only for tables called model_configs/*_bf16_tuned_gemm.csv: export with --model and start once with"
            " AITER_REBUILD=1"
        )
        findings.append(Finding("warning", "opus", path, 0, text))
    if triton_rows:
        text = (
            f"{path}: {plural(triton_rows, 'row is', 'rows are')} routed to AITER's Triton kernels, whose tile sizes"
            " are in JSON files of the image (aiter/ops/triton/configs): with other files the times are others"
        )
        findings.append(Finding("note", "triton", path, 0, text))
    return findings


def _answer_without_build(family: Family, backend: str) -> KernelAvailability:
    standing: Standing = "rebuild" if backend in COMPILED and not family.two_stages else "loads"
    return KernelAvailability(standing, opus=backend == "opus")


def _describe_row(table: Table, row: TableRow, answer: KernelAvailability) -> str:
    row_text = f"{table.path}:{row.line}: {','.join(map(str, row.key))}"
    if answer.standing == "rebuild":
        return f"{row_text} {kernel_of(table.cells(row))}"
    return f"{row_text}: {answer.why}"


def _standing_findings(table: Table, build: Build | None, lines: Mapping[Standing, list[str]]) -> list[Finding]:
    """Findings on the rows that do not load, with the first rows of each kind."""
    name = build.name if build else ""
    rows = plural(len(table.rows), "row")
    findings = []
    if cannot := lines.get("cannot"):
        what = f"{table.path}: {len(cannot)} of {rows} cannot be loaded by {name}, rebuilt or not"
        findings.append(_finding_with_rows("error", "build: cannot", table, what, cannot))
    if unread := lines.get("unread"):
        problems = build.problems if build else ()
        what = f"{table.path}: {len(unread)} of {rows} could not be checked against {name}"
        findings.append(_finding_with_rows("error", "build: unread", table, what, [*problems, *unread]))
    rebuild = lines.get("rebuild")
    if rebuild and not findings:
        outside = "that may be outside what the image holds: --build TREE|IMAGE checks it;"
        if build:
            outside = f"outside what {name} was compiled from:"
        what = (
            f"{table.path}: {len(rebuild)} of {rows} with CK winners {outside} start once with AITER_REBUILD=1 and the"
            " line above set, or build the image with this table"
        )
        findings.append(_finding_with_rows("warning", REBUILD, table, what, rebuild))
    return findings


def best_rows(tables: Sequence[Table]) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """(header, rows) of one table with the fastest row of each key; gfx is filled in where a table lacks it."""
    every = [(table, row) for table in tables for row in table.rows]
    best = best_by_key(every, lambda entry: entry[1].place, lambda entry: time_rank(entry[1]))
    rows = [{**table.cells(row), "gfx": str(row.key[0])} for table, row in best.values()]
    used = {name for cells in rows for name in cells}
    names = list(tables[0].family.tuned_header)
    for table in tables:
        names += table.header
    return tuple(name for name in dict.fromkeys(names) if name in used), rows


def time_rank(row: TableRow) -> float:
    """A row's time; a row without one comes last."""
    return float("inf") if row.us is None else row.us
