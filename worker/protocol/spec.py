"""The input of a worker: `node.json` on its node, and group specs, which hold the shapes of an attempt and the tuner's
options. Also the candidates in specs (`only`, `refuted`, `confirmed`) and records (`withheld`: the blocked ones).

A candidate's identity is a list of strings that only the tuner understands. Equal lists are the same candidate in every
process of an image. Across images, a candidate is the kernel of a table (TableKernel). `key` is the tuner's name for
the shape, and as opaque as an identity.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple, TypedDict, cast

from worker.protocol.paths import ATTEMPT_RE, SLOT_RE
from worker.protocol.records import MAX_SECONDS, PROTOCOL, ProtocolError, json_object, some, type_faults

Identity = tuple[str, ...]

MAX_BLOCKED = 64  # most blocked candidates that a record lists; `withheld_more` counts the others
MAX_BLOCKED_BYTES = 40 * 1024
MAX_VERDICTS = 256  # most entries of `refuted` and of `confirmed` in one spec
MAX_WORDS, MAX_WORD = 64, 400  # limits of one identity or key: strings, and characters of each
BAD_ENDS = ("fault", "hang", "oom", "error")
SOURCES = ("attempt", "blocklist")
_TEXTS = {"name": 200, "detail": 300, "slot": 200, "image": 200, "driver": 100}
_BLOCKED_TYPES: dict[str, tuple[type, ...]] = {
    "key": (list,),
    "candidate": (list,),
    "outcome": (str,),
    "source": (str,),
    "t": (int, float),
    **dict.fromkeys(_TEXTS, (str,)),
}


class BlockedRecord(TypedDict, total=False):
    """A blocked candidate: an attempt did not measure it because it faulted there, or did so before. The records call
    the list of them `withheld`."""

    key: list[str]
    candidate: list[str]
    name: str  # name for display
    outcome: str  # one of BAD_ENDS
    detail: str
    t: float  # time of the fault, epoch seconds
    slot: str  # stable id of the GPU where it faulted, else node and slot
    image: str
    driver: str
    source: str  # `attempt`: it faulted in this attempt. `blocklist`: before, and was blocked.
    # the fault was seen on a second slot: no evidence of one slot alone, so the attempt is complete without it
    confirmed: bool


class TableKernel(NamedTuple):
    """A kernel as the cells of a table name it, which may be of another image: its kernelId may mean another one."""

    libtype: str
    number: str
    name: str
    split: str  # splitK; `0` where the table has none


def is_wanted(only: Sequence[TableKernel] | None, name: str, split: str | None = None) -> bool:
    """True if `only` has a kernel of this name and splitK (None: any), or if it is None and every one is wanted."""
    return only is None or any(k.name == name and split in (None, k.split) for k in only)


class BlockedVerdict(TypedDict, total=False):
    """Evidence from other slots on a blocked candidate of a node; `slot` and `t` are those of the node's entry."""

    family: str
    key: list[str]
    candidate: list[str]
    slot: str
    t: float


def identity(raw: Any, what: str = "candidate") -> Identity:
    """A list of strings as an identity. Raises ProtocolError."""
    if not isinstance(raw, (list, tuple)) or not 0 < len(raw) <= MAX_WORDS:
        raise ProtocolError(f"{what} is not a list of 1 to {MAX_WORDS} strings")
    if not all(isinstance(word, str) and len(word) <= MAX_WORD for word in raw):
        raise ProtocolError(f"{what} holds more than strings of at most {MAX_WORD} characters")
    return tuple(raw)


def blocked_record(raw: Any) -> BlockedRecord:
    """One entry with all its fields, long texts cut. Raises ProtocolError."""
    if not isinstance(raw, Mapping):
        raise ProtocolError("a withheld candidate is not a mapping")
    given = {name: raw[name] for name in _BLOCKED_TYPES if name in raw}
    if faults := type_faults(given, _BLOCKED_TYPES, ("key", "candidate")):
        raise ProtocolError(f"a withheld candidate: {faults[0]}")
    outcome, source, t = given.get("outcome", "fault"), given.get("source", "attempt"), given.get("t", 0.0)
    if outcome not in BAD_ENDS or source not in SOURCES or not 0 <= t <= 1e12:
        raise ProtocolError(f"a withheld candidate with outcome {outcome!r}, source {source!r}, time {t!r}")
    out: dict[str, Any] = {n: list(identity(given[n], f"{n} of a withheld candidate")) for n in ("key", "candidate")}
    out |= {name: given.get(name, "")[:most] for name, most in _TEXTS.items()}
    out |= {"outcome": outcome, "source": source, "t": round(float(t), 3), "confirmed": raw.get("confirmed") is True}
    return cast(BlockedRecord, out)


