"""Records of a worker and their checks, the frames of a node's stream, and the fields of a measured row.

A record is a line of events/<slot>.jsonl: the agent makes it (`record`), `worker follow` streams it, the controller
reads it (`parse_record`). RECORDS has the fields of each type. A row is the value `row` of a record; the worker's check
of rows and the columns of the ledger and of profile.csv are made from the table FIELDS.

    {"type": "row", "t": 1790000000.5, "attempt": "g0007-1", "shape": 12, "row": {"us": 12.5, "errRatio": 0.0, ...}}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PROTOCOL = 1
MAX_SECONDS = 1e7
MAX_RECORD_BYTES = 64 * 1024


class ProtocolError(ValueError):
    """A spec, record or name does not follow this protocol."""


def json_object(data: bytes, what: str) -> dict[str, Any]:
    """`data` as a JSON object, only in UTF-8 (json would accept UTF-16 as well). Raises ProtocolError."""
    try:
        raw = json.loads(data.decode())
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"{what} is not JSON: {e}") from e
    if not isinstance(raw, dict):
        raise ProtocolError(f"{what} is not a JSON object")
    return raw


def first_faults(faults: list[str], limit: int = 20) -> list[str]:
    """The first faults, and how many more there are."""
    return faults if len(faults) <= limit else [*faults[:limit], f"and {len(faults) - limit} more"]


def type_faults(raw: Mapping[str, Any], types: Mapping[str, tuple[type, ...]], required: Sequence[str]) -> list[str]:
    """Unknown and missing fields, and those of another type. A bool is refused everywhere, also as a number."""
    faults = [f"unknown field {name!r}" for name in raw if name not in types]
    faults += [f"missing field {name!r}" for name in required if name not in raw]
    for name, legal in types.items():
        if name in raw and (not isinstance(raw[name], legal) or isinstance(raw[name], bool)):
            faults.append(f"{name} is {type(raw[name]).__name__}, not {legal[0].__name__}")
    return faults


# Records: what a worker appends to events/<slot>.jsonl. Every record has `type` and `t` (epoch seconds).
RECORDS: dict[str, tuple[str, ...]] = {
    # a worker process began; `info` holds pid, python, epoch, protocol, code, and what `probe` knows
    # (host, gfx, cu_num, device, ...); in a container also image, the hash of the image's content (sha256:...)
    "worker_started": ("info",),
    "worker_stopped": ("why",),
    # the tuner's child answered: gfx, cu_num, device name, library versions; seconds from spawn to ready
    "tuner_ready": ("tuner", "device", "seconds"),
    # a small GEMM with a known result: ok, us, detail; attempt: the canary spec it answers, null for the
    # worker's own. A tuner that does not start is a failed canary too. A worker with a failed canary claims
    # nothing but a spec of kind canary that names its slot.
    "canary": ("ok", "us", "detail", "attempt"),
    # microseconds of a compute-bound and a memory-bound kernel, between attempts; seconds that it took
    "canary_timed": ("compute_us", "memory_us", "seconds"),
    "spec_rejected": ("attempt", "detail"),
    "attempt_started": ("attempt", "group", "device"),
    "shape_started": ("attempt", "shape"),
    "row": ("attempt", "shape", "row"),
    # one M of a config file, measured in the name of a shape of the file (worker/triton_configs/point_record.py)
    "point_timed": ("attempt", "shape", "point"),
    # settles a shape; `row` is its winner, measured again among the leaders
    "shape_tuned": ("attempt", "shape", "row"),
    # the tuner's own verdict on a shape (see SHAPE_VERDICTS)
    "shape_failed": ("attempt", "shape", "reason", "detail"),
    # outcome: one of OUTCOMES; in_flight: shape id or null; exit: code or negative signal of the tuner's
    # process, null where it lives on; spent: seconds by kind (import, inputs, check, ..., and `start`:
    # spawn to ready, in the first attempt of a tuner's process; that time is not part of `seconds`)
    "attempt_ended": ("attempt", "outcome", "in_flight", "exit", "detail", "seconds", "spent"),
}

# Optional fields of a record. conditions: a reading of worker/conditions.py, taken before the first and after the last
# shape of an attempt, and after a timed canary. For the end of a shape (see worker/protocol/candidates.py):
#   candidate      the winner's identity
#   withheld       blocked candidates: they were not measured because they faulted, in this attempt or earlier
#   withheld_more  how many more there are
_OF_CANDIDATES = ("candidate", "withheld", "withheld_more")
OPTIONAL: dict[str, tuple[str, ...]] = {
    "shape_tuned": _OF_CANDIDATES,
    "shape_failed": _OF_CANDIDATES[1:],
    "canary": ("final",),
    "canary_timed": ("conditions",),
    "attempt_started": ("conditions",),
    "attempt_ended": ("conditions",),
}

OUTCOMES = (
    "done",  # the tuner went through all its shapes
    "fault",  # the tuner's process died by a signal or exit
    "oom",  # killed by the kernel for memory, or out of device memory
    "hang",  # the watchdog ended it
    "error",  # an exception in the tuner that is no shape's fault that it could name
    "disk_full",  # rows could not be written
    "cancelled",  # ended at a request
    "worker_died",  # found claimed by a worker that is gone
)
SHAPE_VERDICTS = ("no_candidate", "wrong_result", "unsupported")


_FIELDS = {type_: frozenset(fields) for type_, fields in RECORDS.items()}


def record(type_: str, t: float, **fields: Any) -> dict[str, Any]:
    """A record of a known type with all its fields, and with the optional ones that hold something."""
    optional = OPTIONAL.get(type_, ())
    if set(fields) - set(optional) != set(RECORDS[type_]):
        raise ProtocolError(f"{type_} takes {RECORDS[type_]}, not {tuple(fields)}")
    held = {name: value for name, value in fields.items() if value or name not in optional}
    return {"type": type_, "t": round(t, 6), **held}


def parse_record(line: bytes, decode: Callable[[bytes], Any] | None = None) -> dict[str, Any]:
    """Parse a record of a worker's file: it has a known type and all fields, and is capped. Raises ProtocolError.

    `decode`: a faster JSON decoder. If it raises ValueError, json decodes the line.
    """
    if len(line) > MAX_RECORD_BYTES:
        raise ProtocolError(f"record of {len(line)} bytes")
    try:
        raw = decode(line) if decode is not None else None
    except ValueError:
        raw = None
    if not isinstance(raw, dict):
        raw = json_object(line, "record")
    t = raw.get("t")
    if not isinstance(raw.get("type"), str) or raw["type"] not in RECORDS:
        raise ProtocolError("record without a known type")
    if not isinstance(t, (int, float)) or not 0 <= t <= 1e12:
        raise ProtocolError("record without a time")
    if not _FIELDS[raw["type"]] <= raw.keys():
        missing = [name for name in RECORDS[raw["type"]] if name not in raw]
        raise ProtocolError(f"{raw['type']} without {', '.join(missing)}")
    return raw


# The stream of a node (worker follow): frames, each a header line and `length` bytes.
#   E <slot> <offset> <length>\n<bytes>     bytes of events/<slot>.jsonl
#   L <slot> <offset> <length>\n<bytes>     bytes of logs/<slot>.log
#   B <length>\n<json>                      a beat, with these fields:
#     t, epoch, stop          epoch seconds; the epoch that the node obeys; the word in control/stop, or null
#     error                   what is wrong with files of the stream, if anything is
#     held                    attempts that wait or are claimed; left out while records are still to be sent
#     slots                   {slot: {"alive": bool, "age": seconds since its last sign of life, or null, "waits": ...}}
#                             waits: RUN/NODE of the worker that holds the device which the slot's worker waits for, or
#                             "/PATH of OWNER (ERROR)" of a lock that it cannot open; absent if it does not wait
BEAT_S = 2.0
"""Seconds between beats."""
LOST_BEATS = 3
"""A stream that misses this number of beats is broken."""


Row = dict[str, Any]
"""A measured candidate by the names of FIELDS, without what is not known."""


@dataclass(frozen=True, slots=True)
class Field:
    """A value of a row."""

    name: str
    kind: type[int] | type[float] | type[str]
    meaning: str
    limit: int = 0
    """Characters of a text at most."""
    column: str = ""
    """Its column in the ledger; without one it is part of `extra` there."""
    shown: bool = False
    """It is a column of profile.csv beyond those of AITER's tables."""


