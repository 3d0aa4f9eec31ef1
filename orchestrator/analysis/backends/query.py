"""The query over profiles: all files that share a header and a family at once, streamed by DuckDB in bounded memory.

Numbers are read as such; where a file holds a cell that is none, it is read once more with every column as text, cast
where it is needed, so that the cell costs its row and no more, and the reason is noted. A row is
either valid or left out for one reason of `REASONS`; lines that are no rows of the header are counted by DuckDB's
rejects table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.analysis.backends.scan import Layout, Wide
from orchestrator.errors import InputError, OrchestratorError
from orchestrator.tables.backends import AITERS, KNOWN, UNKNOWN, owned
from orchestrator.tables.faults import escaped
from worker.families import FAMILIES, Aiter, Column, Family
from worker.families.backends import BY_NAME, TRITON

if TYPE_CHECKING:
    import duckdb

MEMORY = "400MB"
"""The memory that DuckDB may hold; beyond it writes to a temporary folder."""
TFLOPS_OFF = 0.05
"""A tflops column may differ by so much from 2*M*N*K / us before a note names it."""
MAX_GROUPS = 1_000_000
"""Shapes times backends; more is no tuning result, and would not fit the memory that is kept of them."""
AT_A_TIME = 2048
"""Rows that are taken out together: more leave the processor's cache before they are looked at."""
MOST_WRONG = 100
"""Rows beyond the error ratio that are listed of a shape and backend, those of the largest errors."""
MAX_REJECTS = 100_000
"""Faults of lines that DuckDB notes: a short line makes one a missing cell."""
NULLS = ("", "Null", "null", "NULL", "None")
REASONS = {
    "no_time": "without a time (us missing, not a number, or not above 0)",
    "not_finite": "with an infinite time",
    "error_ratio": "beyond the error ratio",
    "no_shape": "without a whole key",
    "malformed": "that are not rows of the header (cut short, too long, not UTF-8)",
}
"""The reasons why rows are left out, as words after `N rows`."""
_FATAL = {
    "UNQUOTED VALUE": "opens a quote that is not closed: what follows cannot be separated; mend the line",
    "LINE SIZE OVER MAXIMUM": "is too long for a table: the file is damaged; remove the line",
}
_END = r"\Z"
_BEGIN = re.compile(r"[A-Za-z0-9_]+(?![*+?{])")
_LITERAL = re.compile(r"(\.\*)?([A-Za-z0-9_]+)(\\Z)?\Z")


def connect(folder: Path) -> duckdb.DuckDBPyConnection:
    """A database in memory that spills to `folder`, touches no network and uses at most eight cores."""
    import duckdb

    threads = min(8, len(os.sched_getaffinity(0)))
    config: dict[str, Any] = {
        "memory_limit": MEMORY, "threads": threads, "temp_directory": str(folder), "preserve_insertion_order": False,
        "autoinstall_known_extensions": False, "autoload_known_extensions": False,
    }  # fmt: skip
    db = duckdb.connect(":memory:", config=config)
    db.execute("SET enable_progress_bar = false")  # it goes to standard output, where --json has its document
    return db


def make_best(
    db: duckdb.DuckDBPyConnection,
    table: str,
    files: Sequence[Path],
    columns: int,
    found: Layout,
    family: Family,
    err_ratio: float,
    typed: bool = True,
) -> None:
    """Put a row per file, shape and backend into `table`; `best_rows` takes them out.

    The best row is the one of the lowest us; of equals always the same one. `typed`: numbers are read as such, which is
    faster; a cell that is none costs its row, and `rejected` says so: ask again without it. Raises InputError where a
    file cannot be read to its end.
    """
    parts = [_select(files, columns, found, family, wide, typed) for wide in found.wide or (None,)]
    names = ", ".join(f'"{c.name}"' for c in family.columns)
    why = f"""CASE WHEN us IS NULL OR us <= 0 THEN 1 WHEN NOT isfinite(us) THEN 2
        WHEN judged AND (err IS NULL OR NOT err BETWEEN 0 AND {float(err_ratio)!r}) THEN 3 ELSE 0 END"""
    # The order of equal times must not depend on the order of reading. Comparing names as well costs a fifth of the
    # whole query; a hash of the kernel's number, in digits of the time that mean nothing, hardly anything.
    turn = f"us * (1 + (hash(tie) & 255)::DOUBLE / {2**44}) AS turn"
    # Texts make the groups dear: a file by itself is none of their keys.
    by = f"{'' if len(files) == 1 else 'file, '}gfx, cu_num, {names}, backend"
    sql = f"""WITH judged_rows AS (SELECT *, {why} AS why, {turn} FROM ({" UNION ALL ".join(parts)}))
        SELECT {by}, count(*) AS all_rows, count(*) FILTER (why = 1) AS no_time,
            count(*) FILTER (why = 2) AS infinite, count(*) FILTER (why = 3) AS wrong,
            max(err) FILTER (why = 3) AS worst, min(us) FILTER (why = 3) AS wrong_us,
            min(us) FILTER (why = 0) AS least, min(turn) FILTER (why = 0) AS first,
            max_by({{'b': backend, 'k': kernel, 'e': err, 'u': us}}, coalesce(err, 'inf'), {MOST_WRONG})
                FILTER (why = 3) AS listed,
            arg_min({{'k': kernel, 't': tflops, 'e': err}}, turn) FILTER (why = 0) AS fastest
        FROM judged_rows GROUP BY {by}"""
    _run(db, f"CREATE OR REPLACE TABLE {table} AS {sql}")
    if _run(db, f"SELECT count(*) FROM {table} WHERE {_whole_key(family)}")[0][0] > MAX_GROUPS:
        raise InputError(f"more than {MAX_GROUPS} shapes and backends: these are no tuning results; give fewer files")


