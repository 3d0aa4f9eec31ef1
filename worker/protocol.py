"""What controller and worker say to each other: places in a node folder, group specs, records.

Stdlib only. The controller imports this module; the worker imports nothing of the controller's.

A *node folder* is one run's folder on one node::

    epoch                      number of the controller that may speak to this node (one line)
    node.json                  what the launcher and the workers need to know (NodeConfig)
    launch.sh tune.sh follow.sh   rendered scripts
    code/<sha>/worker/         this package
    inbox/                     specs waiting:  SEQ.SLOT.ATTEMPT.json  (SLOT is a slot or `any`)
    taken/                     specs that the controller took back before a worker claimed them
    claimed/<slot>/            the spec a slot works on (claimed by rename), and the slot's lock file
    attempts/<attempt>/        spec.json and the tuner's own files of a finished or running attempt
    events/<slot>.jsonl        records of a slot, one JSON object a line, append-only
    logs/<slot>.log            what tuner and worker print
    beat/<slot>                touched while the worker lives
    control/stop               `drain` (finish the attempt, claim no more) or `now`
    control/cancel/<attempt>   end that attempt
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

PROTOCOL = 1
ANY_SLOT = "any"
MAX_RECORD_BYTES = 64 * 1024
MAX_SPEC_BYTES = 8 * 1024 * 1024
MAX_SECONDS = 1e7

ATTEMPT_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}\Z")
SLOT_RE = re.compile(r"[0-9]{1,4}\Z")
INBOX_RE = re.compile(
    r"(?P<seq>[0-9]{8})\.(?P<slot>any|[0-9]{1,4})\.(?P<attempt>[A-Za-z0-9][A-Za-z0-9_-]{0,79})\.json\Z"
)


class ProtocolError(ValueError):
    """A spec, record or name that is not of this protocol."""


@dataclass(frozen=True, slots=True)
class NodePaths:
    """Every path of a node folder, for both sides of the wire."""

    root: Path

    @property
    def inbox(self) -> Path:
        return self.root / "inbox"

    @property
    def taken(self) -> Path:
        return self.root / "taken"

    @property
    def epoch(self) -> Path:
        return self.root / "epoch"

    @property
    def config(self) -> Path:
        return self.root / "node.json"

    @property
    def stop(self) -> Path:
        return self.root / "control" / "stop"

    def cancel(self, attempt: str) -> Path:
        return self.root / "control" / "cancel" / attempt

    def claimed(self, slot: str) -> Path:
        return self.root / "claimed" / slot

    def lock(self, slot: str) -> Path:
        return self.root / "claimed" / slot / "lock"

    def attempt(self, attempt: str) -> Path:
        return self.root / "attempts" / attempt

    def events(self, slot: str) -> Path:
        return self.root / "events" / f"{slot}.jsonl"

    def log(self, slot: str) -> Path:
        return self.root / "logs" / f"{slot}.log"

    def beat(self, slot: str) -> Path:
        return self.root / "beat" / slot

    def folders(self) -> tuple[str, ...]:
        """The folders of a fresh node folder, relative to its root."""
        return ("inbox", "taken", "claimed", "attempts", "events", "logs", "beat", "control/cancel")


@dataclass(frozen=True, slots=True)
class InboxName:
    """The name of a spec in the inbox; its order is the order of work, its slot who may claim it."""

    seq: int
    slot: str
    attempt: str

    def __str__(self) -> str:
        return f"{self.seq:08d}.{self.slot}.{self.attempt}.json"

    @classmethod
    def parse(cls, name: str) -> InboxName | None:
        m = INBOX_RE.match(name)
        return cls(int(m["seq"]), m["slot"], m["attempt"]) if m else None

    def claimable_by(self, slot: str) -> bool:
        return self.slot in (ANY_SLOT, slot)


@dataclass(frozen=True, slots=True)
class SpecShape:
    """One shape of a spec: its number within the run and its key columns in the family's order."""

    id: int
    key: dict[str, int | str]


