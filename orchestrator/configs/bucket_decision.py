"""The decision of a search on a bucket of a config file, as the document of a winning row holds it.

`parse_decision` reads such a document (worker.protocol.ConfigRow):

    {"kind": "a16w16", "arch": "gfx950", "bucket": "M_LEQ_16", "values": {"BLOCK_SIZE_M": 16, ...}, "old": [{...}],
     "points": [[16, 3, 9.6, 8.1, 0.0, 0, ""]], "shape": [null, 1280, 8192]}

That of an engine's file, made by `cut_winners.py`, has a layer and a range of M instead. `decisions.py` joins the
decisions of a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from worker.triton_configs.config_file import Bucket, bound_of
from worker.triton_configs.engine_package import EngineDevice, Layer
from worker.triton_configs.kinds import BY_NAME


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
    """The `ConfigKind` of AITER's files, None for an engine."""
    is_default: bool = False
    """True for AITER's default file."""
    key: int = 0
    """The key of an engine's entry; 0 for AITER, as `first` and `last`."""
    first: int = 0
    """The first M that the entry serves."""
    last: int = 0
    """The last M that the entry serves."""
    engine: MeasuredEngine = MeasuredEngine("", "", "")

    @property
    def name_in_file(self) -> str:
        """The name of the bucket's entry: `M_LEQ_16`; of an engine its key, `64`."""
        return str(self.key or self.bucket)

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
    """The layer of an engine, None for AITER."""

    @property
    def sizes(self) -> str:
        """Its shape without M: `B=16 N=1280 K=8192`."""
        if self.layer:
            return self.layer.sizes_in_words
        batch = f"B={self.b} " if self.b else ""
        return f"{batch}N={self.n} K={self.k}"

    @property
    def is_plausible(self) -> bool:
        """True for sizes and times that a measurement can have."""
        has_old_time = self.old_us > 0 or self.old_us == -1
        return has_old_time and min(self.new_us, self.m, self.n, self.k) > 0


def layers_of(measured: Iterable[MeasuredShape]) -> list[Layer]:
    """The layers of measurements, each once."""
    return list(dict.fromkeys(row.layer for row in measured if row.layer))


class BucketDecision(NamedTuple):
    """The decision of one search on a bucket, or of all searches that agree; a winner if it changes the bucket."""

    place: BucketPlace
    values: Bucket
    """The new config; {} if the bucket stays as it is."""
    measured: list[MeasuredShape]


def parse_decision(text: str, line: int = 0) -> BucketDecision | None:
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
    return BucketDecision(place, values, measured)


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
    """The place of a document with a layer. Raises ValueError, TypeError and KeyError."""
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
    """The place of a document with a kind. Raises ValueError, TypeError and KeyError."""
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
