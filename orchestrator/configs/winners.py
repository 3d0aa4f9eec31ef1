"""Winning configs of a run: written from its ledger into `configs/`, and read there (docs/reference/files.md).

Each winning row carries its bucket's document (worker.protocol.ConfigRow). Rows of one bucket from one attempt are one
decision. If attempts decided differently on a bucket (its group was split after a fault), it keeps what it has.
For AITER a bucket is one of its files', in `configs/aiter/`. For an engine it is the M that one key serves, in
`configs/vllm/`; there a line of the table ends with the document of its row, which is what a merge reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.errors import InputError
from orchestrator.ledger.reader import LedgerReader
from orchestrator.tables.textfiles import Faults, csv_records, shown
from orchestrator.tables.tuned import best, number_of
from orchestrator.tables.write import write_atomic, write_csv
from worker.families import Family
from worker.triton_configs.engine import Device, Layer
from worker.triton_configs.kinds import BY_NAME, ConfigKind
from worker.triton_configs.resolve import Bucket, bound_of, is_bucket, read, written

FIELD = "triton_config"
"""The field of a winner's row in the ledger that holds its bucket's document."""
FOLDER = "configs/aiter"
OF_ENGINES = "configs/vllm"
TABLE = "tuned.csv"
COLUMNS = (
    "kind", "config", "gfx", "B", "N", "K", "bucket", "caller", "M", "count", "old_us", "new_us", "err_ratio", "old",
    "file",
)  # fmt: skip
NO_ROW = "has no row: the run proved no winner, so there is nothing to merge"
ENGINE_COLUMNS = (
    "file", "key", "first", "last", "M", "routing", "count", "old_us", "new_us", "err_ratio", "document",
)  # fmt: skip


class Place(NamedTuple):
    """A bucket of a shape's file; `shape` is (B, N, K), B None where the kind has none; None: of the default file."""

    kind: ConfigKind
    arch: str
    shape: tuple[int | None, int, int] | None
    bucket: str

    @property
    def file(self) -> str:
        """Name of the file that holds the winners."""
        if self.shape is None:
            return f"{self.arch}-{self.kind.config}.json"
        b, n, k = self.shape
        batch = f"-B={b}" if b is not None and self.kind.batch_in_name else ""
        return f"{self.arch}-{self.kind.config}{batch}-N={n}-K={k}.json"


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

    def at(self) -> tuple[Any, ...]:
        """The key of a measurement: shape, M and operator. B is None for all of a kind's or for none."""
        return self.b, self.n, self.k, self.m, self.caller

    def shown(self) -> str:
        """Its shape in words."""
        return f"{f'B={self.b} ' if self.b else ''}M={self.m} N={self.n} K={self.k}"


class Range(NamedTuple):
    """The M of one key in a file of an engine. `made`: project, version and hash of the kernel that was measured."""

    file: str
    first: int
    last: int
    key: int
    device: Device
    made: tuple[str, ...]

    @property
    def bucket(self) -> str:
        """Its name."""
        return f"M={self.first}-{self.last}"


@dataclass(frozen=True, slots=True)
class Point(Measured):
    """One M of a layer of an engine. `b`: its top-k; `caller`: its routing; `document`: of its row."""

    layer: Layer = field(kw_only=True)
    place: Range = field(kw_only=True)
    document: str = field(kw_only=True)

    def shown(self) -> str:
        """Its sizes in words."""
        return f"M={self.m} {words(self.layer)}"


def words(layer: Layer) -> str:
    """The sizes of a layer."""
    sizes = {"E": layer.e, "N": layer.n, "K": layer.k, "topk": layer.topk}
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size)


@dataclass(slots=True)
class Winner:
    """A bucket's new config with what was measured of it."""

    bucket: str
    values: Bucket
    measured: list[Measured] = field(default_factory=list)


@dataclass(slots=True)
class WonFile:
    """A file of winners. `kind`: None for an engine's; `default`: they are meant for AITER's default file, of whatever
    N and K; else for (b, n, k)."""

    path: Path
    kind: Any
    chip: str
    default: bool
    winners: dict[str, Winner] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Bucket]:
        """The new values by bucket."""
        return {name: w.values for name, w in self.winners.items()}

    @property
    def rows(self) -> list[Measured]:
        """All measurements."""
        return [m for w in self.winners.values() for m in w.measured]

    @property
    def shape(self) -> tuple[int | None, int, int]:
        """(B, N, K) of the first measurement; every one's where the file is not the default."""
        first = self.rows[0]
        return first.b, first.n, first.k