def best_rows(
    db: duckdb.DuckDBPyConnection, table: str, files: Sequence[Path], family: Family
) -> Iterator[list[tuple[Any, ...]]]:
    """The rows that `make_best` put there, some at a time; dropped at the end: file, gfx, cu_num, *key, backend, rows,
    no_time, not_finite, error_ratio, worst error, fastest time beyond the error ratio, rows beyond it, us,
    turn (Best.turn), kernel, the tflops column where it may not agree with the shape and us, error. Rows without a
    whole key have a key of NULLs.
    """
    alone, whole = len(files) == 1, _whole_key(family)
    nulls = ", ".join("NULL" for _ in range(len(family.columns) + 3))
    keys = ", ".join(f'"{c.name}"::INTEGER' if c.kind == "int" else f'"{c.name}"' for c in family.columns)
    file = _quoted(str(files[0])) if alone else "file"
    with _as_our_errors():
        found = db.execute(
            f"""SELECT {file}, gfx, cu_num, {keys}, backend, all_rows, no_time, infinite, wrong, worst, wrong_us,
            listed, least, first, fastest.k, {_odd(family)}, fastest.e FROM {table} WHERE {whole}
        UNION ALL SELECT {file}, {nulls}, sum(all_rows), 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
        FROM {table} WHERE coalesce(NOT ({whole}), true) {"" if alone else "GROUP BY file"}
        HAVING count(*) > 0 ORDER BY {", ".join(str(i) for i in range(4, len(family.columns) + 5))}"""
        )
        while some := found.fetchmany(AT_A_TIME):
            yield some
    _run(db, f"DROP TABLE {table}")


def _whole_key(family: Family) -> str:
    return " AND ".join(_sound(c) for c in family.columns)


def _odd(family: Family) -> str:
    """The tflops column where it may not agree with the shape and the time: most do, and are not looked at again."""
    if family.m_column != "M":
        return "fastest.t"
    sizes = " * ".join(f'"{c.name}"' for c in family.columns if c.name in ("B", "M", "N", "K"))
    made = f"(2 * {sizes} / least / 1e6)"
    return f"CASE WHEN abs(try_cast(fastest.t AS DOUBLE) - {made}) > {TFLOPS_OFF} * {made} THEN fastest.t END"


