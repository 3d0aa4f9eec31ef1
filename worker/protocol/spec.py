"""Input of a worker: `node.json` on its node, and group specs, the shapes of an attempt with the tuner's options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from worker.protocol.candidates import BlocklistVerdict, TableKernel, only_faults, verdict_faults
from worker.protocol.paths import ATTEMPT_RE, SLOT_RE
from worker.protocol.records import MAX_SECONDS, PROTOCOL, ProtocolError, json_object, some, type_faults

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
    watchdog_s: float = 300.0  # no sign of progress for so long is a hang
    grace_s: float = 5.0  # seconds from SIGINT to SIGKILL
    err_ratio: float = 0.05
    options: dict[str, Any] = field(default_factory=dict)  # the tuner's own options
    protocol: int = PROTOCOL
    # Shape id (as text) -> the only kernels to be measured (of a recheck), each a TableKernel as a mapping; a shape
    # that is absent: every one. A tuner that cannot choose measures all.
    only: Mapping[str, Sequence[Mapping[str, str]]] = field(default_factory=dict)
    # entries of this node's blocklist whose candidates ran elsewhere: the worker takes them back
    refuted: list[BlocklistVerdict] = field(default_factory=list)
    # entries of this node's blocklist whose candidates faulted on a second slot too
    confirmed: list[BlocklistVerdict] = field(default_factory=list)

    def dumps(self) -> bytes:
        """One line; fields that younger versions added are left out where they are empty, as older ones refuse them."""
        raw = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) or f.name not in _YOUNGER}
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
        shapes = tuple(SpecShape(s["id"], dict(s["key"])) for s in raw.get("shapes", ()))
        return cls(**{**raw, "shapes": shapes})


def _fields(value: Any) -> dict[str, Any]:
    """Fields of a shape or a verdict; `asdict` would copy them deeply, which takes longer than all the rest."""
    return {name: getattr(value, name) for name in value.__slots__}


_SPEC_TYPES: dict[str, tuple[type, ...]] = {
    "attempt": (str,), "run": (str,), "epoch": (int,), "kind": (str,), "group": (str,), "family": (str,),
    "tuner": (str,), "shapes": (list,), "watchdog_s": (int, float), "grace_s": (int, float),
    "err_ratio": (int, float), "options": (dict,), "protocol": (int,),
    "only": (dict,), "refuted": (list,), "confirmed": (list,),
}  # fmt: skip
_YOUNGER = ("only", "refuted", "confirmed")


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
    out += only_faults(raw.get("only", {}), ids)
    for name in ("refuted", "confirmed"):
        out += verdict_faults(raw.get(name, ()), name)
    return out


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
    idle_exit_s: float = 600.0  # a worker without a spec for so long ends; 0: never
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
    "run": (str,), "node": (str,), "tuner": (str,), "options": (dict,), "slots": (dict,),
    "idle_exit_s": (int, float), "start_timeout_s": (int, float), "canary_timeout_s": (int, float),
    "protocol": (int,),
}  # fmt: skip


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