def write(ledger: LedgerReader, root: Path) -> list[str]:
    """Write a config file for each shape with a winner, and tuned.csv naming them; what was left out, in sentences.

    `root`: the run's folder. Raises OSError.
    """
    files: dict[str, dict[Any, Bucket]] = {}
    if ledger.meta("tuner", "") == "vllm":
        ranges, notes = _decided_ranges({str(r.row.get(FIELD)): 0 for r in ledger.winners()})
        for place, winner in ranges.items():
            files.setdefault(place.file, {})[place.key] = winner.values
        points = (r for w in ranges.values() for r in sorted(w.measured, key=Measured.at) if isinstance(r, Point))
        texts = {name: json.dumps(dict(sorted(of.items())), indent=4) + "\n" for name, of in files.items()}
        _store(root / OF_ENGINES, texts, ENGINE_COLUMNS, (
            (r.place.file, r.place.key, r.place.first, r.place.last, r.m, r.caller, r.count, r.old_us, r.new_us,
             r.err_ratio, r.document)
            for r in points
        ))  # fmt: skip
        return notes
    found, notes = decisions(ledger.family, ((r.key, r.row) for r in ledger.winners()))
    for p, winner in found.items():
        files.setdefault(p.file, {})[p.bucket] = winner.values
    rows = (
        (p.kind.name, p.kind.config, p.arch, "" if r.b is None else r.b, r.n, r.k, p.bucket, r.caller, r.m, r.count,
         r.old_us, r.new_us, r.err_ratio, json.dumps(r.old, separators=(",", ":")), p.file)
        for p, winner in found.items() for r in sorted(winner.measured, key=Measured.at)
    )  # fmt: skip
    _store(root / FOLDER, {name: written(buckets) for name, buckets in files.items()}, COLUMNS, rows)
    return notes


