"""Prepares a run that measures the rows of a table again (`recheck`).

It is an ordinary run (prepare.py) whose shapes are those of the table, and whose tuner measures only the kernels of the
rows and their runners-up. results/recheck.py judges what it measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.controller.prepare import prepare
from orchestrator.controller.prepared_run import PreparedRun
from orchestrator.controller.request import RunRequest
from orchestrator.errors import InputError
from orchestrator.paths import RunConfig
from orchestrator.results.recheck import RowToCheck, chip_of_rows, rows_to_check
from orchestrator.tables.keys import Key as TableKey
from orchestrator.tables.keys import chip_name
from orchestrator.tables.merge_input import open_sources


def prepare_recheck(
    request: RunRequest, profiles: Sequence[Path], runners: int
) -> tuple[PreparedRun, dict[int, RowToCheck]]:
    """Return the run that measures a table's rows, and the kernels to measure by shape. `request.shapes`: the table, or
    a run's folder. `profiles`: profiles with all candidates of the rows. `runners`: how many runners-up to measure
    beside each row's kernel. Raises InputError."""
    table = request.shapes
    if (table / "run.yaml").is_file():
        request = _as_in_run(request, RunConfig.read(table / "run.yaml"))
    if not profiles and table.name == "tuned.csv":
        beside = table.with_name("profile.csv")
        profiles = [beside] if beside.is_file() else []
    sources = open_sources([table], profiles, None, request.family)
    rows: dict[TableKey, RowToCheck] = rows_to_check(sources, runners)
    known_kernels = sum(row.known for row in rows.values())
    share = sum(len(row.kernels) for row in rows.values()) / max(1, known_kernels)
    request = replace(request, shapes=sources.tables[0], family=sources.family.name, rows=rows, share=share)
    prepared = prepare(request)
    chip = chip_of_rows(rows, *prepared.family.chip(prepared.plan.gfx, prepared.plan.cu_num))
    to_check = {}
    for shape in prepared.listed.shapes:
        row = rows.get((*chip, *shape.key))
        if row is not None:
            to_check[shape.id] = row
    if not to_check:
        has = ", ".join(sorted({chip_name(*key[:2]) for key in rows})[:6])
        raise InputError(
            f"{table}: has no row of {chip_name(*chip)} (it has {has}); if a node cannot tell its chip, set "
            "gfx and cu_num in the inventory"
        )
    return prepared, to_check


def _as_in_run(request: RunRequest, run: RunConfig) -> RunRequest:
    """The request, completed by the options of the run that made the table."""
    return replace(
        request,
        family=request.family or run.family,
        tuner=request.tuner or run.tuner,
        options={**run.options, **request.options},
        err_ratio=run.err_ratio,
    )
