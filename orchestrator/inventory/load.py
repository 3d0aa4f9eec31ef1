"""Loads an inventory: a YAML file into an Inventory, or an InventoryError that names every fault with its line.

The file becomes plain data (document.py), is validated (model.py, with the messages of fault_messages.py), gets the
defaults merged into its nodes, and is checked for options that do not fit together (conflicts.py). This module also
resolves a node's references.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from orchestrator.errors import InventoryError
from orchestrator.files.faults import Faults, escaped, shown
from orchestrator.files.read import read_bytes
from orchestrator.inventory.conflicts import conflicts
from orchestrator.inventory.document import Document
from orchestrator.inventory.fault_messages import describe_fault, dotted
from orchestrator.inventory.model import Inventory, InventoryFile, Node, NodeOptions
from orchestrator.inventory.option_types import FROM_FILE, NAME_RE, NAME_RULE
from orchestrator.inventory.references import describe_unset, has_reference, resolve, texts, unset_references
from orchestrator.templating import data_folder
from worker.text import did_you_mean

MAX_BYTES = 2**20
"""Most bytes of an inventory's file."""


def check_references(nodes: Iterable[Node]) -> None:
    """Raise one InventoryError that lists every reference of these nodes whose variable is not set."""
    faults: list[str] = []
    for node in nodes:
        try:
            resolved(node)
        except InventoryError as e:
            faults += e.faults
    if faults:
        raise InventoryError(list(dict.fromkeys(faults)))


def unset_variables(path: str | Path) -> dict[str, str]:
    """A fault for each variable that the texts of an inventory's file refer to and that is not set, by its name.

    This reads the file's words alone, so it also works on an inventory that cannot be loaded.
    """
    faults: dict[str, str] = {}
    with contextlib.suppress(yaml.YAMLError):  # the words before the fault count
        for token in yaml.scan(read_bytes(path, MAX_BYTES, InventoryError)):
            if isinstance(token, yaml.ScalarToken):
                place = f"{escaped(str(path))}:{token.start_mark.line + 1}: a text refers to"
                faults |= {name: f"{place} {describe_unset(name)}" for _, name in unset_references(token.value)}
    return faults


def check_identities(nodes: Iterable[Node]) -> None:
    """Raise one InventoryError that lists every identity file of these nodes that does not exist here."""
    faults = []
    for node in nodes:
        for path in (node.identity, node.login and node.login.identity):
            if path and not has_reference(path) and not Path(path).expanduser().is_file():
                place = f"{node.origin('name')}: node {node.name}"
                faults.append(f"{place}: identity: no file {shown(path, 999)} is here; name the private key")
    if faults:
        raise InventoryError(list(dict.fromkeys(faults)))


def resolved(node: Node, env: Mapping[str, str] = os.environ) -> Node:
    """The node with every reference replaced, checked again. Use it at once; keep and write only the unresolved node.

    Raises InventoryError that names file, line, node and variable, and never a value.
    """
    values = resolve(node.options(), node.name, node.origin, env)
    try:
        return Node(**values, name=node.name, source=node.source, origins=node.origins)
    except ValidationError as e:
        faults = []
        for detail in e.errors(include_url=False, include_input=False):
            path = ".".join(str(p) for p in detail["loc"])
            why = str(detail.get("ctx", {}).get("error") or detail["msg"])
            faults.append(f"{node.origin(path)}: node {node.name}: {path}, its references replaced, {why}")
        raise InventoryError(faults) from None


def inventory_path(named: Path | None) -> Path:
    """The inventory that a command reads: the one that the user named, else the shipped one of this machine."""
    return named or data_folder("inventories") / "local.yaml"


def load_inventory(path: str | Path) -> Inventory:
    """The inventory in a YAML file, with defaults merged into its nodes. `${env:NAME}` stays text.

    Raises InventoryError that lists every fault as `file:line: place: what, and what to do`.
    """
    return parse_inventory(read_bytes(path, MAX_BYTES, InventoryError), str(path))


def parse_inventory(data: bytes, source: str) -> Inventory:
    """The inventory in a YAML text, as `load_inventory` reads it. `source`: its file, for messages."""
    faults = Faults(source)
    try:
        document = Document(data.decode("utf-8-sig"), faults)
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise InventoryError(
            f"{faults.source}:{line}: holds bytes that are not UTF-8: save the file as UTF-8"
        ) from None
    values = _prepared(document, faults)
    parsed = None if values is None else _validated(values, document, faults)
    nodes = {}
    if parsed is not None and values is not None and not faults.count:
        if "host" in parsed.defaults.model_fields_set:
            what = "defaults.host: a host is one node's: put it under the node, or leave it out and name the node so"
            faults.add(what, line=document.line(("defaults", "host")))
        for name, own in values["nodes"].items():
            nodes[name] = _merged(name, values, parsed, source, document)
            for path, what in conflicts(nodes[name], own):
                loc = ("nodes", name, *path)
                faults.add(f"{dotted(loc)}: {what}", line=document.line(loc))
    if parsed is None or faults.count:
        raise InventoryError(faults.by_line())
    return Inventory(source=source, defaults=parsed.defaults, nodes=nodes)