def blocked_records(raw: Any, more: Any = 0) -> tuple[list[BlockedRecord], int]:
    """The entries that a record can hold, each candidate once, and how many more there are. Raises ProtocolError."""
    if not isinstance(raw, (list, tuple)):
        raise ProtocolError("withheld is not a list")
    if type(more) is not int or not 0 <= more < 2**31:
        raise ProtocolError("withheld_more is not a number")
    known: dict[Identity, BlockedRecord] = {}
    for entry in map(blocked_record, raw):
        known.setdefault(tuple(entry["candidate"]), entry)
    kept: list[BlockedRecord] = []
    size = 0
    for entry in known.values():
        size += len(json.dumps(entry))
        if len(kept) == MAX_BLOCKED or size > MAX_BLOCKED_BYTES:
            break
        kept.append(entry)
    return kept, more + len(known) - len(kept)


_VERDICT_TYPES: dict[str, tuple[type, ...]] = {
    "family": (str,),
    "key": (list,),
    "candidate": (list,),
    "slot": (str,),
    "t": (int, float),
}


MAX_SPEC_BYTES = 8 * 1024 * 1024
CPUS = "GEMMFLEET_CPUS"  # a slot's variable: its cores as the kernel lists them, such as 0-63,128-191

# a slot's variable: the name of the lock that its worker holds while it lives, so that no other run measures there
DEVICE_LOCK = "GEMMFLEET_DEVICE_LOCK"
# a slot's variable: if it is set, the worker does not wait for a device that another run has locked
DEVICE_SHARED = "GEMMFLEET_DEVICE_SHARED"


@dataclass(frozen=True, slots=True)
class SpecShape:
    """One shape of a spec: its number within the run and its key columns in the family's order."""

    id: int
    key: dict[str, int | str]


@dataclass(frozen=True, slots=True)
class Spec:
    """Work for a worker: kind `group` (tune the shapes) or `canary` (prove the slot healthy)."""

    attempt: str
    run: str
    epoch: int
    kind: str = "group"
    group: str = ""
    family: str = ""
    tuner: str = ""
    shapes: tuple[SpecShape, ...] = ()
    watchdog_s: float = 300.0  # the attempt hangs if there is no sign of progress for this long
    grace_s: float = 5.0  # seconds from SIGINT to SIGKILL
    err_ratio: float = 0.05
    options: dict[str, Any] = field(default_factory=dict)  # the tuner's own options
    protocol: int = PROTOCOL
    # For a recheck: shape id (as text) -> the only kernels to measure, each a TableKernel as a mapping. For shapes that
    # are absent, all kernels are measured. A tuner that cannot choose measures all.
    only: Mapping[str, Sequence[Mapping[str, str]]] = field(default_factory=dict)
    # blocked candidates of this node that ran elsewhere: the worker takes them back
    refuted: list[BlockedVerdict] = field(default_factory=list)
    # blocked candidates of this node that faulted on a second slot too
    confirmed: list[BlockedVerdict] = field(default_factory=list)

    def dumps(self) -> bytes:
        """The spec as one line."""
        raw = {f.name: getattr(self, f.name) for f in fields(self)}
        return json.dumps(raw, separators=(",", ":"), default=_fields).encode()

    def only_of(self, shape: int) -> list[TableKernel] | None:
        """The only kernels to be measured of a shape; None: every one."""
        found = self.only.get(str(shape))
        return None if found is None else [TableKernel(**k) for k in found]

    @classmethod
    def loads(cls, data: bytes) -> Spec:
        """Raises ProtocolError with every fault of `data`, never anything else."""
        if len(data) > MAX_SPEC_BYTES:
            raise ProtocolError(f"spec of {len(data)} bytes is larger than {MAX_SPEC_BYTES}")
        raw = json_object(data, "spec")
        faults = _faults(raw)
        if faults:
            raise ProtocolError("bad spec: " + "; ".join(some(faults)))
        _check_candidates(raw)
        shapes = tuple(SpecShape(s["id"], dict(s["key"])) for s in raw.get("shapes", ()))
        return cls(**{**raw, "shapes": shapes})


def _fields(value: Any) -> dict[str, Any]:
    """Fields of a shape or a verdict; `asdict` would copy them deeply, which takes longer than all the rest."""
    return {name: getattr(value, name) for name in value.__slots__}


_SPEC_TYPES: dict[str, tuple[type, ...]] = {
    "attempt": (str,),
    "run": (str,),
    "epoch": (int,),
    "kind": (str,),
    "group": (str,),
    "family": (str,),
    "tuner": (str,),
    "shapes": (list,),
    "watchdog_s": (int, float),
    "grace_s": (int, float),
    "err_ratio": (int, float),
    "options": (dict,),
    "protocol": (int,),
    "only": (dict,),
    "refuted": (list,),
    "confirmed": (list,),
}