@dataclass(frozen=True, slots=True)
class Spec:
    """What a worker is asked to do: kind `group` (tune the shapes) or `canary` (prove the slot healthy)."""

    attempt: str
    run: str
    epoch: int
    kind: str = "group"
    group: str = ""
    family: str = ""
    tuner: str = ""
    shapes: tuple[SpecShape, ...] = ()
    watchdog_s: float = 300.0
    """No sign of progress for so long is a hang."""
    grace_s: float = 5.0
    """From SIGINT to SIGKILL."""
    err_ratio: float = 0.05
    options: dict[str, Any] = field(default_factory=dict)
    """The tuner's own options."""
    protocol: int = PROTOCOL

    def dumps(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def loads(cls, data: bytes) -> Spec:
        """Raises ProtocolError with every fault of `data`, never anything else."""
        if len(data) > MAX_SPEC_BYTES:
            raise ProtocolError(f"spec of {len(data)} bytes is larger than {MAX_SPEC_BYTES}")
        raw = _json_object(data, "spec")
        faults = _faults(raw)
        if faults:
            raise ProtocolError("bad spec: " + "; ".join(_some(faults)))
        shapes = tuple(SpecShape(s["id"], dict(s["key"])) for s in raw.get("shapes", ()))
        return cls(**{**raw, "shapes": shapes})


_SPEC_TYPES: dict[str, tuple[type, ...]] = {
    "attempt": (str,), "run": (str,), "epoch": (int,), "kind": (str,), "group": (str,), "family": (str,),
    "tuner": (str,), "shapes": (list,), "watchdog_s": (int, float), "grace_s": (int, float),
    "err_ratio": (int, float), "options": (dict,), "protocol": (int,),
}  # fmt: skip


def _json_object(data: bytes, what: str) -> dict[str, Any]:
    """`data` as a JSON object, UTF-8 only (json itself would take UTF-16 as well). Raises ProtocolError."""
    try:
        raw = json.loads(data.decode())
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"{what} is not JSON: {e}") from e
    if not isinstance(raw, dict):
        raise ProtocolError(f"{what} is not a JSON object")
    return raw


def _some(faults: list[str], limit: int = 20) -> list[str]:
    return faults if len(faults) <= limit else [*faults[:limit], f"and {len(faults) - limit} more"]


def _type_faults(raw: Mapping[str, Any], types: Mapping[str, tuple[type, ...]], required: Sequence[str]) -> list[str]:
    out = [f"unknown field {k!r}" for k in raw if k not in types]
    out += [f"missing field {k!r}" for k in required if k not in raw]
    for name, legal in types.items():
        if name in raw and (not isinstance(raw[name], legal) or isinstance(raw[name], bool)):
            out.append(f"{name} is {type(raw[name]).__name__}, not {legal[0].__name__}")
    return out


