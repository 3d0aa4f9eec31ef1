"""Winning configs of a run: written from its ledger into `configs/`, and read there (docs/reference/files.md).

Each winning row carries its bucket's document (worker.protocol.ConfigRow). Rows of one bucket from one attempt are one
decision. If attempts decided differently on a bucket (its group was split after a fault), it keeps what it has.
For AITER a bucket is one of its files', in `configs/aiter/`. For an engine it is the M that one key serves, in
`configs/vllm/`. A line of the table ends with the document of its row, which is what a merge reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.errors import InputError
from orchestrator.files.faults import Faults
from orchestrator.files.read import csv_records
from orchestrator.files.write import write_atomic, write_csv
from orchestrator.ledger.reader import LedgerReader
from orchestrator.tables.keys import best_by_key
from worker.families import Family
from worker.triton_configs.engine import Device, Layer
from worker.triton_configs.kinds import BY_NAME
from worker.triton_configs.resolve import Bucket, bound_of, written

FIELD = "triton_config"
"""The field of a winner's row in the ledger that holds its bucket's document."""
FOLDER = "configs/aiter"
OF_ENGINES = "configs/vllm"
TABLE = "tuned.csv"
COLUMNS = ("file", "bucket", "shape", "M", "caller", "count", "old_us", "new_us", "err_ratio", "document")


class Place(NamedTuple):
    """A bucket of a file; for an engine the M that one key serves, with project, version and hash of the kernel that
    was measured in `made`. `kind`: of AITER's files; `default`: its default file is meant."""

    file: str
    bucket: str
    device: Device
    kind: Any = None
    default: bool = False
    key: int = 0
    first: int = 0
    last: int = 0
    made: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """One M of one shape under the old and the new config, in microseconds. `caller`: "" for the kind's wrapper, for an
    engine the routing; `count`: calls of the workload, 0 for a bound that is none of its M; `old`: the config that it
    had, and old_us -1 where that does not run; `line`: in tuned.csv; `layer`: of an engine, whose top-k is `b`."""

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
    line: int
    document: str
    layer: Layer | None

    @property
    def sizes(self) -> str:
        """Its shape without M in words."""
        return words(self.layer) if self.layer else f"{f'B={self.b} ' if self.b else ''}N={self.n} K={self.k}"


def words(layer: Layer) -> str:
    """The sizes of a layer."""
    sizes = {"E": layer.e, "N": layer.n, "K": layer.k, "topk": layer.topk}
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size)


@dataclass(slots=True)
class Winner:
    """A bucket's new config with what was measured of it."""

    place: Place
    values: Bucket
    measured: list[Measured] = field(default_factory=list)


@dataclass(slots=True)
class WonFile:
    """A file of winners by bucket. `place`: of one of them; all are of one device and kind."""

    path: Path
    place: Place
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
    found, notes = decisions(ledger.family, ((r.key, r.row) for r in ledger.winners()))
    is_engine, files = ledger.meta("tuner", "") == "vllm", dict[str, dict[str, Bucket]]()
    folder = root / (OF_ENGINES if is_engine else FOLDER)
    for p, winner in sorted(found.items(), key=lambda of: of[0].key):
        files.setdefault(p.file, {})[str(p.key or p.bucket)] = winner.values
    folder.mkdir(parents=True, exist_ok=True)
    for name, buckets in files.items():
        text = json.dumps(buckets, indent=4) + "\n" if is_engine else written(buckets)
        write_atomic(folder / name, text)
    for stale in {p.name for p in folder.glob("*.json")} - set(files):
        (folder / stale).unlink()
    rows = (
        (p.file, p.bucket, r.sizes, r.m, r.caller, r.count, r.old_us, r.new_us, r.err_ratio, r.document)
        for p, winner in found.items() for r in winner.measured
    )  # fmt: skip
    write_csv(folder / TABLE, COLUMNS, ([str(v) for v in row] for row in rows))
    return notes


def decisions(
    family: Family, rows: Iterable[tuple[Sequence[int | str], Mapping[str, Any]]]
) -> tuple[dict[Place, Winner], list[str]]:
    """(new values by bucket, sentences on buckets that were left out) of winners: (key, further fields) each.

    Rows without a document are left out. Ranges of a file that overlap stay as they are, and so do all of a file that
    two devices or engines measured.
    """
    texts = dict.fromkeys(_with_shape(dict(zip(family.key_names, key, strict=True)), of.get(FIELD)) for key, of in rows)
    return _decided(list(filter(None, map(_decision, texts))))