def _store(folder: Path, texts: Mapping[str, str], columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_atomic(folder / name, text)
    for stale in {p.name for p in folder.glob("*.json")} - set(texts):
        (folder / stale).unlink()
    write_csv(folder / TABLE, columns, ([str(v) for v in row] for row in rows))


def decisions(
    family: Family, rows: Iterable[tuple[Sequence[int | str], Mapping[str, Any]]]
) -> tuple[dict[Place, Winner], list[str]]:
    """(new values by bucket, sentences on buckets that were left out) of winners: (key, further fields) each."""
    return _decided(_decision(dict(zip(family.key_names, key, strict=True)), extra.get(FIELD)) for key, extra in rows)


def _decided_ranges(lines: Mapping[str, int]) -> tuple[dict[Range, Winner], list[str]]:
    """Decide on the documents of an engine's rows, each with its line. Ranges of a file that overlap stay as they are.
    So do all of a file that two devices or engines measured."""
    made = [d for text, line in lines.items() if (d := _engine_decision(text, line))]
    clash = {
        p: q for p, *_ in made for q, *_ in made
        if p.file == q.file and p != q and (p[4:] != q[4:] or (p.first <= q.last and q.first <= p.last))
    }  # fmt: skip
    found, notes = _decided(d for d in made if d[0] not in clash)
    notes += [
        f"{p.file}: {p.bucket} stays as it is: {q.bucket} was decided as well, by another search"
        for p, q in clash.items()
    ]
    return found, notes


def _decided(made: Iterable[tuple[Any, Bucket, Sequence[Measured]] | None]) -> tuple[dict[Any, Winner], list[str]]:
    by_place: dict[Any, list[Winner]] = {}
    for place, values, measured in filter(None, made):
        known = by_place.setdefault(place, [])
        if (mine := next((w for w in known if w.values == values), None)) is None:
            known.append(mine := Winner(place.bucket, values))
        mine.measured += measured
    notes = [
        f"{p.file}: {p.bucket} stays as it is: {len(of)} searches decided differently (shapes that differ in more than"
        " M, or a group that was split)"
        for p, of in by_place.items()
        if len(of) > 1
    ]
    out = {p: of[0] for p, of in by_place.items() if len(of) == 1 and of[0].values}
    for winner in out.values():  # the shape's own row has its count
        winner.measured = list(best(winner.measured, Measured.at, lambda r: r.count == 0).values())
    return out, notes


def _engine_decision(text: str, line: int) -> tuple[Range, Bucket, list[Point]] | None:
    """The document of a row of an engine's tuner, or None if it has none."""
    try:
        document = json.loads(text)
        old, layer, file = document["old"], Layer.of(document["layer"]), str(document["file"])
        first, last, key = (int(document[name]) for name in ("first", "last", "key"))
        made = tuple(str(document[name]) for name in ("project", "version", "source"))
        place = Range(file, first, last, key, Device(**document["device"]), made)
        measured = [
            Point(layer.topk, layer.n, layer.k, int(m), str(label), int(count), float(was), float(us), float(err),
                  dict(old[int(at)]), line, layer=layer, place=place, document=text)
            for m, count, was, us, err, at, label in document["points"]
        ]  # fmt: skip
        values = dict(document["values"] or {})
    except (ValueError, TypeError, KeyError, IndexError):
        return None
    good = file == Path(file).name and file.endswith(".json") and 1 <= first <= key <= last
    return (place, values, measured) if good else None


def _decision(key: Mapping[str, int | str], text: Any) -> tuple[Place, Bucket, list[Measured]] | None:
    """The document in a row, or None if the row has no such document. Values {}: the bucket stays as it is."""
    try:
        document = json.loads(text)
        kind = BY_NAME[document["kind"]]
        old, values, bucket, arch = document["old"], document["values"] or {}, document["bucket"], document["arch"]
        shape = (int(key["B"]) if "B" in key else None, int(key["N"]), int(key["K"]))
        measured = [
            Measured(*shape, int(m), str(caller), int(count), float(was), float(us), float(err), dict(old[int(at)]))
            for m, count, was, us, err, at, caller in document["points"]
        ]
    except (ValueError, TypeError, KeyError, IndexError):
        return None
    if not is_bucket(bucket) or not isinstance(values, dict) or not str(arch).isalnum():
        return None
    return Place(kind, str(arch), None if document.get("default") else shape, bucket), values, measured


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
        raise InputError(f"{table}: {NO_ROW}")
    return list(files.values())


def read_ranges(run: Path) -> list[WonFile]:
    """The files of a run's winners for an engine. Raises InputError."""
    table, files = run / OF_ENGINES / TABLE, dict[str, WonFile]()
    found, _ = _decided_ranges({cells[-1]: line for line, _, cells in csv_records(table) if any(cells)})
    for place, winner in found.items():
        file = files.setdefault(place.file, WonFile(table.parent / place.file, None, place.device.name, False))
        file.winners[place.bucket] = winner
    if not files:
        raise InputError(f"{table}: {NO_ROW}")
    return list(files.values())


def _take(row: Mapping[str, str], line: int, folder: Path, files: dict[str, WonFile]) -> None:
    """Add one row to its file's winners. Raises ValueError, KeyError and OSError, with what is wrong."""
    kind, name, bucket = BY_NAME.get(row["kind"]), row["file"], row["bucket"]
    if kind is None or kind.config != row["config"]:
        raise ValueError(f"{shown(row['config'])} is not a config of the kind {shown(row['kind'])}")
    bound_of(bucket)
    if name != Path(name).name or not name.startswith(f"{row['gfx']}-{kind.config}"):
        raise ValueError(f"file is {shown(name)}, not {row['gfx']}-{kind.config}... beside this table")
    n, k, m = (_positive(row, c) for c in "NKM")
    b = _positive(row, "B") if row["B"] else None
    old = json.loads(row["old"])
    old_us, new_us = number_of(row["old_us"]), number_of(row["new_us"])
    if old_us is None or new_us is None or new_us <= 0 or not (old_us > 0 or old_us == -1) or not isinstance(old, dict):
        raise ValueError("old_us, new_us or old is not a measurement")
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
