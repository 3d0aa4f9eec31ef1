"""Winning configs of a run: `write_winners` writes them from its ledger into `configs/`, and `read_winners` reads them
there for a merge (docs/reference/files.md).

Each winning row carries its bucket's document (worker.protocol.ConfigRow), such as

    {"kind": "a16w16", "arch": "gfx950", "bucket": "M_LEQ_16", "values": {"BLOCK_SIZE_M": 16, ...}, "old": [{...}],
     "points": [[16, 3, 9.6, 8.1, 0.0, 0, ""]], "shape": [null, 1280, 8192]}

Rows of one bucket from one attempt are one `Decision`. If attempts decided differently on a bucket (its group was split
after a fault), it keeps what it has. For AITER a bucket is one of its files', in `configs/aiter/`. For an engine it is
the M that one key serves, in `configs/vllm/`. A line of the table `tuned.csv` ends with the document of its row, which
is what a merge reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.configs.cut_winners import documents_of_points
from orchestrator.errors import InputError
from orchestrator.files.faults import Faults
from orchestrator.files.read import csv_records
from orchestrator.files.write import write_atomic, write_csv
from orchestrator.ledger.reader import LedgerReader
from orchestrator.tables.keys import best_by_key
from worker.families import Family
from worker.triton_configs.config_file import Bucket, bound_of, text_of_buckets
from worker.triton_configs.engine_package import EngineDevice, Layer
from worker.triton_configs.kinds import BY_NAME
from worker.triton_configs.pair import needs_down_file, split_pair
from worker.triton_configs.point_record import PointRecord

DOCUMENT_FIELD = "triton_config"
"""The field of a winner's row in the ledger that holds its bucket's document."""
AITER_FOLDER = "configs/aiter"
ENGINE_FOLDERS = {"vllm": "configs/vllm", "sglang": "configs/sglang"}
"""The folder of a run's winners by engine, whose name is its tuner's too."""
TABLE = "tuned.csv"
COLUMNS = ("file", "bucket", "shape", "M", "caller", "count", "old_us", "new_us", "err_ratio", "document")


class MeasuredEngine(NamedTuple):
    """The engine whose kernel was measured: `("vllm", "0.33.0", "9f86d081884c7d65")`."""

    project: str
    version: str
    source: str
    """The beginning of the hash of the kernel's file."""


class BucketPlace(NamedTuple):
    """A bucket of a file; for an engine the M that one key serves."""

    file: str
    bucket: str
    """`M_LEQ_16`; of an engine `M=57-80`."""
    device: EngineDevice
    kind: Any = None
    """Of AITER's files: the `ConfigKind`."""
    is_default: bool = False
    """Of AITER's files: it is the default file."""
    key: int = 0
    """Of an engine: the key of the entry. 0 for AITER."""
    first: int = 0
    """Of an engine: the first M of the range."""
    last: int = 0
    """Of an engine: the last M of the range."""
    engine: MeasuredEngine = MeasuredEngine("", "", "")

    def clashes_with(self, other: BucketPlace) -> bool:
        """True for ranges of one engine's file that overlap, or that two devices or engines measured."""
        if not self.key or self.file != other.file or self == other:
            return False
        if (self.device, self.engine) != (other.device, other.engine):
            return True
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True)
class MeasuredShape:
    """One M of one shape, measured under the old and under the new config."""

    b: int | None
    """None where the kind has no B; of an engine the layer's top-k."""
    n: int
    k: int
    m: int
    caller: str
    """The operator that was measured, "" for the kind's wrapper; of an engine the routing."""
    count: int
    """Calls of the workload; 0 for a bound that is none of its M."""
    old_us: float
    """Microseconds; -1 if the old config does not run."""
    new_us: float
    err_ratio: float
    old: Bucket
    """The config that it had."""
    line: int
    """Its line in tuned.csv."""
    document: str
    """The document that it was read from."""
    layer: Layer | None
    """Of an engine."""

    @property
    def sizes(self) -> str:
        """Its shape without M: `B=16 N=1280 K=8192`."""
        if self.layer:
            return describe_layer(self.layer)
        batch = f"B={self.b} " if self.b else ""
        return f"{batch}N={self.n} K={self.k}"

    @property
    def is_plausible(self) -> bool:
        """True for sizes and times that a measurement can have."""
        has_old_time = self.old_us > 0 or self.old_us == -1
        return has_old_time and min(self.new_us, self.m, self.n, self.k) > 0


