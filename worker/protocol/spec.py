"""The input of a worker: `node.json` on its node (NodeConfig), and specs (Spec), the work of one attempt each.

The controller writes both (`dumps`), the agent reads them (`loads`). A spec is a file in the node's inbox:

    {"attempt": "g0007-1", "run": "r1", "epoch": 3, "kind": "group", "group": "g0007", "family": "a8w8",
     "tuner": "aiter", "shapes": [{"id": 12, "key": {"M": 16, "N": 512, "K": 1024, "q_dtype_w": "torch.int8"}}],
     "watchdog_s": 300, "grace_s": 5, "err_ratio": 0.05, "options": {}, "protocol": 1, ...}

To add a field, add it here with its default; `loads` checks its JSON type by its annotation. candidates.py has the
forms of `only`, `refuted` and `confirmed`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from worker.protocol.candidates import BlockedVerdict, TableKernel, check_kernels, check_verdicts
from worker.protocol.paths import ATTEMPT_RE, SLOT_RE
from worker.protocol.records import MAX_SECONDS, PROTOCOL, ProtocolError, first_faults, json_object, type_faults

MAX_SPEC_BYTES = 8 * 1024 * 1024
MAX_NAME = 200
"""Characters of the names of a run, a group, a family or a tuner."""
CPUS = "GEMMFLEET_CPUS"
"""A slot's variable: its cores as the kernel lists them, such as 0-63,128-191."""
DEVICE_LOCK = "GEMMFLEET_DEVICE_LOCK"
"""A slot's variable: the name of the lock that its worker holds while it lives, so that no other run measures there."""
DEVICE_SHARED = "GEMMFLEET_DEVICE_SHARED"
"""A slot's variable: if it is set, the worker does not wait for a device that another run has locked."""

_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "dict": (dict,),
    "Mapping": (dict,),
    "list": (list,),
    "tuple": (list,),
}
"""The types of a JSON value by the beginning of a field's annotation."""


def _json_types(cls: type) -> dict[str, tuple[type, ...]]:
    """The JSON types of the fields of a dataclass of this module; its annotations are texts."""
    return {f.name: _JSON_TYPES[str(f.type).partition("[")[0]] for f in fields(cls)}


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
    watchdog_s: float = 300.0
    """The attempt hangs if there is no sign of progress for this long."""
    grace_s: float = 5.0
    """Seconds from SIGINT to SIGKILL."""
    err_ratio: float = 0.05
    """The largest share of wrong elements of a winner."""
    options: dict[str, Any] = field(default_factory=dict)
    """The tuner's own options."""
    protocol: int = PROTOCOL
    only: Mapping[str, Sequence[Mapping[str, str]]] = field(default_factory=dict)
    """For a recheck: shape id (as text) -> the only kernels to measure, each a TableKernel as a mapping. For shapes
    that are absent, all kernels are measured. A tuner that cannot choose measures all."""
    refuted: list[BlockedVerdict] = field(default_factory=list)
    """Blocked candidates of this node that ran elsewhere: the worker takes them back."""
    confirmed: list[BlockedVerdict] = field(default_factory=list)
    """Blocked candidates of this node that faulted on a second slot too."""

    def dumps(self) -> bytes:
        """The spec as one line."""
        # `asdict` would copy deeply, which takes longer than all the rest
        return json.dumps(_field_values(self), separators=(",", ":"), default=_field_values).encode()

    def only_of(self, shape: int) -> list[TableKernel] | None:
        """The only kernels to be measured of a shape; None: every one."""
        kernels = self.only.get(str(shape))
        return None if kernels is None else [TableKernel(**kernel) for kernel in kernels]

    @classmethod
    def loads(cls, data: bytes) -> Spec:
        """Raises ProtocolError with every fault of `data`, never anything else."""
        if len(data) > MAX_SPEC_BYTES:
            raise ProtocolError(f"spec of {len(data)} bytes is larger than {MAX_SPEC_BYTES}")
        raw = json_object(data, "spec")
        faults = _spec_faults(raw)
        if faults:
            raise ProtocolError("bad spec: " + "; ".join(first_faults(faults)))
        shapes = tuple(SpecShape(shape["id"], dict(shape["key"])) for shape in raw.get("shapes", ()))
        check_kernels(raw.get("only", {}), {str(shape.id) for shape in shapes})
        check_verdicts("refuted", raw.get("refuted", ()))
        check_verdicts("confirmed", raw.get("confirmed", ()))
        return cls(**{**raw, "shapes": shapes})