def read_winners(run: Path, folder: str = FOLDER) -> list[WonFile]:
    """The files of a run's winners. Raises InputError with every fault by line."""
    table, files = run / folder / TABLE, dict[str, WonFile]()
    if not table.is_file():
        raise InputError(
            f"{run}: holds no {folder}/{TABLE}; only a run of `tune --tuner aiter-triton` with a proven winner has one"
        )
    faults, lines = Faults(table), dict[str, int]()
    for line, _, cells in csv_records(table):
        lines.setdefault(cells[-1], line)
    made = [(_decision(text, line), line) for text, line in lines.items() if text not in ("", COLUMNS[-1])]
    for decision, line in made:
        if decision is None:
            faults.add("does not end with the document of a winner", line=line)
    faults.raise_as(InputError)
    for place, winner in _decided([d for d, _ in made if d])[0].items():
        file = files.setdefault(place.file, WonFile(table.parent / place.file, place))
        file.winners[place.bucket] = winner
    if not files:
        raise InputError(f"{table}: has no row: the run proved no winner, so there is nothing to merge")
    return list(files.values())


Decision = tuple[Place, Bucket, list[Measured]]


def _decided(made: Sequence[Decision]) -> tuple[dict[Place, Winner], list[str]]:
    clash = {
        p: q for p, *_ in made if p.key for q, *_ in made
        if p.file == q.file and p != q
        and ((p.device, p.made) != (q.device, q.made) or (p.first <= q.last and q.first <= p.last))
    }  # fmt: skip
    by_place: dict[Place, list[Winner]] = {}
    for place, values, measured in made:
        known = by_place.setdefault(place, [])
        if (mine := next((w for w in known if w.values == values), None)) is None:
            known.append(mine := Winner(place, values))
        mine.measured += measured
    notes = [
        f"{p.file}: {p.bucket} stays as it is: {len(of)} searches decided differently (shapes that differ in more than"
        " M, or a group that was split)"
        for p, of in by_place.items()
        if len(of) > 1
    ]
    notes += [
        f"{p.file}: {p.bucket} stays as it is: {q.bucket} was decided as well, by another search"
        for p, q in clash.items()
    ]
    out = {p: of[0] for p, of in by_place.items() if len(of) == 1 and of[0].values and p not in clash}
    for winner in out.values():  # the shape's own row has its count
        own = best_by_key(winner.measured, lambda r: (r.b, r.n, r.k, r.m, r.caller), lambda r: r.count == 0)
        winner.measured = [own[at] for at in sorted(own)]
    return out, notes


def _with_shape(key: Mapping[str, int | str], text: Any) -> str:
    """The document of a row with the (B, N, K) of its key; "" if the row has none."""
    try:
        return json.dumps({**json.loads(text), "shape": [key.get(name) for name in "BNK"]})
    except (ValueError, TypeError):
        return ""


def _decision(text: str, line: int = 0) -> Decision | None:
    """The decision in a document, or None if it holds no decision. Values {}: the bucket stays as it is."""
    try:
        document = json.loads(text)
        layer = Layer.of(document["layer"]) if "layer" in document else None
        place = _range(document) if layer else _bucket(document)
        b, n, k = (layer.topk, layer.n, layer.k) if layer else document["shape"]
        measured = [
            Measured(b, n, k, int(m), str(caller), int(count), float(was), float(us), float(err),
                     dict(document["old"][int(at)]), line, text, layer)
            for m, count, was, us, err, at, caller in document["points"]
        ]  # fmt: skip
        good = place.file == Path(place.file).name and place.file.endswith(".json")
        good = good and all(min(r.new_us, r.m, r.n, r.k) > 0 and (r.old_us > 0 or r.old_us == -1) for r in measured)
        return (place, dict(document["values"] or {}), measured) if good else None
    except (ValueError, TypeError, KeyError, IndexError):
        return None


def _range(document: Mapping[str, Any]) -> Place:
    first, last, key = (int(document[name]) for name in ("first", "last", "key"))
    if not 1 <= first <= key <= last:
        raise ValueError
    made = tuple(str(document[name]) for name in ("project", "version", "source"))
    device = Device(**document["device"])
    return Place(str(document["file"]), f"M={first}-{last}", device, None, False, key, first, last, made)


def _bucket(document: Mapping[str, Any]) -> Place:
    kind, arch, default = BY_NAME[document["kind"]], str(document["arch"]), bool(document.get("default"))
    bound_of(document["bucket"])
    b, n, k = document["shape"]
    batch = f"-B={int(b)}" if b is not None and kind.batch_in_name else ""
    rest = "" if default else f"{batch}-N={int(n)}-K={int(k)}"
    return Place(f"{arch}-{kind.config}{rest}.json", document["bucket"], Device(arch, arch), kind, default)