def describe_layer(layer: Layer) -> str:
    """The sizes of a layer: `E=256 N=256 K=7168 topk=8`."""
    sizes = {"E": layer.e, "N": layer.n, "K": layer.k, "topk": layer.topk}
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size)


@dataclass(slots=True)
class Winner:
    """A bucket's new config with what was measured of it."""

    place: BucketPlace
    values: Bucket
    measured: list[MeasuredShape] = field(default_factory=list)


@dataclass(slots=True)
class WinnerFile:
    """The winners of one file."""

    path: Path
    """The file in the run's folder."""
    place: BucketPlace
    """The place of one of them; all are of one device and kind."""
    winners: dict[str, Winner] = field(default_factory=dict)
    """By bucket."""

    @property
    def values(self) -> dict[str, Bucket]:
        """The new values by bucket."""
        return {name: winner.values for name, winner in self.winners.items()}

    @property
    def measured(self) -> list[MeasuredShape]:
        """All measurements."""
        return [row for winner in self.winners.values() for row in winner.measured]

    @property
    def layers(self) -> list[Layer]:
        """The layers that were measured, of an engine's file."""
        return layers_of(self.measured)

    @property
    def shape(self) -> tuple[int | None, int, int]:
        """(B, N, K) of the first measurement; every one's where the file is not the default."""
        first = self.measured[0]
        return first.b, first.n, first.k


def layers_of(measured: Iterable[MeasuredShape]) -> list[Layer]:
    """The layers of measurements, each once."""
    return list(dict.fromkeys(row.layer for row in measured if row.layer))


class Decision(NamedTuple):
    """The decision of one search on a bucket."""

    place: BucketPlace
    values: Bucket
    """The new config; {} if the bucket stays as it is."""
    measured: list[MeasuredShape]


def write_winners(ledger: LedgerReader, root: Path) -> list[str]:
    """Write a config file for each shape with a winner, and tuned.csv naming them; what was left out, in sentences.

    `root`: the run's folder. Raises OSError.
    """
    rows = ((row.key, row.row) for row in ledger.winners())
    winners, notes = decide_winners(ledger.family, rows, ledger.points())
    tuner = ledger.meta("tuner", "")
    is_engine = tuner in ENGINE_FOLDERS
    folder = root / ENGINE_FOLDERS.get(tuner, AITER_FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, Bucket]] = {}
    for place in sorted(winners, key=lambda place: place.key):
        files.setdefault(place.file, {})[str(place.key or place.bucket)] = winners[place].values
    if is_engine:
        files = _with_down_files(files)
    for name, buckets in files.items():
        text = json.dumps(buckets, indent=4) + "\n" if is_engine else text_of_buckets(buckets)
        write_atomic(folder / name, text)
    for path in folder.glob("*.json"):
        if path.name not in files:  # of an earlier export
            path.unlink()
    lines = [_table_line(place, row) for place, winner in winners.items() for row in winner.measured]
    write_csv(folder / TABLE, COLUMNS, lines)
    return notes


def _with_down_files(files: Mapping[str, dict[str, Bucket]]) -> dict[str, dict[str, Bucket]]:
    """An engine's files, those with pairs (`worker/triton_configs/pair.py`) as two files."""
    split: dict[str, dict[str, Bucket]] = {}
    for name, buckets in files.items():
        entries = {key: split_pair(values) for key, values in buckets.items()}
        split[name] = {key: up for key, (up, _) in entries.items()}
        if any(needs_down_file(values) for values in buckets.values()):
            split[name.replace(".json", "_down.json")] = {key: down for key, (_, down) in entries.items()}
    return split