def _field_values(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}


_SPEC_TYPES = _json_types(Spec)


def _spec_faults(raw: Mapping[str, Any]) -> list[str]:
    faults = type_faults(raw, _SPEC_TYPES, ("attempt", "run", "epoch", "protocol"))
    if faults:
        return faults
    faults += _protocol_faults(raw)
    for name in ("run", "group", "family", "tuner"):
        if len(raw.get(name, "")) > MAX_NAME:
            faults.append(f"{name} is longer than {MAX_NAME} characters")
    if raw["epoch"] < 0:
        faults.append("epoch is negative")
    if not 0 <= raw.get("err_ratio", 0) <= 1:
        faults.append("err_ratio must be between 0 and 1")
    if not ATTEMPT_RE.match(raw["attempt"]):
        faults.append("attempt is not a plain name")
    kind = raw.get("kind", "group")
    if kind not in ("group", "canary"):
        faults.append(f"kind {kind!r} is neither group nor canary")
    if kind == "group" and not raw.get("shapes"):
        faults.append("a group without shapes")
    faults += _time_faults(raw, "watchdog_s", "grace_s")
    return faults + _shape_faults(raw.get("shapes", ()))


def _shape_faults(shapes: Sequence[Any]) -> list[str]:
    faults: list[str] = []
    ids: set[int] = set()
    for i, shape in enumerate(shapes):
        if not _is_shape(shape):
            faults.append(f"shapes[{i}] is not {{id, key}}")
        elif not all(type(value) in (int, str) for value in shape["key"].values()):
            faults.append(f"shapes[{i}].key holds more than numbers and text")
        elif shape["id"] in ids:
            faults.append(f"shapes[{i}] repeats id {shape['id']}")
        else:
            ids.add(shape["id"])
    return faults


def _is_shape(raw: Any) -> bool:
    if not isinstance(raw, dict) or set(raw) != {"id", "key"}:
        return False
    return type(raw["id"]) is int and isinstance(raw["key"], dict)


def _protocol_faults(raw: Mapping[str, Any]) -> list[str]:
    spoken = raw["protocol"]
    return [] if spoken == PROTOCOL else [f"protocol {spoken}, this worker speaks {PROTOCOL}"]


def _time_faults(raw: Mapping[str, Any], *names: str) -> list[str]:
    bad = [name for name in names if not 0 < raw.get(name, 1) <= MAX_SECONDS]  # NaN fails as well
    return [f"{name} must be positive and at most {MAX_SECONDS:.0f}" for name in bad]


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """node.json: settings of a node for its launcher and its workers."""

    run: str
    node: str
    tuner: str
    options: dict[str, Any] = field(default_factory=dict)
    """The tuner's options on this node; a spec's own come on top."""
    slots: dict[str, dict[str, str]] = field(default_factory=lambda: {"0": {}})
    """The node's slots, and the environment variables of each one's tuner."""
    idle_exit_s: float = 600.0
    """A worker exits after this long without a spec; 0: never."""
    start_timeout_s: float = 300.0
    """Seconds from the spawn of a tuner's process to its message `ready`."""
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
            raise ProtocolError("bad node.json: " + "; ".join(first_faults(faults)))
        return cls(**raw)


_CONFIG_TYPES = _json_types(NodeConfig)


def _config_faults(raw: Mapping[str, Any]) -> list[str]:
    faults = type_faults(raw, _CONFIG_TYPES, ("run", "node", "tuner", "protocol"))
    if faults:
        return faults
    faults += _protocol_faults(raw)
    if not 0 <= raw.get("idle_exit_s", 0) <= MAX_SECONDS:
        faults.append(f"idle_exit_s must be 0 to {MAX_SECONDS:.0f}")
    faults += _time_faults(raw, "start_timeout_s", "canary_timeout_s")
    for slot, env in raw.get("slots", {"0": {}}).items():
        if not SLOT_RE.match(slot):
            faults.append(f"slot {slot!r} is not a number of up to four digits")
        if not isinstance(env, dict) or not all(_is_variable(name, value) for name, value in env.items()):
            faults.append(f"slots[{slot!r}] is not a mapping of environment variables")
    return faults


def _is_variable(name: str, value: Any) -> bool:
    return bool(name) and "=" not in name and isinstance(value, str) and "\0" not in name + value
