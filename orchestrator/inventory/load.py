"""load_inventory: a YAML file into an Inventory, or an InventoryError that names every fault."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from orchestrator.errors import InventoryError
from orchestrator.inventory.document import Document, Loc
from orchestrator.inventory.model import (
    NAME_RE,
    NAME_RULE,
    Defaults,
    Inventory,
    InventoryFile,
    NodeOptions,
    merged,
)
from orchestrator.shapes.faults import MAX_TEXT, Faults, did_you_mean, escaped, shown
from orchestrator.shapes.textfile import read_bytes

MAX_BYTES = 2**20

_TYPES = {
    "string_type": "must be text: put it in quotes",
    "tuple_type": "must be a list, such as [a, b]",
    "dict_type": "must be a mapping of names to values",
    "model_type": "must be a mapping of options to values",
    "string_too_long": "is too long",
}


def load_inventory(path: str | Path) -> Inventory:
    """The inventory in a YAML file, defaults merged into its nodes. `${env:NAME}` stays text.

    Raises InventoryError with every fault, `file:line: place: what, and what to do`.
    """
    data = read_bytes(path, MAX_BYTES, InventoryError)
    faults = Faults(path)
    parsed = _parse(data, faults)
    if parsed is None:
        raise InventoryError(faults.by_line())
    nodes = {name: merged(name, parsed.defaults, options) for name, options in parsed.nodes.items()}
    return Inventory(source=str(path), defaults=parsed.defaults, nodes=nodes)


def limit(inventory: Inventory, label: str) -> Inventory:
    """The inventory with only the nodes that have the label or are called so; InventoryError if none."""
    nodes = {name: n for name, n in inventory.nodes.items() if label in n.labels or label == name}
    if not nodes:
        known = dict.fromkeys([*inventory.nodes, *(x for n in inventory.nodes.values() for x in n.labels)])
        raise InventoryError(
            f"{escaped(inventory.source)}: no node has the label {shown(label)}{did_you_mean(label, known)}"
            f" (nodes and labels: {', '.join(known)})"
        )
    return inventory.model_copy(update={"nodes": nodes})


def _parse(data: bytes, faults: Faults) -> InventoryFile | None:
    """The file as written; None if there is any fault."""
    try:
        document = Document(data.decode("utf-8-sig"), faults)
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        faults.add("holds bytes that are not UTF-8: save the file as UTF-8", line=line)
        return None
    values = _prepared(document, faults) if document.readable else None
    if values is None:
        return None
    try:
        parsed = InventoryFile.model_validate(values)
        return None if faults.count else parsed
    except ValidationError as e:
        found = [(d["loc"], _message(d)) for d in e.errors(include_url=False)]
    for loc, message in found:
        faults.add(f"{_place(loc)}: {message}", line=document.line(loc))
    return None


def _prepared(document: Document, faults: Faults) -> dict[str, Any] | None:
    """The data with an empty mapping for each `NAME:` without a value; None where there is nothing to check.

    Faults of the outer form are added here, in words that fit it better than the model's.
    """
    data = document.data
    if data is None:
        faults.add("is empty: an inventory has defaults: and nodes:")
        return None
    if not isinstance(data, dict):
        faults.add("must be a mapping with the keys defaults and nodes", line=document.line(()))
        return None
    data = {key: {} if key == "defaults" and value is None else value for key, value in data.items()}
    nodes = data.get("nodes") or {}
    if wrong := _wrong_nodes(data.get("nodes")):
        faults.add(f"nodes: {wrong}", line=document.line(("nodes",)))
        nodes = {}
    for name in nodes:
        if not NAME_RE.match(name):
            faults.add(f"node {shown(name)}: {NAME_RULE}", line=document.line(("nodes", name)))
    data["nodes"] = {name: {} if options is None else options for name, options in nodes.items()}
    return data


def _wrong_nodes(nodes: Any) -> str | None:
    if isinstance(nodes, list):
        return "must be a mapping of name to options, not a list: write 'NAME:' for each node, not '- NAME'"
    if nodes is not None and not isinstance(nodes, dict):
        return "must be a mapping of name to options"
    return None if nodes else "there is no node: name at least one under nodes:"


def _place(loc: Loc) -> str:
    return ".".join(escaped(str(p)[:MAX_TEXT]) for p in loc if p != "[key]")


def _message(detail: ErrorDetails) -> str:
    kind, value = detail["type"], detail["input"]
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
    for type_, word in ((dict, "a mapping"), (list, "a list"), (tuple, "a list")):
        if isinstance(value, type_):
            return word
    return "empty" if value is None else shown(str(value))


def _unknown_key(loc: Loc) -> str:
    key, in_defaults = str(loc[-1]), loc[0] == "defaults"
    legal = list((InventoryFile if len(loc) == 1 else Defaults if in_defaults else NodeOptions).model_fields)
    if len(loc) == 1 and key in Defaults.model_fields:
        return "unknown key: put it under defaults"
    if key in Defaults.model_fields:
        return "is an option of the whole fleet: put it under defaults"
    return f"unknown key{did_you_mean(key, legal)} (legal: {', '.join(legal)})"