def _table_line(place: BucketPlace, row: MeasuredShape) -> list[str]:
    """The cells of COLUMNS."""
    cells = (
        place.file,
        place.bucket,
        row.sizes,
        row.m,
        row.caller,
        row.count,
        row.old_us,
        row.new_us,
        row.err_ratio,
        row.document,
    )
    return [str(cell) for cell in cells]


def decide_winners(
    family: Family,
    rows: Iterable[tuple[Sequence[int | str], Mapping[str, Any]]],
    points: Iterable[PointRecord] = (),
) -> tuple[dict[BucketPlace, Winner], list[str]]:
    """(new values by bucket, sentences on buckets that were left out) of winners, (key, further fields) each, and of
    measured M.

    Rows without a bucket's document are left out. Ranges of a file that overlap stay as they are, and so do all of a
    file that two devices or engines measured.
    """
    decisions: dict[str, Decision | None] = {}  # by document: rows of one bucket may have the same
    for key, fields in rows:
        text = _document_with_shape(dict(zip(family.key_names, key, strict=True)), fields.get(DOCUMENT_FIELD))
        if text not in decisions:
            decisions[text] = _parse_decision(text)
    for text in documents_of_points(points):
        decisions[text] = _parse_decision(text)
    return _join_decisions([decision for decision in decisions.values() if decision is not None])


def engine_of_winners(run: Path) -> str:
    """The engine whose files a run's winners are for, such as "vllm"; "" if they are AITER's, or if it has none."""
    for engine, folder in ENGINE_FOLDERS.items():
        if (run / folder / TABLE).is_file():
            return engine
    return ""


def read_winners(run: Path) -> list[WinnerFile]:
    """The files of a run's winners. Raises InputError with every fault by line."""
    table = run / ENGINE_FOLDERS.get(engine_of_winners(run), AITER_FOLDER) / TABLE
    if not table.is_file():
        raise InputError(
            f"{run}: holds no {AITER_FOLDER}/{TABLE}; only a run of `tune --tuner aiter-triton` with a proven winner"
            " has one"
        )
    decisions: list[Decision] = []
    faults = Faults(table)
    for text, line in _documents_in(table).items():
        decision = _parse_decision(text, line)
        if decision is None:
            faults.add("does not end with the document of a winner", line=line)
        else:
            decisions.append(decision)
    faults.raise_as(InputError)
    winners, _ = _join_decisions(decisions)
    files: dict[str, WinnerFile] = {}
    for place, winner in winners.items():
        file = files.setdefault(place.file, WinnerFile(table.parent / place.file, place))
        file.winners[place.bucket] = winner
    if not files:
        raise InputError(f"{table}: has no row: the run proved no winner, so there is nothing to merge")
    return list(files.values())


def _documents_in(table: Path) -> dict[str, int]:
    """The documents at the ends of a table's lines, each with its first line."""
    lines: dict[str, int] = {}
    for line, _, cells in csv_records(table):
        if cells[-1] not in ("", COLUMNS[-1]):
            lines.setdefault(cells[-1], line)
    return lines


def _join_decisions(decisions: Sequence[Decision]) -> tuple[dict[BucketPlace, Winner], list[str]]:
    """(the winner of each bucket on which all searches agree, sentences on the other buckets)."""
    by_place: dict[BucketPlace, list[Winner]] = {}
    for place, values, measured in decisions:
        candidates = by_place.setdefault(place, [])
        same = next((winner for winner in candidates if winner.values == values), None)
        if same is None:
            same = Winner(place, values)
            candidates.append(same)
        same.measured += measured
    clashes = _find_clashes([decision.place for decision in decisions])
    winners: dict[BucketPlace, Winner] = {}
    notes: list[str] = []
    for place, candidates in by_place.items():
        if len(candidates) > 1:
            notes.append(
                f"{place.file}: {place.bucket} stays as it is: {len(candidates)} searches decided differently (shapes"
                " that differ in more than M, or a group that was split)"
            )
        elif candidates[0].values and place not in clashes:
            winners[place] = _without_repeated_rows(candidates[0])
    for place, other in clashes.items():
        notes.append(
            f"{place.file}: {place.bucket} stays as it is: {other.bucket} was decided as well, by another search"
        )
    return winners, notes