def _faults(raw: Mapping[str, Any]) -> list[str]:
    out = _type_faults(raw, _SPEC_TYPES, ("attempt", "run", "epoch", "protocol"))
    if out:
        return out
    if raw["protocol"] != PROTOCOL:
        out.append(f"protocol {raw['protocol']}, this worker speaks {PROTOCOL}")
    out += [
        f"{k} is longer than 200 characters" for k in ("run", "group", "family", "tuner") if len(raw.get(k, "")) > 200
    ]
    if raw["epoch"] < 0:
        out.append("epoch is negative")
    if not 0 <= raw.get("err_ratio", 0) <= 1:
        out.append("err_ratio must be between 0 and 1")
    if not ATTEMPT_RE.match(raw["attempt"]):
        out.append("attempt is not a plain name")
    kind = raw.get("kind", "group")
    if kind not in ("group", "canary"):
        out.append(f"kind {kind!r} is neither group nor canary")
    if kind == "group" and not raw.get("shapes"):
        out.append("a group without shapes")
    for name in ("watchdog_s", "grace_s"):
        if not 0 < raw.get(name, 1) <= MAX_SECONDS:  # NaN fails as well
            out.append(f"{name} must be positive and at most {MAX_SECONDS:.0f}")
    ids: set[int] = set()
    for i, s in enumerate(raw.get("shapes", ())):
        if (
            not isinstance(s, dict)
            or set(s) != {"id", "key"}
            or type(s["id"]) is not int
            or not isinstance(s["key"], dict)
        ):
            out.append(f"shapes[{i}] is not {{id, key}}")
        elif not all(type(v) in (int, str) for v in s["key"].values()):
            out.append(f"shapes[{i}].key holds more than numbers and text")
        elif s["id"] in ids:
            out.append(f"shapes[{i}] repeats id {s['id']}")
        else:
            ids.add(s["id"])
    return out


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """node.json: what the launcher and the workers of a node need to know."""

    run: str
    node: str
    tuner: str
    options: dict[str, Any] = field(default_factory=dict)
    """The tuner's options on this node; a spec's own come on top."""
    slots: dict[str, dict[str, str]] = field(default_factory=lambda: {"0": {}})
    """The node's slots and the environment of each one's tuner."""
    idle_exit_s: float = 600.0
    """A worker without a spec for so long ends; 0: never."""
    start_timeout_s: float = 300.0
    """From the spawn of a tuner's process to its ready."""
    canary_timeout_s: float = 120.0
    protocol: int = PROTOCOL

    def dumps(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @classmethod
    def loads(cls, data: bytes) -> NodeConfig:
        """Raises ProtocolError with every fault of `data`, never anything else."""
        raw = _json_object(data, "node.json")
        faults = _config_faults(raw)
        if faults:
            raise ProtocolError("bad node.json: " + "; ".join(_some(faults)))
        return cls(**raw)


_CONFIG_TYPES: dict[str, tuple[type, ...]] = {
    "run": (str,), "node": (str,), "tuner": (str,), "options": (dict,), "slots": (dict,),
    "idle_exit_s": (int, float), "start_timeout_s": (int, float), "canary_timeout_s": (int, float),
    "protocol": (int,),
}  # fmt: skip


def _config_faults(raw: Mapping[str, Any]) -> list[str]:
    out = _type_faults(raw, _CONFIG_TYPES, ("run", "node", "tuner", "protocol"))
    if out:
        return out
    if raw["protocol"] != PROTOCOL:
        out.append(f"protocol {raw['protocol']}, this worker speaks {PROTOCOL}")
    if not 0 <= raw.get("idle_exit_s", 0) <= MAX_SECONDS:
        out.append(f"idle_exit_s must be 0 to {MAX_SECONDS:.0f}")
    for name in ("start_timeout_s", "canary_timeout_s"):
        if not 0 < raw.get(name, 1) <= MAX_SECONDS:
            out.append(f"{name} must be positive and at most {MAX_SECONDS:.0f}")
    for slot, env in raw.get("slots", {"0": {}}).items():
        if not SLOT_RE.match(slot):
            out.append(f"slot {slot!r} is not a number of up to four digits")
        if not isinstance(env, dict) or not all(_is_variable(k, v) for k, v in env.items()):
            out.append(f"slots[{slot!r}] is not a mapping of environment variables")
    return out


def _is_variable(name: str, value: Any) -> bool:
    return bool(name) and "=" not in name and isinstance(value, str) and "\0" not in name + value


class Row(TypedDict, total=False):
    """One measured candidate. `us` is device time in microseconds, -1 where there is none.

    tflops = 2*M*N*K*B / us / 1e6; bw in GB/s of operands read once and output written once;
    errRatio = share of output elements beyond atol + rtol*|reference| (1e-2 each), as AITER measures it.
    """

    kernelId: int
    splitK: int
    us: float
    kernelName: str
    libtype: str
    tflops: float
    bw: float
    errRatio: float
    status: str
    """ok, wrong (errRatio beyond the limit), unsupported, error, oom or timeout"""
    spread: float
    """Half the interquartile range of the samples over their median."""
    samples: int
    detail: str


class BenchRow(Row, total=False):
    """One run of a backend (worker/bench), or why it has none (run 0, us -1, or the shape's verdict).

    `libtype` is the backend. Further statuses: unavailable (this backend cannot run here), fault (its process died),
    untimed (right, but no time was taken).
    """

    run: int
    """1, 2, ...: the round; equal numbers were measured side by side."""
    env: str
    """The software stack's name; "" where there is one only."""
    op: str
    """The operation by a name that is the same over dates and stacks."""
    timer: str


class FmoeRow(Row, total=False):
    """With the two stages that AITER's tuner of fused MoE writes."""

    block_m: int
    run_1stage: int
    xbf16: int
    flat: int
    us1: float
    us2: float
    kernelName1: str
    kernelName2: str
    err1: str
    err2: str


# Records: what a worker appends to events/<slot>.jsonl. Every record has `type` and `t` (epoch seconds).
RECORDS: dict[str, tuple[str, ...]] = {
    # a worker process began; `info` holds pid, python, epoch, protocol, code, and what `probe` knows
    # (host, gfx, cu_num, device, ...); in a container also image, the hash of the image's content (sha256:...)
    "worker_started": ("info",),
    "worker_stopped": ("why",),
    # the tuner's child answered: gfx, cu_num, device name, library versions; seconds from spawn to ready
    "tuner_ready": ("tuner", "device", "seconds"),
    # a small GEMM with a known answer: ok, us, detail; attempt: the canary spec it answers, null for the
    # worker's own. A tuner that does not start is a failed canary too. A worker with a failed canary claims
    # nothing but a spec of kind canary that names its slot.
    "canary": ("ok", "us", "detail", "attempt"),
    "spec_rejected": ("attempt", "detail"),
    "attempt_started": ("attempt", "group", "device"),
    "shape_started": ("attempt", "shape"),
    "row": ("attempt", "shape", "row"),
    # settles a shape; `row` is its winner, measured again among the leaders
    "shape_tuned": ("attempt", "shape", "row"),
    # the tuner's own verdict on a shape (see SHAPE_VERDICTS)
    "shape_failed": ("attempt", "shape", "reason", "detail"),
    # outcome: one of OUTCOMES; in_flight: shape id or null; exit: code or negative signal of the tuner's
    # process, null where it lives on; spent: seconds by kind (import, inputs, check, ..., and `start`:
    # spawn to ready, in the first attempt of a tuner's process; that time is not part of `seconds`)
    "attempt_ended": ("attempt", "outcome", "in_flight", "exit", "detail", "seconds", "spent"),
}

# Fields that a record may have beside its own. conditions: a reading of worker/health.py, taken before the
# first and after the last shape of an attempt.
OPTIONAL: dict[str, tuple[str, ...]] = {
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
    "cancelled",  # asked to stop
    "worker_died",  # found claimed by a worker that is gone
)
SHAPE_VERDICTS = ("no_candidate", "wrong_result", "unsupported")


def record(type_: str, t: float, **fields: Any) -> dict[str, Any]:
    """A record of a known type with all its fields, and optional ones."""
    if set(fields) - set(OPTIONAL.get(type_, ())) != set(RECORDS[type_]):
        raise ProtocolError(f"{type_} takes {RECORDS[type_]}, not {tuple(fields)}")
    return {"type": type_, "t": round(t, 6), **fields}


def parse_record(line: bytes) -> dict[str, Any]:
    """A record of a worker's file as data: known type, all fields, capped. Raises ProtocolError."""
    if len(line) > MAX_RECORD_BYTES:
        raise ProtocolError(f"record of {len(line)} bytes")
    raw = _json_object(line, "record")
    t = raw.get("t")
    if not isinstance(raw.get("type"), str) or raw["type"] not in RECORDS:
        raise ProtocolError("record without a known type")
    if not isinstance(t, (int, float)) or not 0 <= t <= 1e12:
        raise ProtocolError("record without a time")
    missing = [f for f in RECORDS[raw["type"]] if f not in raw]
    if missing:
        raise ProtocolError(f"{raw['type']} without {', '.join(missing)}")
    return raw


# The stream of a node (worker follow): frames, each a header line and `length` bytes.
#   E <slot> <offset> <length>\n<bytes>     bytes of events/<slot>.jsonl
#   L <slot> <offset> <length>\n<bytes>     bytes of logs/<slot>.log
#   B <length>\n<json>                      a beat: {"t":..., "epoch":..., "stop": word or null, "error": text if any,
#                                           "slots": {slot: {"alive": bool, "age": s or null}}}
BEAT_S = 2.0
LOST_BEATS = 3