FIELDS = (
    Field("us", float, "device time in microseconds; -1: not measured", column="us"),
    Field("errRatio", float, "share of outputs beyond atol + rtol * abs(reference), 1e-2 each", column="err_ratio"),
    Field(
        "status", str, "`ok`, `wrong` (errRatio above the limit), `unsupported`, `error`, `oom` or `timeout`",
        100, "status", shown=True,
    ),
    Field("kernelId", int, "AITER's number of the kernel", column="kernel_id"),
    Field("splitK", int, "AITER's number of splits of K, 0: one", column="split_k"),
    Field("kernelName", str, "the kernel", 1000, "kernel_name"),
    Field("libtype", str, "the backend", 100, "libtype"),
    Field("tflops", float, "1e12 operations a second: 2 M N K B / us / 1e6", column="tflops"),
    Field("bw", float, "GB/s of operands read once and output written once", column="bw"),
    Field("spread", float, "half the interquartile range of the samples over the median", column="spread", shown=True),
    Field("samples", int, "number of samples", column="samples", shown=True),
    Field("detail", str, "why there is no time, or a remark", 2000, "detail", shown=True),
    # a winner that was ranked against others in rounds
    Field("margin", float, "lead of a winner over its runner-up in standard errors of their ratio", shown=True),
    # a bench; its rows may also have the statuses unavailable and fault
    Field("run", int, "round of a bench: equal numbers were measured side by side"),
    Field("env", str, "name of the software stack, where there are several", 40),
    Field("op", str, "the operation by a name that is the same over dates and stacks", 200),
    Field("timer", str, "how a bench took the time", 40),
    Field("aiter_config", str, "file, bucket and values of the config that was read, of config sets", 400),
    # a tuner of config files
    Field("triton_config", str, "the bucket's config, old and new, with its points, as JSON", 2000),
    # both stages of AITER's fused MoE
    Field("block_m", int, "fmoe: rows of a block"),
    Field("run_1stage", int, "fmoe: 1 where one kernel does both stages"),
    Field("xbf16", int, "fmoe: 1 where the first operand is bf16"),
    Field("flat", int, "fmoe: 1 where the tokens are flat"),
    Field("us1", float, "fmoe: time of the first stage"),
    Field("us2", float, "fmoe: time of the second stage"),
    Field("kernelName1", str, "fmoe: kernel of the first stage", 1000),
    Field("kernelName2", str, "fmoe: kernel of the second stage", 1000),
    Field("err1", str, "fmoe: share of wrong elements of the first stage", 40),
    Field("err2", str, "fmoe: share of wrong elements of the second stage", 40),
)  # fmt: skip

_BY_NAME = {f.name: f for f in FIELDS}
_HUGE = 1e30


def is_wrong(err_ratio: float, limit: float) -> bool:
    """Return whether a share of wrong elements is above the run's limit, or is not a valid share."""
    return not 0 <= err_ratio <= limit


def checked_row(raw: Any, err_limit: float) -> Row:
    """Return a tuner's row with known fields of the right types. Its status is `wrong` if its error is above the limit.

    nan and inf are dropped, and long text is cut. Raises ProtocolError.
    """
    if not isinstance(raw, Mapping):
        raise ProtocolError("row is not a mapping")
    row: Row = {}
    for name, value in raw.items():
        field = _BY_NAME.get(name)
        if field is None or not _is_of_kind(value, field.kind):
            raise ProtocolError(f"row field {name!r} holds {type(value).__name__}")
        if field.kind is str:
            row[name] = value[: field.limit]
        elif -_HUGE < value < _HUGE:
            row[name] = value
    if row.get("status", "ok") == "ok" and "errRatio" in row and is_wrong(row["errRatio"], err_limit):
        row["status"] = "wrong"
    return row


def _is_of_kind(value: Any, kind: type) -> bool:
    if kind is int:
        return type(value) is int and abs(value) < 2**62
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind)