def _faults(raw: Mapping[str, Any]) -> list[str]:
    out = type_faults(raw, _SPEC_TYPES, ("attempt", "run", "epoch", "protocol"))
    if out:
        return out
    out += _protocol_faults(raw)
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
    out += _time_faults(raw, "watchdog_s", "grace_s")
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


def _check_candidates(raw: Mapping[str, Any]) -> None:
    """Raises ProtocolError if `only`, `refuted` or `confirmed` hold anything but candidates."""
    ids = {str(s["id"]) for s in raw.get("shapes", ())}
    for shape, kernels in raw.get("only", {}).items():
        what = f"only[{shape!r}]"
        if shape not in ids:
            raise ProtocolError(f"{what} is not a shape of the spec")
        if not isinstance(kernels, list) or not kernels:
            raise ProtocolError(f"{what} is not a list of kernels")
        for kernel in kernels:
            if not isinstance(kernel, Mapping) or set(kernel) != set(TableKernel._fields):
                raise ProtocolError(f"{what} has a kernel that is not {{{', '.join(TableKernel._fields)}}}")
            identity(tuple(kernel.values()), f"a kernel of {what}")
    for name in ("refuted", "confirmed"):
        entries = raw.get(name, ())
        if len(entries) > MAX_VERDICTS:
            raise ProtocolError(f"{name} has more than {MAX_VERDICTS} entries")
        for i, entry in enumerate(entries):
            if not isinstance(entry, Mapping):
                raise ProtocolError(f"{name}[{i}] is not a mapping")
            if faults := type_faults(entry, _VERDICT_TYPES, ("family", "key", "candidate")):
                raise ProtocolError(f"{name}[{i}]: {faults[0]}")
            for field_ in ("key", "candidate"):
                identity(entry[field_], f"{name}[{i}].{field_}")


def _protocol_faults(raw: Mapping[str, Any]) -> list[str]:
    spoken = raw["protocol"]
    return [] if spoken == PROTOCOL else [f"protocol {spoken}, this worker speaks {PROTOCOL}"]


def _time_faults(raw: Mapping[str, Any], *names: str) -> list[str]:
    wrong = (n for n in names if not 0 < raw.get(n, 1) <= MAX_SECONDS)  # NaN fails as well
    return [f"{n} must be positive and at most {MAX_SECONDS:.0f}" for n in wrong]


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """node.json: settings of a node for its launcher and its workers."""

    run: str
    node: str
    tuner: str
    options: dict[str, Any] = field(default_factory=dict)  # the tuner's options on this node; a spec's own come on top
    # the node's slots and the environment of each one's tuner
    slots: dict[str, dict[str, str]] = field(default_factory=lambda: {"0": {}})
    idle_exit_s: float = 600.0  # a worker exits after this long without a spec; 0: never
    start_timeout_s: float = 300.0  # seconds from the spawn of a tuner's process to its ready
    canary_timeout_s: float = 120.0
    protocol: int = PROTOCOL

    def dumps(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @classmethod
    def loads(cls, data: bytes) -> NodeConfig:
        """Raises ProtocolError with every fault of `data`, never anything else."""
        raw = json_object(data, "node.json")
        faults = _config_faults(raw)
        if faults:
            raise ProtocolError("bad node.json: " + "; ".join(some(faults)))
        return cls(**raw)


_CONFIG_TYPES: dict[str, tuple[type, ...]] = {
    "run": (str,),
    "node": (str,),
    "tuner": (str,),
    "options": (dict,),
    "slots": (dict,),
    "idle_exit_s": (int, float),
    "start_timeout_s": (int, float),
    "canary_timeout_s": (int, float),
    "protocol": (int,),
}


def _config_faults(raw: Mapping[str, Any]) -> list[str]:
    out = type_faults(raw, _CONFIG_TYPES, ("run", "node", "tuner", "protocol"))
    if out:
        return out
    out += _protocol_faults(raw)
    if not 0 <= raw.get("idle_exit_s", 0) <= MAX_SECONDS:
        out.append(f"idle_exit_s must be 0 to {MAX_SECONDS:.0f}")
    out += _time_faults(raw, "start_timeout_s", "canary_timeout_s")
    for slot, env in raw.get("slots", {"0": {}}).items():
        if not SLOT_RE.match(slot):
            out.append(f"slot {slot!r} is not a number of up to four digits")
        if not isinstance(env, dict) or not all(_is_variable(k, v) for k, v in env.items()):
            out.append(f"slots[{slot!r}] is not a mapping of environment variables")
    return out


def _is_variable(name: str, value: Any) -> bool:
    return bool(name) and "=" not in name and isinstance(value, str) and "\0" not in name + value
