"""Winners of the tuner aiter-triton, written from a run's ledger into `configs/aiter/` (docs/reference/files.md).

Each winning row carries its bucket's document (worker.protocol.ConfigRow). Rows of one bucket from one attempt are one
decision; a bucket for which attempts decided differently (its group was split after a fault) keeps what it has.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.configs.winners import COLUMNS, TABLE, Measured
from orchestrator.ledger.reader import LedgerReader
from orchestrator.tables.write import write_csv
from orchestrator.userfiles import write_atomic
from worker.families import Family
from worker.triton_configs.kinds import BY_NAME, ConfigKind
from worker.triton_configs.resolve import Bucket, is_bucket, written

FIELD = "triton_config"
"""Of a winner's row."""


@dataclass(frozen=True, slots=True)
class Place:
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


@dataclass(slots=True)
class Decision:
    """A bucket's new values, with what was measured of them by B, N, K, M and operator."""

    values: Bucket
    measured: dict[tuple[int | None, int, int, int, str], Measured] = field(default_factory=dict)


def write(ledger: LedgerReader, folder: Path) -> list[str]:
    """Write a config file for each shape with a winner, and tuned.csv naming them; what was left out, in sentences.

    Raises OSError.
    """
    found, notes = decisions(ledger.family, ((r.key, r.row) for r in ledger.winners()))
    files: dict[str, dict[str, Bucket]] = {}
    for place, decision in found.items():
        files.setdefault(place.file, {})[place.bucket] = decision.values
    folder.mkdir(parents=True, exist_ok=True)
    for name, buckets in files.items():
        write_atomic(folder / name, written(buckets))
    for stale in {p.name for p in folder.glob("*.json")} - set(files):
        (folder / stale).unlink()
    write_csv(folder / TABLE, COLUMNS, ([str(v) for v in row] for row in _rows(found)))
    return notes


def decisions(
    family: Family, rows: Iterable[tuple[Sequence[int | str], Mapping[str, Any]]]
) -> tuple[dict[Place, Decision], list[str]]:
    """(new values by bucket, sentences on buckets that were left out) of winners: (key, further fields) each."""
    by_place: dict[Place, list[Decision]] = {}
    for key, extra in rows:
        read = _read(dict(zip(family.key_names, key, strict=True)), extra.get(FIELD))
        if read is None:
            continue
        place, values, measured = read
        known = by_place.setdefault(place, [])
        mine = next((d for d in known if d.values == values), None)
        if mine is None:
            known.append(mine := Decision(values))
        for r in measured:
            at = (r.b, r.n, r.k, r.m, r.caller)
            if at not in mine.measured or r.count:  # the shape's own row has its count
                mine.measured[at] = r
    notes = [
        f"{p.file}: {p.bucket} stays as it is: {len(of)} searches decided differently (shapes that differ in more than"
        " M, or a group that was split)"
        for p, of in by_place.items()
        if len(of) > 1
    ]
    return {p: of[0] for p, of in by_place.items() if len(of) == 1 and of[0].values}, notes


def _read(key: Mapping[str, int | str], text: Any) -> tuple[Place, Bucket, list[Measured]] | None:
    """A row's document, None for what is none. Values {}: the bucket stays as it is."""
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


def _rows(found: Mapping[Place, Decision]) -> Iterator[tuple[Any, ...]]:
    for p, decision in found.items():
        for _, r in sorted(decision.measured.items(), key=lambda e: e[0]):  # B is None for all or none of a kind's
            yield (
                p.kind.name, p.kind.config, p.arch, "" if r.b is None else r.b, r.n, r.k, p.bucket, r.caller, r.m,
                r.count, r.old_us, r.new_us, r.err_ratio, json.dumps(r.old, separators=(",", ":")), p.file,
            )  # fmt: skip