def _select(files: Sequence[Path], columns: int, found: Layout, family: Family, wide: Wide | None, typed: bool) -> str:
    """The rows of the files in our names; of a wide benchmark, those of one of its backends."""
    names = [f"c{i}" for i in range(columns)]
    numbers = {i for role, i in found.at.items() if role in ("us", "err", "cu_num")} if typed else set()
    numbers |= {found.keys[c.name] for c in family.columns if c.kind == "int" and c.name in found.keys and typed}
    types = ", ".join(f"'{n}': '{'DOUBLE' if i in numbers else 'VARCHAR'}'" for i, n in enumerate(names))
    nulls = ", ".join(_quoted(n) for n in NULLS)
    read = f"""read_csv([{", ".join(_quoted(str(f)) for f in files)}], columns = {{{types}}}, auto_detect = false,
        header = true, delim = ',', quote = '"', escape = '"', nullstr = [{nulls}], filename = true,
        ignore_errors = true, store_rejects = true, rejects_limit = {MAX_REJECTS}, max_line_size = 2000000)"""
    text = {role: names[i] for role, i in found.at.items()}
    keys = ", ".join(
        f'{_key(c, names[found.keys[c.name]] if c.name in found.keys else None)} AS "{c.name}"' for c in family.columns
    )
    err, judged = (f"try_cast({text['err']} AS DOUBLE)", "true") if "err" in text else ("NULL::DOUBLE", "false")
    kernel = "NULL::VARCHAR"
    if wide is not None:
        us, backend = names[wide.us], f"'{wide.backend}'"
        tflops = names[wide.tflops] if wide.tflops is not None else "NULL::VARCHAR"
    else:
        us, tflops, kernel = names[found.at["us"]], text.get("tflops", "NULL::VARCHAR"), text.get("kernel", kernel)
        cells = {role: _trimmed(text[role]) for role in ("kernel_id", "libtype") if role in text}
        backend = sql_backend(
            family.name,
            kernel="kernel" if "kernel" in text else None,
            kernel_id=cells.get("kernel_id"),
            libtype=cells.get("libtype"),
        )
    gfx = _trimmed(text["gfx"]) if "gfx" in text else "NULL::INTEGER"
    cu_num = f"try_cast({names[found.at['cu_num']]} AS INTEGER)" if "cu_num" in found.at else "NULL::INTEGER"
    return f"""SELECT filename AS file, {gfx} AS gfx, {cu_num} AS cu_num, {keys},
            {backend} AS backend, try_cast({us} AS DOUBLE) AS us, kernel, {tflops} AS tflops, {err} AS err,
            {judged} AS judged, {text.get("kernel_id", "kernel")} AS tie
        FROM (SELECT *, {_trimmed(kernel) if "kernel" in text else kernel} AS kernel FROM {read})"""


def _trimmed(name: str) -> str:
    """A cell without blanks around it; `trim` alone would copy every cell."""
    return f"CASE WHEN starts_with({name}, ' ') OR ends_with({name}, ' ') THEN trim({name}) ELSE {name} END"


def _key(column: Column, name: str | None) -> str:
    if name is None:
        return f"{int(column.default or 0)}::DOUBLE" if column.kind == "int" else _quoted(column.default or "")
    return _whole(name) if column.kind == "int" else f"trim({name})"


def _whole(name: str) -> str:
    """A number, whole or not: a cast to a whole one would round 16.5. Judged once a group, by `_sound`."""
    return f"try_cast({name} AS DOUBLE)"


def _sound(column: Column) -> str:
    """SQL condition: the column holds a legal key."""
    name = f'"{column.name}"'
    if column.kind == "text":
        return f"{name} IS NOT NULL"
    if column.legal:
        return f"{name} IN ({', '.join(column.legal)})"
    return f"{name} BETWEEN 1 AND {2**31 - 1} AND {name} = floor({name})"


def rejected(db: duckdb.DuckDBPyConnection) -> tuple[dict[str, tuple[set[int], bool]], bool]:
    """(By file the lines that were no rows, and whether there may be more than were noted; whether some were refused
    for a cell that is no number). Forgets them.

    Raises InputError for those after which the rest of the file cannot be trusted.
    """
    noted = "reject_errors e JOIN reject_scans s USING (scan_id, file_id)"
    fatal = ", ".join(f"'{what}'" for what in _FATAL)
    bad = _run(
        db,
        f"""SELECT DISTINCT s.file_path, e.line, e.error_type::VARCHAR FROM {noted}
        WHERE e.error_type::VARCHAR IN ({fatal}) ORDER BY ALL LIMIT 50""",
    )
    sql = f"SELECT s.file_path, list(DISTINCT e.line), count(*) FROM {noted} GROUP BY s.file_path"
    found = {str(f): (set(lines), n >= MAX_REJECTS) for f, lines, n in _run(db, sql)}
    cells = bool(_run(db, "SELECT 1 FROM reject_errors WHERE error_type::VARCHAR = 'CAST' LIMIT 1"))
    for table in ("reject_errors", "reject_scans"):
        _run(db, f"DROP TABLE IF EXISTS {table}")
    if bad:
        raise InputError([f"{escaped(f)}:{line}: {_FATAL[what]}" for f, line, what in bad])
    return found, cells


def _run(db: duckdb.DuckDBPyConnection, sql: str) -> list[tuple[Any, ...]]:
    with _as_our_errors():
        return db.execute(sql).fetchall()


@contextmanager
def _as_our_errors() -> Iterator[None]:
    """Raise DuckDB's errors as ours."""
    import duckdb

    try:
        yield
    except duckdb.OutOfMemoryException as e:
        raise OrchestratorError(f"the files need more memory than {MEMORY} and temporary space: give fewer") from e
    except duckdb.Error as e:
        raise InputError(_fault(str(e))) from e


