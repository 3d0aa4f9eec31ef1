"""The query over profiles: all files that share a header and a family at once, streamed by DuckDB in bounded memory.

Every column is read as text and cast where it is needed, so that one odd cell costs its row and no more. A row is
either valid or left out for one reason of `REASONS`; lines that are no rows of the header are counted by DuckDB's
rejects table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.analysis.backends import sql_backend
from orchestrator.analysis.columns import Layout, Wide
from orchestrator.errors import InputError, OrchestratorError
from orchestrator.families import Column, Family
from orchestrator.shapes.faults import escaped

if TYPE_CHECKING:
    import duckdb

MEMORY = "400MB"
"""What DuckDB may hold; beyond it writes to a temporary folder."""
MAX_GROUPS = 1_000_000
"""Shapes times backends; more is no tuning result, and would not fit the memory that is kept of them."""
MAX_REJECTS = 1000
NULLS = ("", "Null", "null", "NULL", "None")
REASONS = {
    "no_time": "without a time (us missing, not a number, or not above 0)",
    "not_finite": "with an infinite time",
    "error_ratio": "beyond the error ratio",
    "no_shape": "without a whole key",
    "malformed": "that are not rows of the header (cut short, too long, not UTF-8)",
}
"""Why rows are left out, as words after `N rows`."""
_FATAL = {
    "UNQUOTED VALUE": "opens a quote that is not closed: what follows cannot be told apart; mend the line",
    "LINE SIZE OVER MAXIMUM": "is too long for a table: the file is damaged; remove the line",
}


def connect(folder: Path) -> duckdb.DuckDBPyConnection:
    """A database in memory that spills to `folder`, touches no network and uses at most eight cores."""
    import duckdb

    threads = min(8, len(os.sched_getaffinity(0)))
    config: dict[str, Any] = {
        "memory_limit": MEMORY, "threads": threads, "temp_directory": str(folder), "preserve_insertion_order": False,
        "autoinstall_known_extensions": False, "autoload_known_extensions": False,
    }  # fmt: skip
    return duckdb.connect(":memory:", config=config)


def best_rows(
    db: duckdb.DuckDBPyConnection,
    files: Sequence[Path],
    columns: int,
    found: Layout,
    family: Family,
    err_ratio: float,
) -> list[tuple[Any, ...]]:
    """A row per file, shape and backend: file, gfx, cu_num, *key, backend, rows, no_time, not_finite, error_ratio,
    worst error, fastest time beyond the error ratio, us, kernel, tflops as written, error.

    The best row is the one of the lowest us; of equals that of the first kernel name. Rows without a whole key have a
    key of NULLs. Raises InputError where a file cannot be read to its end.
    """
    parts = [_select(files, columns, found, family, wide) for wide in found.wide or (None,)]
    keys = ", ".join(f'"{c.name}"' for c in family.columns)
    why = f"""CASE WHEN NOT whole THEN 4 WHEN us IS NULL OR us <= 0 THEN 1 WHEN NOT isfinite(us) THEN 2
        WHEN judged AND (err IS NULL OR NOT err BETWEEN 0 AND {float(err_ratio)!r}) THEN 3 ELSE 0 END"""
    sql = f"""WITH rows AS ({" UNION ALL ".join(parts)}), told AS (SELECT *, {why} AS why FROM rows)
        SELECT file, gfx, cu_num, {keys}, backend, count(*), count(*) FILTER (why = 1), count(*) FILTER (why = 2),
            count(*) FILTER (why = 3), max(err) FILTER (why = 3), min(us) FILTER (why = 3), min(us) FILTER (why = 0),
            arg_min({{'k': kernel, 't': tflops, 'e': err}}, {{'u': us, 'k': kernel}}) FILTER (why = 0) AS b
        FROM told GROUP BY file, gfx, cu_num, {keys}, backend"""
    _run(db, f"CREATE OR REPLACE TEMP TABLE best AS {sql}")
    if _run(db, "SELECT count(*) FROM best")[0][0] > MAX_GROUPS:
        raise InputError(f"more than {MAX_GROUPS} shapes and backends: these are no tuning results; give fewer files")
    return _run(db, "SELECT * EXCLUDE (b), b.k, b.t, b.e FROM best")


def _select(files: Sequence[Path], columns: int, found: Layout, family: Family, wide: Wide | None) -> str:
    """The rows of the files in our names; of a wide benchmark, those of one of its backends."""
    names = [f"c{i}" for i in range(columns)]
    typed = ", ".join(f"'{n}': 'VARCHAR'" for n in names)
    nulls = ", ".join(_quoted(n) for n in NULLS)
    read = f"""read_csv([{", ".join(_quoted(str(f)) for f in files)}], columns = {{{typed}}}, auto_detect = false,
        header = true, delim = ',', quote = '"', escape = '"', nullstr = [{nulls}], filename = true,
        ignore_errors = true, store_rejects = true, rejects_limit = {MAX_REJECTS}, max_line_size = 2000000)"""
    text = {role: f"trim({names[i]})" for role, i in found.at.items()}
    keys = {c.name: _key(c, names[found.keys[c.name]] if c.name in found.keys else None) for c in family.columns}
    whole = " AND ".join(_positive(c, f'"{c.name}"') for c in family.columns)
    err, judged = (f"try_cast({text['err']} AS DOUBLE)", "true") if "err" in text else ("NULL::DOUBLE", "false")
    if wide is not None:
        us, tflops, backend, kernel = names[wide.us], "NULL", f"'{wide.backend}'", "NULL"
        tflops = f"trim({names[wide.tflops]})" if wide.tflops is not None else tflops
    else:
        us, tflops = names[found.at["us"]], text.get("tflops", "NULL")
        kernel = text.get("kernel")
        backend = sql_backend(
            family.name, kernel=_name(kernel), kernel_id=text.get("kernel_id"), libtype=text.get("libtype")
        )
        kernel = kernel or "NULL"
    given = ", ".join(f'{sql} AS "{name}"' for name, sql in keys.items())
    kept = ", ".join(f'CASE WHEN whole THEN "{c.name}" END AS "{c.name}"' for c in family.columns)
    return f"""SELECT file, CASE WHEN whole THEN gfx END AS gfx, CASE WHEN whole THEN cu_num END AS cu_num, {kept},
            CASE WHEN whole THEN backend END AS backend, us, kernel, tflops::VARCHAR AS tflops, err, judged, whole
        FROM (SELECT *, coalesce({whole}, false) AS whole
        FROM (SELECT filename AS file, {text.get("gfx", "NULL::VARCHAR")} AS gfx,
            {_whole(names[found.at["cu_num"]]) if "cu_num" in found.at else "NULL::INTEGER"} AS cu_num, {given},
            {backend} AS backend, try_cast({us} AS DOUBLE) AS us, ({kernel})::VARCHAR AS kernel, {tflops} AS tflops,
            {err} AS err, {judged} AS judged FROM {read}))"""


def _name(kernel: str | None) -> str | None:
    """Kernel names that say nothing besides those of NULLS."""
    return f"nullif({kernel}, 'nan')" if kernel else None


def _key(column: Column, name: str | None) -> str:
    if name is None:
        return f"{int(column.default or 0)}::INTEGER" if column.kind == "int" else _quoted(column.default or "")
    return _whole(name) if column.kind == "int" else f"trim({name})"


def _whole(name: str) -> str:
    """A whole number; NULL for any other (a cast alone would round 16.5)."""
    value = f"try_cast({name} AS DOUBLE)"
    exact = f"CASE WHEN {value} = floor({value}) THEN try_cast({value} AS INTEGER) END"
    return f"CASE WHEN contains({name}, '.') THEN {exact} ELSE try_cast({name} AS INTEGER) END"


def _positive(column: Column, name: str) -> str:
    if column.kind == "text":
        return f"{name} IS NOT NULL"
    return f"{name} IN ({', '.join(column.legal)})" if column.legal else f"{name} > 0"


def rejected(db: duckdb.DuckDBPyConnection) -> list[tuple[str, int, str]]:
    """(file, line, what) of lines that were no rows, a file at most MAX_REJECTS of them; forgets them.

    Raises InputError for those after which the rest of the file cannot be trusted.
    """
    sql = """SELECT s.file_path, e.line, any_value(e.error_type::VARCHAR) FROM reject_errors e
        JOIN reject_scans s USING (scan_id, file_id) GROUP BY ALL ORDER BY ALL"""
    found: list[tuple[str, int, str]] = [(str(f), int(n), str(what)) for f, n, what in _run(db, sql)]
    for table in ("reject_errors", "reject_scans"):
        _run(db, f"DROP TABLE IF EXISTS {table}")
    faults = [f"{escaped(f)}:{n}: {_FATAL[what]}" for f, n, what in found if what in _FATAL]
    if faults:
        raise InputError(faults[:50])
    return found


def _run(db: duckdb.DuckDBPyConnection, sql: str) -> list[tuple[Any, ...]]:
    import duckdb

    try:
        return db.execute(sql).fetchall()
    except duckdb.OutOfMemoryException as e:
        raise OrchestratorError(f"the files need more memory than {MEMORY} and temporary space: give fewer") from e
    except duckdb.Error as e:
        raise InputError(_fault(str(e))) from e


def _fault(text: str) -> str:
    """DuckDB's message as ours: file, line, what."""
    file = re.search(r"file ?= ?(.+)", text) or re.search(r'file "([^"]+)"', text, re.I)
    line = re.search(r"Line: (\d+)", text)
    what = "mixes line ends or quotes so that no reader can tell its rows apart" if "state machine" in text else text
    where = ":".join([*([escaped(file[1].strip())] if file else []), *([line[1]] if line else [])])
    first = escaped(" ".join(what.split())[:300])
    return f"{where}: {first}" if where else first


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
