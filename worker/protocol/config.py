"""node.json: what the launcher and the workers of a node need to know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from worker.protocol.checks import MAX_SECONDS, PROTOCOL, ProtocolError, json_object, some, type_faults
from worker.protocol.paths import SLOT_RE

CPUS = "GEMMFLEET_CPUS"
"""Variable of a slot: the cores its worker runs on, as the kernel lists them, such as 0-63,128-191."""


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
