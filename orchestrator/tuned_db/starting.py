"""What can be said of a tuned DB before a run begins: whether its winners will have a place in it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import TunedDBError
from orchestrator.results.champions import kernel_of
from orchestrator.results.table import read_table
from orchestrator.tuned_db.kinds import KindError, other_name, refuse_mixture, rows_by_kind
from orchestrator.tuned_db.records import fitting, read_records
from worker.families import Family
from worker.tuners.catalog import recorded_tuner

if TYPE_CHECKING:
    from orchestrator.dispatch.deploy import NodePlan


def check_db(db: Path, family: Family, tuner: str) -> None:
    """Raise TunedDBError where the merge at the run's end would be refused for what is known now."""
    if not db.parent.is_dir():
        raise TunedDBError(f"--db {db}: there is no folder {db.parent}; make it first: mkdir -p {db.parent}")
    if not db.exists():
        return
    if not db.is_file():
        raise TunedDBError(f"--db {db}: is no file; name the table itself, such as {db / family.tuned_csv}")
    table = read_table(db, family)
    known = fitting(table.header, {r.place: r for r in table.rows}, read_records(db))
    has, writes = refuse_mixture(db, table, known), recorded_tuner(tuner).produces
    if not has or not writes or has == writes:
        return
    first = rows_by_kind(table, known)[has][0]
    name = kernel_of(dict(zip(table.header, first.cells, strict=True)))
    whose, what = ("AITER's", "gemmfleet's own kernels") if has == "aiter" else ("gemmfleet's own kernels", "AITER's")
    raise KindError([
        f"--db {db}: is a table of {whose} (line {first.line}: {name[:80]}), and the tuner {tuner} writes {what}:"
        " AITER stops at a name that it has no kernel of, so a table is never both",
        f"use a table of their own: --db {other_name(db, tuner)}",
    ])  # fmt: skip


def not_for_aiter(tuner: str, nodes: Iterable[NodePlan]) -> list[str]:
    """What to say where a fleet with AMD GPUs is about to be tuned by something that AITER loads nothing of."""
    amd = [n.node for n in nodes if (n.gfx or "").startswith("gfx")]
    if not amd or recorded_tuner(tuner).produces != "own":
        return []
    which = ", ".join(amd[:4]) + (f" and {len(amd) - 4} more" if len(amd) > 4 else "")
    return [
        f"warning: {which}: AMD GPUs, and the tuner {tuner} measures kernels of gemmfleet's own: its table is none that"
        " AITER loads; --tuner aiter writes AITER's"
    ]
