"""Checks before a run: whether its winners can go into the table of `--db`, and whether AITER will load them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from orchestrator.command_hints import command
from orchestrator.errors import TunedDBError
from orchestrator.tables.mixing import kind_of_table, table_beside
from orchestrator.tables.provenance import current_records, read_records
from orchestrator.tables.row_kernels import MAX_NAME, OWNER, kernel_of
from orchestrator.tables.table import read_table
from worker.families import Family
from worker.text import and_more
from worker.tuners.catalog import recorded_tuner


def check_db(db: Path, family: Family, tuner: str) -> None:
    """Raise TunedDBError where the merge at the run's end would be refused for what is known now."""
    writes = recorded_tuner(tuner).produces
    if writes == "configs":
        raise TunedDBError(
            f"--db {db}: the tuner {tuner} writes config files, and no table names them; run it without --db, then: "
            + command("configs merge RUN --into TREE")
        )
    if not db.parent.is_dir():
        raise TunedDBError(f"--db {db}: there is no folder {db.parent}; make it first: mkdir -p {db.parent}")
    if not db.exists():
        return
    if not db.is_file():
        raise TunedDBError(f"--db {db}: is not a file; name the table itself, such as {db / family.tuned_csv}")
    table = read_table(db, family)
    kind, rows = kind_of_table(table, current_records(table, read_records(db)))
    if kind and writes and kind != writes:
        name = kernel_of(table.cells(rows[0]))[:MAX_NAME]
        what = (
            f"--db {db}: is a table of {OWNER[kind]} kernels (line {rows[0].line}: {name}), and the tuner {tuner}"
            f" writes {OWNER[writes]}: AITER stops at a name that it has no kernel of, so a table is never both"
        )
        raise TunedDBError([what, f"use a table of their own: --db {table_beside(db, tuner)}"])


def not_for_aiter(tuner: str, nodes: Iterable[tuple[str, str | None]]) -> list[str]:
    """A warning where AMD GPUs, (node, gfx) each, are about to be tuned by a tuner that AITER loads nothing of."""
    amd = [node for node, gfx in nodes if (gfx or "").startswith("gfx")]
    if not amd or recorded_tuner(tuner).produces != "own":
        return []
    return [
        f"warning: {and_more(amd, 4)}: AMD GPUs, and the tuner {tuner} measures kernels of gemmfleet's own: AITER"
        " loads nothing of its table; --tuner aiter writes AITER's"
    ]