def _find_clashes(places: Sequence[BucketPlace]) -> dict[BucketPlace, BucketPlace]:
    """Ranges that cannot stand in one file, each with the last that it clashes with."""
    clashes: dict[BucketPlace, BucketPlace] = {}
    for place in places:
        for other in places:
            if place.clashes_with(other):
                clashes[place] = other
    return clashes


def _without_repeated_rows(winner: Winner) -> Winner:
    """The winner with one row for each shape: the shape's own, which has its count, before one of a bound."""
    rows = best_by_key(winner.measured, lambda r: (r.b, r.n, r.k, r.m, r.caller), lambda r: r.count == 0)
    return Winner(winner.place, winner.values, [rows[shape] for shape in sorted(rows)])


def _document_with_shape(key: Mapping[str, int | str], text: Any) -> str:
    """The document of a row with the (B, N, K) of its key; "" if the row has none."""
    try:
        return json.dumps({**json.loads(text), "shape": [key.get(name) for name in "BNK"]})
    except (ValueError, TypeError):
        return ""


def _parse_decision(text: str, line: int = 0) -> Decision | None:
    """The decision in a document, or None if it holds no decision."""
    try:
        document = json.loads(text)
        if "layer" in document:
            layer = Layer.from_document(document["layer"])
            place = _engine_place(document)
            shape = (layer.topk, layer.n, layer.k)
        else:
            layer = None
            place = _aiter_place(document)
            shape = document["shape"]
        measured = [_measured_shape(point, shape, layer, document, text, line) for point in document["points"]]
        values = dict(document["values"] or {})
        is_file_name = place.file == Path(place.file).name and place.file.endswith(".json")
        if not is_file_name or not all(row.is_plausible for row in measured):
            return None
    except (ValueError, TypeError, KeyError, IndexError):
        return None
    return Decision(place, values, measured)


def _measured_shape(
    point: Sequence[Any], shape: Sequence[Any], layer: Layer | None, document: Mapping[str, Any], text: str, line: int
) -> MeasuredShape:
    """A point of a document: `[M, count, old us, new us, errRatio, place of the old values in "old", caller]`."""
    m, count, old_us, new_us, err_ratio, old_place, caller = point
    b, n, k = shape
    return MeasuredShape(
        b=b,
        n=n,
        k=k,
        m=int(m),
        caller=str(caller),
        count=int(count),
        old_us=float(old_us),
        new_us=float(new_us),
        err_ratio=float(err_ratio),
        old=dict(document["old"][int(old_place)]),
        line=line,
        document=text,
        layer=layer,
    )


def _engine_place(document: Mapping[str, Any]) -> BucketPlace:
    first = int(document["first"])
    last = int(document["last"])
    key = int(document["key"])
    if not 1 <= first <= key <= last:
        raise ValueError
    return BucketPlace(
        file=str(document["file"]),
        bucket=f"M={first}-{last}",
        device=EngineDevice(**document["device"]),
        key=key,
        first=first,
        last=last,
        engine=MeasuredEngine(*(str(document[name]) for name in MeasuredEngine._fields)),
    )


def _aiter_place(document: Mapping[str, Any]) -> BucketPlace:
    kind = BY_NAME[document["kind"]]
    arch = str(document["arch"])
    bucket = document["bucket"]
    bound_of(bucket)  # raises ValueError for another text
    is_default = bool(document.get("default"))
    b, n, k = document["shape"]
    suffix = ""
    if not is_default:
        batch = f"-B={int(b)}" if b is not None and kind.batch_in_name else ""
        suffix = f"{batch}-N={int(n)}-K={int(k)}"
    return BucketPlace(f"{arch}-{kind.config}{suffix}.json", bucket, EngineDevice(arch, arch), kind, is_default)
