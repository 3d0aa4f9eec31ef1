"""Records of a run's winning Triton configs, read from `configs/aiter/` of its folder (docs/reference/files.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.tables.faults import Faults, shown
from orchestrator.tables.open import csv_records
from orchestrator.tables.tuned import number_of
from worker.triton_configs.kinds import BY_NAME, ConfigKind
from worker.triton_configs.resolve import Bucket, bound_of, read

FOLDER = "configs/aiter"
TABLE = "tuned.csv"
COLUMNS = (
    "kind", "config", "gfx", "B", "N", "K", "bucket", "caller", "M", "count", "old_us", "new_us", "err_ratio", "old",
    "file",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """One M of one shape under the old and the new config, in microseconds. `caller`: "" for the kind's wrapper;
    `count`: calls of the workload, 0 for a bound that is none of its M; `old`: the config that it had, and old_us -1
    where that does not run; `line`: in tuned.csv."""

    b: int | None
    n: int
    k: int
    m: int
    caller: str
    count: int
    old_us: float
    new_us: float
    err_ratio: float
    old: Bucket
    line: int = 0


@dataclass(slots=True)
class Winner:
    """A bucket's new config with what was measured of it."""

    bucket: str
    values: Bucket
    measured: list[Measured] = field(default_factory=list)


@dataclass(slots=True)
class WonFile:
    """A file of winners. `default`: they are meant for the default file, of whatever N and K; else for (b, n, k)."""

    path: Path
    kind: ConfigKind
    gfx: str
    default: bool
    winners: dict[str, Winner] = field(default_factory=dict)

    @property
    def rows(self) -> list[Measured]:
        """All measurements."""
        return [m for w in self.winners.values() for m in w.measured]

    @property
    def shape(self) -> tuple[int | None, int, int]:
        """(B, N, K) of the first measurement; every one's where the file is not the default."""
        first = self.rows[0]
        return first.b, first.n, first.k


def read_winners(run: Path) -> list[WonFile]:
    """The files of a run's winners. Raises InputError with every fault by line."""
    table = run / FOLDER / TABLE
    if not table.is_file():
        raise InputError(
            f"{run}: holds no {FOLDER}/{TABLE}; only a run of `tune --tuner aiter-triton` with a proven winner has one"
        )
    faults, files = Faults(table), dict[str, WonFile]()
    header: list[str] = []
    for line, _, cells in csv_records(table):
        if not header:
            header = list(cells)
            if lacking := [c for c in COLUMNS if c not in header]:
                raise InputError(f"{table}:{line}: lacks the columns {', '.join(lacking)}")
        elif any(cells):
            try:
                _take(dict(zip(header, cells, strict=False)), line, table.parent, files)
            except (ValueError, KeyError, OSError) as e:
                faults.add(str(e), line=line)
    faults.raise_as(InputError)
    if not files:
        raise InputError(f"{table}: has no row: the run proved no winner, so there is nothing to merge")
    return list(files.values())


def _take(row: Mapping[str, str], line: int, folder: Path, files: dict[str, WonFile]) -> None:
    """Add one row to its file's winners. Raises ValueError, KeyError and OSError, with what is wrong."""
    kind, name, bucket = BY_NAME.get(row["kind"]), row["file"], row["bucket"]
    if kind is None or kind.config != row["config"]:
        raise ValueError(f"{shown(row['config'])} is no config of the kind {shown(row['kind'])}")
    bound_of(bucket)
    if name != Path(name).name or not name.startswith(f"{row['gfx']}-{kind.config}"):
        raise ValueError(f"file is {shown(name)}, not {row['gfx']}-{kind.config}... beside this table")
    n, k, m = (_positive(row, c) for c in "NKM")
    b = _positive(row, "B") if row["B"] else None
    old = json.loads(row["old"])
    old_us, new_us = number_of(row["old_us"]), number_of(row["new_us"])
    if old_us is None or new_us is None or new_us <= 0 or not (old_us > 0 or old_us == -1) or not isinstance(old, dict):
        raise ValueError("old_us, new_us or old is no measurement")
    if name not in files:
        files[name] = WonFile(folder / name, kind, row["gfx"], name == f"{row['gfx']}-{kind.config}.json")
    file = files[name]
    if not file.default and file.winners and file.shape != (b, n, k):
        raise ValueError(f"{name} holds winners of several shapes: {file.shape} and {(b, n, k)}")
    if bucket not in file.winners:
        values = read(file.path).buckets.get(bucket)
        if values is None:
            raise ValueError(f"{name} has no bucket {bucket}")
        file.winners[bucket] = Winner(bucket, values)
    count, err_ratio = _positive(row, "count", 0), number_of(row["err_ratio"]) or 0.0
    measured = Measured(b, n, k, m, row["caller"], count, old_us, new_us, err_ratio, old, line)
    file.winners[bucket].measured.append(measured)


def _positive(row: Mapping[str, str], column: str, least: int = 1) -> int:
    text = row[column]
    if not (text.isascii() and text.isdigit() and least <= int(text[:12]) < 1 << 31):
        raise ValueError(f"{column} is {shown(text)}, not a whole number from {least} on")
    return int(text)