def _validated(values: Mapping[str, Any], document: Document, faults: Faults) -> InventoryFile | None:
    try:
        return InventoryFile.model_validate(values, context=FROM_FILE)
    except ValidationError as e:
        for detail in e.errors(include_url=False):
            loc = detail["loc"]
            faults.add(f"{dotted(loc)}: {describe_fault(detail)}", line=document.line(loc))
        return None


def _merged(name: str, values: Mapping[str, Any], parsed: InventoryFile, source: str, document: Document) -> Node:
    """A node's options over the defaults: what the node says wins, option by option within `docker`, `aiter`, `vllm`
    and `sglang`; `env` is merged name by name, `labels` add up."""
    own = values["nodes"][name]
    shared = {key: value for key, value in values["defaults"].items() if key in NodeOptions.model_fields}
    options = {**shared, **own, "labels": [*shared.get("labels", ()), *own.get("labels", ())]}
    for section in ("docker", "aiter", "vllm", "sglang", "env"):
        if section in options:
            options[section] = _over(shared.get(section), own.get(section))
    via = options.get("via") or ""
    login = parsed.hosts.get(via)
    origins = {"name": document.line(("nodes", name)) or 0}
    for path in _paths_with_reference(options):
        loc = tuple(int(part) if part.isdigit() else part for part in path.split("."))
        place = ("nodes", name) if ("nodes", name, *loc) in document.lines else ("defaults",)
        origins[path] = document.line((*place, *loc)) or 0
    for path in _paths_with_reference(login.model_dump() if login else None):
        origins[f"login.{path}"] = document.line(("hosts", via, path)) or 0
    return Node(**options, name=name, source=source, origins=origins, login=login)


def _paths_with_reference(options: Any) -> list[str]:
    return [path for path, text in texts(options) if has_reference(text)]


def _over(below: Mapping[str, Any] | None, above: Mapping[str, Any] | None) -> dict[str, Any]:
    """Two mappings merged key by key, and mappings within them."""
    merged = {**(below or {}), **(above or {})}
    for key, value in merged.items():
        if isinstance(value, Mapping):
            merged[key] = _over((below or {}).get(key), value)
    return merged


def with_image(data: bytes, image: str, source: str) -> bytes:
    """A checked inventory's text with another image wherever it names one, its lines as they were. Raises
    InventoryError where it names none."""
    text = data.decode("utf-8-sig")
    named = _image_values(yaml.compose(text, yaml.SafeLoader))
    if not named:
        raise InventoryError(
            f"{escaped(source)}: names no image that {shown(image)} could replace: its workers run as processes; give"
            " the new build's inventory with -i"
        )
    # from the end, so that the places of the others stay
    for value in sorted(named, key=lambda value: value.start_mark.index, reverse=True):
        begin = value.start_mark.index
        written = text[begin : value.end_mark.index].rstrip()  # a block ends with its line
        text = text[:begin] + json.dumps(image) + text[begin + len(written) :]
    return text.encode()


def _image_values(document: Any) -> list[yaml.ScalarNode]:
    """The values of `image:` in the defaults and in each node."""
    top = {key.value: part for key, part in document.value}
    values = []
    for part in (top.get("defaults"), *(node for _, node in top["nodes"].value)):
        for key, value in part.value if isinstance(part, yaml.MappingNode) else ():
            if key.value == "image" and value.tag.endswith(":str"):
                values.append(value)
    return values


def limit(inventory: Inventory, label: str | None) -> Inventory:
    """The inventory with only the nodes that have the label or are called so; with all if the label is None.
    InventoryError if no node is left."""
    if label is None:
        return inventory
    nodes = {name: node for name, node in inventory.nodes.items() if label in node.labels or label == name}
    if not nodes:
        known = list(inventory.nodes)
        for node in inventory.nodes.values():
            known += [other for other in node.labels if other not in known]
        raise InventoryError(
            f"{escaped(inventory.source)}: no node has the label {shown(label)}{did_you_mean(label, known)}"
            f" (nodes and labels: {', '.join(known)})"
        )
    return inventory.model_copy(update={"nodes": nodes})


def _prepared(document: Document, faults: Faults) -> dict[str, Any] | None:
    """The data with an empty mapping for each `NAME:` without a value; None where there is nothing to check.

    Faults of the outer form are added here, with better messages than the model's.
    """
    data = document.data
    if data is None:
        return None
    if not isinstance(data, dict):
        faults.add("must be a mapping with the keys defaults and nodes", line=document.line(()))
        return None
    nodes = data.get("nodes")
    if not nodes or not isinstance(nodes, dict):
        what = "must be a mapping of name to options"
        if not nodes:
            what = "there is no node: name at least one under nodes:"
        elif isinstance(nodes, list):
            what += ", not a list: write 'NAME:' for each node, not '- NAME'"
        faults.add(f"nodes: {what}", line=document.line(("nodes",)))
        nodes = {}
    for name in nodes:
        if not NAME_RE.match(name):
            faults.add(f"node {shown(name)}: {NAME_RULE}", line=document.line(("nodes", name)))
    filled = {name: {} if options is None else options for name, options in nodes.items()}
    defaults = data.get("defaults")
    return {**data, "defaults": {} if defaults is None else defaults, "nodes": filled}