def _fault(text: str) -> str:
    """DuckDB's message as ours: file, line, what."""
    file = re.search(r"file ?= ?(.+)", text) or re.search(r'file "([^"]+)"', text, re.I)
    line = re.search(r"Line: (\d+)", text)
    what = "mixes line ends or quotes so that no reader can separate its rows" if "state machine" in text else text
    where = ":".join([*([escaped(file[1].strip())] if file else []), *([line[1]] if line else [])])
    first = escaped(" ".join(what.split())[:300])
    return f"{where}: {first}" if where else first


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def sql_backend(family: str, *, kernel: str | None, kernel_id: str | None, libtype: str | None) -> str:
    """An SQL expression for the backend of a row of that family: the rule of the worker's `backend_of`, made from the
    same table of patterns, with backends named by their owner, and AITER's Gluon, which a row's libtype calls triton,
    by its own. Rows of our tuner triton, which is gone, are nobody's. Tests hold the two to one another.

    The other arguments are SQL expressions of VARCHAR columns (trimmed, NULL where empty or `Null`), None where the
    file has no such column.
    """
    whens: list[str] = []
    aiter = FAMILIES[family].aiter if family in FAMILIES else Aiter()
    ck_kernels = aiter.ck_kernels
    if libtype:
        names = ", ".join(f"'{b}'" for b in KNOWN if owned(b) == b)
        gone = f"WHEN lower({libtype}) = 'triton' AND starts_with({kernel}, '{TRITON}') THEN '{UNKNOWN}'"
        hint = f"WHEN lower({libtype}) = 'triton' AND {kernel} = 'gluon' THEN '{AITERS['gluon']}'"
        whens += [gone, hint] if kernel else []
        whens += [f"WHEN lower({libtype}) = '{b}' THEN '{owner}'" for b, owner in AITERS.items()]
        whens.append(f"WHEN lower({libtype}) IN ({names}) THEN lower({libtype})")
    if kernel:
        named = [f"WHEN {_matches(kernel, pattern)} THEN '{owned(backend)}'" for pattern, backend in BY_NAME]
        named.append(f"WHEN starts_with({kernel}, '{TRITON}') THEN '{UNKNOWN}'")
        named.insert(1, f"WHEN {kernel} = 'gluon' THEN '{AITERS['gluon']}'")  # the hint of a routed row
        whens += [named[0], *_short_cut(kernel), *named[1:]]
    if kernel_id and ck_kernels:
        digits, number = f"regexp_full_match({kernel_id}, '[0-9]+')", f"try_cast({kernel_id} AS HUGEINT)"
        whens.append(f"WHEN {digits} THEN CASE WHEN {number} < {ck_kernels} THEN 'ck' ELSE 'asm' END")
    other = aiter.only_backend or UNKNOWN
    return f"CASE {' '.join(whens)} ELSE '{other}' END" if whens else f"'{other}'"


def _short_cut(column: str) -> list[str]:
    """The last pattern's names, which are the most, recognised behind the first pattern: those that begin as it says
    and hold nothing that a pattern between looks for anywhere. A beginning that one of these may claim otherwise is
    left out."""
    _, *between, (last, backend) = BY_NAME
    parts = [part for pattern, _ in between for part in pattern.split("|")]
    anywhere = [part[2:] for part in parts if part.startswith(".*")]
    claims = [begin[0] for part in parts if (begin := _BEGIN.match(part))]
    own = [p for p in last.split("|") if (literal := _LITERAL.match(p)) and not literal[1] and not literal[3]]
    free = [p for p in own if all(any(a in c for a in anywhere) for c in claims if c.startswith(p) or p.startswith(c))]
    begins = " OR ".join(f"starts_with({column}, '{p}')" for p in free)
    holds = " OR ".join(f"contains({column}, '{p}')" for p in anywhere)
    return [f"WHEN ({begins}) AND NOT ({holds}) THEN '{backend}'"] if free and anywhere else []


def _matches(column: str, pattern: str) -> str:
    """`re.match(pattern, column)` in SQL; plain comparisons where they will do, which are several times faster."""
    out = []
    for part in pattern.split("|"):
        literal = _LITERAL.match(part)
        if literal is None:
            begin = _BEGIN.match(part)
            guard = f"starts_with({column}, '{begin[0]}') AND " if begin else ""
            out.append(f"({guard}regexp_matches({column}, '^(?:{part.replace(_END, _END.lower())})'))")
        elif literal[1]:
            out.append(f"contains({column}, '{literal[2]}')")
        elif literal[3]:
            out.append(f"{column} = '{literal[2]}'")
        else:
            out.append(f"starts_with({column}, '{literal[2]}')")
    return "(" + " OR ".join(out) + ")"
