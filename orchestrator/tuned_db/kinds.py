"""Whose a tuned table is: AITER's, which AITER's dispatch loads, or ours, with kernels of our own tuners. Pure.

AITER stops at a name that it has no kernel of, so that a table is never both. A row's kernel name tells; where it is of
no known pattern, the row's record of provenance does; a row that nothing tells of goes with either.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from orchestrator.command_hints import command
from orchestrator.errors import TunedDBError
from orchestrator.results.table import NULLS, Table, TableRow
from orchestrator.tuned_db.merge_policy import NAMES
from worker.families import backend_of, kernel_of_aiter
from worker.tuners.catalog import recorded_tuner
from worker.tuners.common.kernel_names import tuner_of

if TYPE_CHECKING:
    from orchestrator.results.champions import Newcomer
    from orchestrator.tuned_db.records import Record

Kind = Literal["aiter", "own", ""]
FIELD = "kind"
"""The field of a record of provenance."""
SHOWN = 5
_WORDS = {"aiter": "AITER's", "own": "gemmfleet's own"}


class KindError(TunedDBError):
    """Rows of AITER's and rows of ours in one table."""


def kind_of(cells: Mapping[str, str], record: Record | None = None) -> Kind:
    """Whose kernel a row has."""
    return _by_names(cells.get("libtype", ""), *(cells.get(n, "") for n in NAMES)) or _by_record(record)


@lru_cache(50_000)
def _by_names(libtype: str, *names: str) -> Kind:
    there = [n for n in names if n not in NULLS]
    if libtype.lower() == "replay" or any(tuner_of(n) for n in there):
        return "own"
    if any(kernel_of_aiter(n) for n in there):
        return "aiter"
    return "aiter" if there and libtype and backend_of("", {"libtype": libtype}) else ""


def kind_in(facts: Mapping[str, object]) -> Kind:
    """Whose a row is by what is known of its measurement: fields of a record."""
    said = facts.get(FIELD)
    if said in ("aiter", "own"):
        return "own" if said == "own" else "aiter"
    return recorded_tuner(str(facts.get("tuner") or "").partition(" ")[0]).produces


def _by_record(record: Record | None) -> Kind:
    if record is None:
        return ""
    return kind_in({"tuner": record.tuner, **(record.document() if f'"{FIELD}":' in record.line else {})})


def owner_words(cells: Mapping[str, str]) -> str:
    """Whose a row of ours is, for a sentence."""
    name = next((cells[n] for n in NAMES if tuner_of(cells.get(n, ""))), "")
    return f"{name[:80]} is a kernel of gemmfleet's tuner {tuner_of(name)}" if name else "is a kernel of our own tuners"


def rows_by_kind(table: Table, known: Mapping[str, Record]) -> dict[Kind, list[TableRow]]:
    """The rows of a table by whose they are, in order."""
    out: dict[Kind, list[TableRow]] = {}
    names = [table.header.index(n) for n in NAMES if n in table.header]
    libtype = table.header.index("libtype") if "libtype" in table.header else None
    for row in table.rows:
        cells = row.cells
        kind = _by_names("" if libtype is None else cells[libtype], *[cells[i] for i in names])
        out.setdefault(kind or _by_record(known.get(row.place)), []).append(row)
    return out


def refuse_mixture(path: Path, table: Table, known: Mapping[str, Record]) -> Kind:
    """Whose the table is. Raises KindError where it has rows of both."""
    found = rows_by_kind(table, known)
    own = found.get("own", [])
    if own and "aiter" in found:
        raise KindError([
            f"{path}: holds rows of AITER's ({len(found['aiter'])}) and of gemmfleet's own tuners ({len(own)}):"
            " AITER stops at the latter",
            *_listed(path, table, own),
            f"{command(f'db split {shlex.quote(str(path))}')} takes them out into a table of their own",
        ])  # fmt: skip
    return "own" if own else "aiter" if "aiter" in found else ""


def refuse_other_kind(
    path: Path,
    table: Table,
    known: Mapping[str, Record],
    best: Sequence[Newcomer],
    told: Callable[[Newcomer], Kind],
) -> None:
    """Refuse newcomers of the other kind than the table's, or of both. `told`: whose one is by what is known of it.

    Raises KindError with rows and the way out.
    """
    kind = refuse_mixture(path, table, known)
    by: dict[Kind, list[Newcomer]] = {}
    for new in best:
        by.setdefault(kind_of(new.cells) or told(new), []).append(new)
    wrong: Kind = "own" if kind == "aiter" or (not kind and "aiter" in by) else "aiter"
    rest = by.get("aiter" if wrong == "own" else "own")
    if wrong not in by or not (kind or rest):
        return
    what = f"is a table of {_WORDS[kind]} kernels" if kind else "is given rows of AITER's and of gemmfleet's own tuners"
    shown = [f"  {n.place}: {n.kernel[:100]}" for n in by[wrong][:SHOWN]]
    more = [f"  ... and {len(by[wrong]) - SHOWN} more"] if len(by[wrong]) > SHOWN else []
    raise KindError([
        f"{path}: {what}, and {len(by[wrong])} newcomers are of {_WORDS[wrong]} kernels:"
        " AITER stops at a name that it has no kernel of, so a table is never both",
        *shown, *more, f"merge them into a table of their own, such as {other_name(path, wrong)}",
    ])  # fmt: skip


def other_name(path: Path, word: str, *, fresh: bool = False) -> Path:
    """A file for rows of the other kind than a table's, beside it, but never in a folder that AITER merges by itself.

    `fresh`: one that is not there yet.
    """
    folder = Path() if path.parent.name in ("configs", "model_configs") else path.parent
    names = [folder / f"{path.stem}_{word}{n}{path.suffix or '.csv'}" for n in ("", *range(2, 100))]
    return next((n for n in names if not n.exists()), names[0]) if fresh else names[0]


def _listed(path: Path, table: Table, rows: Iterable[TableRow]) -> list[str]:
    some = list(rows)
    at = [(n, table.header.index(n)) for n in NAMES if n in table.header]
    lines = [f"  {path}:{r.line}: {owner_words({n: r.cells[i] for n, i in at})}" for r in some[:SHOWN]]
    return lines + ([f"  ... and {len(some) - SHOWN} more"] if len(some) > SHOWN else [])
