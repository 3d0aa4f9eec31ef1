"""Messages for what pydantic finds in an inventory, each with what to write instead."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import ErrorDetails

from orchestrator.files.faults import MAX_TEXT, escaped, shown
from orchestrator.inventory.document import Loc
from orchestrator.inventory.model import (
    AiterSection,
    Defaults,
    DockerSection,
    InventoryFile,
    LoginHost,
    NodeOptions,
    SglangSection,
    Strict,
    VllmSection,
)
from worker.text import did_you_mean

_TYPES = {
    "string_type": "must be text: put it in quotes",
    "int_type": "must be a whole number, without quotes",
    "tuple_type": "must be a list, such as [a, b]",
    "dict_type": "must be a mapping of names to values",
    "model_type": "must be a mapping of options to values",
    "string_too_long": "is too long",
}
_NOT_A_KEY = {
    "privileged": "containers are never privileged: name what they need in devices, cap_add and security_opt",
    "mounts": "write volumes: [SOURCE:TARGET]",
    "ssh_key": "write identity: PATH",
    "key": "write identity: PATH",
    "jump": "write proxy_jump: HOST",
}
_SECRET_KEY = re.compile(r"(?:\w*_)?(?:pass|passwd|password|passphrase|token|secret|api_?key)\Z", re.IGNORECASE)
_NO_SECRETS = (
    "a secret has no place in an inventory: log in by an SSH agent or a key file (identity:), use"
    " docker_command: [sudo, -n, docker] where docker needs root, and write env: {NAME: ${env:NAME}} for what"
    " workers need"
)


def dotted(loc: Loc) -> str:
    """The place of a value for a message: `nodes.gpu01.docker.env`."""
    return ".".join(escaped(str(p)[:MAX_TEXT]) for p in loc if p != "[key]")


def describe_fault(detail: ErrorDetails) -> str:
    """The fault of a value, and what to write instead. `detail`: one of the errors of a pydantic ValidationError."""
    kind = detail["type"]
    value = detail["input"]
    if kind == "extra_forbidden":
        return _unknown_key(detail["loc"])
    if kind == "literal_error":
        legal = re.findall(r"'([^']*)'", str(detail["ctx"]["expected"]))
        near = did_you_mean(value, legal) if isinstance(value, str) else ""
        return f"{_named(value)} is not legal{near} (legal: {', '.join(legal)})"
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    return f"{_TYPES.get(kind) or escaped(detail['msg'])} (it is {_named(value)})"


def _named(value: Any) -> str:
    if isinstance(value, (dict, list, tuple)):
        return "a mapping" if isinstance(value, dict) else "a list"
    return "empty" if value is None else shown(str(value))


_MODELS: dict[str, type[Strict]] = {
    "hosts": LoginHost,
    "defaults": Defaults,
    "nodes": NodeOptions,
    "docker": DockerSection,
    "aiter": AiterSection,
    "vllm": VllmSection,
    "sglang": SglangSection,
}


def _unknown_key(loc: Loc) -> str:
    key = str(loc[-1])
    is_below_name = loc[0] in ("nodes", "hosts")
    within = loc[2 if is_below_name else 1 : -1]
    in_docker = within == ("docker",)
    if _SECRET_KEY.match(key):
        return _NO_SECRETS
    if len(loc) == 1 and key in Defaults.model_fields:
        return "unknown key: put it under defaults"
    if not in_docker and key in DockerSection.model_fields:
        return "is an option of containers: put it under docker"
    if key in ("family", "tuner"):
        return "is an option of the whole fleet: put it under defaults"
    if in_docker and key in NodeOptions.model_fields:
        return "is an option of the node: put it beside docker, not under it"
    if key in _NOT_A_KEY:
        return f"unknown key: {_NOT_A_KEY[key]}"
    is_section = len(within) == 1 and within[0] in ("docker", "aiter", "vllm", "sglang")
    place = str(within[0] if is_section else loc[0]) if len(loc) > 1 else ""
    legal = list(_MODELS.get(place, InventoryFile).model_fields)
    return f"unknown key{did_you_mean(key, legal)} (legal: {', '.join(legal)})"
