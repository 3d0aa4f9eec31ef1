"""Loads an inventory: a YAML file into an Inventory, or an InventoryError that names every fault with its line.

Values are read as `yaml.safe_load` reads them. We refuse four things that YAML allows: duplicate keys, aliases (a few
lines of them can mean gigabytes), tags, and keys that are not text. This module also checks the rules that cover
several options of a node, and resolves a node's references.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from orchestrator.engines import built_in, find_engine
from orchestrator.errors import InventoryError
from orchestrator.inventory.model import (
    AiterSection,
    Defaults,
    DockerSection,
    For,
    Inventory,
    InventoryFile,
    LoginHost,
    Node,
    NodeOptions,
    Strict,
    VllmSection,
)
from orchestrator.inventory.values import (
    FROM_FILE,
    NAME_RE,
    NAME_RULE,
    has_reference,
    missing,
    resolve,
    texts,
    unset_words,
)
from orchestrator.tables.textfiles import MAX_TEXT, Faults, escaped, read_bytes, shown
from worker.text import did_you_mean

Loc = tuple[str | int, ...]
MAX_BYTES = 2**20

_ALIAS = "an alias (*name): write what nodes share under defaults instead"


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, _ALIAS, mark)
        return super().compose_node(parent, index)


class Document:
    """A parsed YAML document. `data`: the plain data; None if it is empty or has a fault."""

    def __init__(self, text: str, faults: Faults) -> None:
        self.data: Any = None
        self.lines: dict[Loc, int] = {}
        self._faults = faults
        try:
            self._loader = _Loader(text)
            node = self._loader.get_single_node()
            self.data = None if node is None else self._plain(node, ())
            if self.data is None and not faults.count:
                faults.add("is empty: an inventory has defaults: and nodes:")
        except (yaml.YAMLError, RecursionError) as e:
            mark = getattr(e, "problem_mark", None)
            faults.add(_syntax(e), line=mark.line + 1 if mark else None)

    def line(self, loc: Loc) -> int | None:
        """The line of `loc`, or of the nearest part of the document around it."""
        while loc not in self.lines and loc:
            loc = loc[:-1]
        return self.lines.get(loc)

    def _plain(self, node: yaml.Node, loc: Loc) -> Any:
        self.lines.setdefault(loc, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node, loc)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self._plain(child, (*loc, i)) for i, child in enumerate(node.value)]
        what = f"the tag {shown(node.tag.replace('tag:yaml.org,2002:', '!!'))} is not allowed here: drop it"
        try:
            if isinstance(node, yaml.ScalarNode):
                return self._loader.construct_object(node)
        except (yaml.constructor.ConstructorError, ValueError):  # a tag, or text that looks like a date and is not
            what += ", or put the value in quotes if it is text"
        self._faults.add(what, line=node.start_mark.line + 1)
        return None

    def _mapping(self, node: yaml.MappingNode, loc: Loc) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line, key = key_node.start_mark.line + 1, key_node.value
            if key_node.tag != "tag:yaml.org,2002:str":
                what = f"the key {shown(key)}" if isinstance(key, str) else "a key"
                self._faults.add(f"{what} is not text: put it in quotes", line=line)
            elif key in out:
                what = "node" if loc == ("nodes",) else "key"
                first = self.lines[(*loc, key)]
                self._faults.add(f"{what} {shown(key)} is here twice, first in line {first}: drop one", line=line)
            else:
                self.lines[(*loc, key)] = line
                out[key] = self._plain(value_node, (*loc, key))
        return out


def _syntax(e: yaml.YAMLError | RecursionError) -> str:
    words = [word for name in ("context", "problem", "reason") if (word := getattr(e, name, None))]
    return _ALIAS if _ALIAS in words else f"is not valid YAML: {escaped((', '.join(words) or str(e))[:200])}"


_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?\Z")


def conflicts(node: Node, given: Mapping[str, Any]) -> Iterator[tuple[Loc, str]]:
    """Yields (path below the node, problem and way out) for options that do not fit together. `given`: the node's own
    options. Inherited options that it does not need are ignored."""
    yield from _out_of_place(node, given)
    spec = find_engine(node.engine)
    yield from spec.conflicts(node)
    try:
        spec.parse_options(node.engine_options)
    except ValueError as e:
        yield ("engine_options",), str(e)
    slots = None if node.gpus == "auto" else max(1, node.gpus if isinstance(node.gpus, int) else len(node.gpus))
    entries = len(node.numa) if isinstance(node.numa, tuple) else slots
    pods = node.lease == "kubernetes"
    way = "name the login node in via:" if node.lease == "slurm" else "drop transport: (or write transport: local)"
    lacks = "cu_num" if node.cu_num is None else "gfx"
    for wrong, path, what in (
        ((node.gfx is None) != (node.cu_num is None), (),
         f"gfx and cu_num go together: add {lacks}, or drop both and they are detected"),
        (isinstance(node.numa, tuple) and slots is None, ("numa",),
         "a list needs gpus: as a number or a list, so that it is known which slot is meant"),
        (slots is not None and entries != slots, ("numa",),
         f"has {entries} entries for {slots} slots: one NUMA node a slot"),
        (node.docker.ipc == "none" and node.docker.shm_size is not None, ("docker",),
         "ipc: none has no /dev/shm that shm_size could be for: drop one of them"),
        (node.lease and node.transport != "local", ("transport",),
         f"a lease is reached by its scheduler and not by SSH: {way}"),
        (node.lease and isinstance(node.gpus, tuple), ("gpus",),
         "which GPUs a lease has is the scheduler's choice: give their number"),
        (pods and node.gpus == "auto", ("gpus",), "a pod needs a number of GPUs (0: none)"),
        (pods and node.image is None, ("image",), "a pod needs an image: name one such as rocm/pytorch:latest"),
        (pods and node.engine != "process", ("engine",),
         f"a pod is a container already: drop engine: {node.engine}, the pod's image is `image:`"),
        (pods and not _DNS_LABEL.match(node.name), (),
         "a pool of pods needs a name of small letters, digits and '-', at most 42: its pods are called so"),
    ):  # fmt: skip
        if wrong:
            yield path, what


def _out_of_place(node: Node, given: Mapping[str, Any]) -> Iterator[tuple[Loc, str]]:
    """Options that only apply to another value of the node's transport, lease or engine."""
    wants = {n: m for n, f in NodeOptions.model_fields.items() for m in f.metadata if isinstance(m, For)}
    engines = {name: find_engine(name).sections for name in (*built_in(), node.engine)}
    for name in dict.fromkeys(o for sections in engines.values() for o in sections):
        wants[name] = For("engine", tuple(e for e, sections in engines.items() if name in sections))
    for name in given:
        want = wants.get(name)
        if want is None or given[name] is None or getattr(node, want.option) in want.values:
            continue
        of, has = f"is for {want.option}: {', '.join(want.values)}", getattr(node, want.option)
        if want.option == "transport" and node.lease:
            yield (name,), f"{of}: the options of a login node stand under hosts:, and via: names it"
        elif has is None:
            yield (name,), f"is for a pool of leases: add {' or '.join(f'lease: {v}' for v in want.values)}, or drop it"
        elif (node.lease, name) != ("kubernetes", "image"):  # a pod's own
            yield (name,), f"{of}, and this node's is {has}: set {want.option} or drop it"


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
                faults |= {name: f"{place} {unset_words(name)}" for _, name in missing(token.value)}
    return faults


def check_identities(nodes: Iterable[Node]) -> None:
    """Raise one InventoryError that lists every identity file of these nodes that does not exist here."""
    faults = [
        f"{node.origin('name')}: node {node.name}: identity: no file {shown(path, 999)} is here; name the private key"
        for node in nodes
        for path in (node.identity, node.login and node.login.identity)
        if path and not has_reference(path) and not Path(path).expanduser().is_file()
    ]
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
    try:
        parsed = InventoryFile.model_validate(values, context=FROM_FILE) if values is not None else None
    except ValidationError as e:
        parsed, found = None, [(d["loc"], _message(d)) for d in e.errors(include_url=False)]
        for loc, message in found:
            faults.add(f"{_dotted(loc)}: {message}", line=document.line(loc))
    nodes = {}
    if parsed and values and not faults.count:
        if "host" in parsed.defaults.model_fields_set:
            what = "defaults.host: a host is one node's: put it under the node, or leave it out and name the node so"
            faults.add(what, line=document.line(("defaults", "host")))
        for name, own in values["nodes"].items():
            nodes[name] = _merged(name, values, parsed, source, document)
            for path, what in conflicts(nodes[name], own):
                loc = ("nodes", name, *path)
                faults.add(f"{_dotted(loc)}: {what}", line=document.line(loc))
    if parsed is None or faults.count:
        raise InventoryError(faults.by_line())
    return Inventory(source=source, defaults=parsed.defaults, nodes=nodes)


def _merged(name: str, values: Mapping[str, Any], parsed: InventoryFile, source: str, document: Document) -> Node:
    """A node's options over the defaults: what the node says wins, option by option within `docker`, `aiter`
    and `vllm`; `env` is merged name by name, `labels` add up."""
    own, shared = values["nodes"][name], {k: v for k, v in values["defaults"].items() if k in NodeOptions.model_fields}
    both = {**shared, **own, "labels": [*shared.get("labels", ()), *own.get("labels", ())]}
    both |= {s: _over(shared.get(s), own.get(s)) for s in ("docker", "aiter", "vllm", "env") if s in both}
    origins = {"name": document.line(("nodes", name)) or 0}
    for path, text in texts(both):
        if has_reference(text):
            loc = tuple(int(p) if p.isdigit() else p for p in path.split("."))
            place = ("nodes", name) if ("nodes", name, *loc) in document.lines else ("defaults",)
            origins[path] = document.line((*place, *loc)) or 0
    login = parsed.hosts.get(via := both.get("via") or "")
    for path, text in texts(login and login.model_dump()):
        if has_reference(text):
            origins[f"login.{path}"] = document.line(("hosts", via, path)) or 0
    return Node(**both, name=name, source=source, origins=origins, login=login)


def _over(below: Mapping[str, Any] | None, above: Mapping[str, Any] | None) -> dict[str, Any]:
    """Two mappings merged key by key, and mappings within them."""
    out = {**(below or {}), **(above or {})}
    return {k: _over((below or {}).get(k), v) if isinstance(v, Mapping) else v for k, v in out.items()}


def with_image(data: bytes, image: str, source: str) -> bytes:
    """A checked inventory's text with another image wherever it names one, its lines as they were. Raises
    InventoryError where it names none."""
    text = data.decode("utf-8-sig")
    document: Any = yaml.compose(text, yaml.SafeLoader)
    top = {key.value: part for key, part in document.value}
    parts = [top.get("defaults"), *(part for _, part in top["nodes"].value)]
    maps = [part for part in parts if isinstance(part, yaml.MappingNode)]
    named = [value for part in maps for key, value in part.value if key.value == "image" and value.tag.endswith(":str")]
    if not named:
        raise InventoryError(f"{escaped(source)}: names no image that {shown(image)} could replace: its workers run as"
                             " processes; give the new build's inventory with -i")  # fmt: skip
    for value in sorted(named, key=lambda value: value.start_mark.index, reverse=True):
        begin, end = value.start_mark.index, value.end_mark.index
        kept = end - len(text[begin:end]) + len(text[begin:end].rstrip())  # a block ends with its line
        text = text[:begin] + json.dumps(image) + text[kept:]
    return text.encode()


def limit(inventory: Inventory, label: str | None) -> Inventory:
    """The inventory with only the nodes that have the label or are called so; with all if the label is None.
    InventoryError if no node is left."""
    if label is None:
        return inventory
    nodes = {name: n for name, n in inventory.nodes.items() if label in n.labels or label == name}
    if not nodes:
        known = dict.fromkeys([*inventory.nodes, *(x for n in inventory.nodes.values() for x in n.labels)])
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
        what = "must be a mapping of name to options" if nodes else "there is no node: name at least one under nodes:"
        listed = ", not a list: write 'NAME:' for each node, not '- NAME'" if nodes and isinstance(nodes, list) else ""
        faults.add(f"nodes: {what}{listed}", line=document.line(("nodes",)))
        nodes = {}
    for name in nodes:
        if not NAME_RE.match(name):
            faults.add(f"node {shown(name)}: {NAME_RULE}", line=document.line(("nodes", name)))
    filled = {name: {} if options is None else options for name, options in nodes.items()}
    return {**data, "defaults": {} if (given := data.get("defaults")) is None else given, "nodes": filled}


_TYPES = {
    "string_type": "must be text: put it in quotes",
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


def _dotted(loc: Loc) -> str:
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
    if isinstance(value, (dict, list, tuple)):
        return "a mapping" if isinstance(value, dict) else "a list"
    return "empty" if value is None else shown(str(value))


_MODELS: dict[str, type[Strict]] = {
    "hosts": LoginHost, "defaults": Defaults, "nodes": NodeOptions, "docker": DockerSection, "aiter": AiterSection,
    "vllm": VllmSection,
}  # fmt: skip


def _unknown_key(loc: Loc) -> str:
    key, within = str(loc[-1]), loc[2 if loc[0] in ("nodes", "hosts") else 1 : -1]
    docker = within == ("docker",)
    section = within[0] if len(within) == 1 and within[0] in ("docker", "aiter", "vllm") else loc[0]
    place = str(section) if len(loc) > 1 else ""
    for applies, hint in (
        (_SECRET_KEY.match(key), _NO_SECRETS),
        (len(loc) == 1 and key in Defaults.model_fields, "unknown key: put it under defaults"),
        (not docker and key in DockerSection.model_fields, "is an option of containers: put it under docker"),
        (key in ("family", "tuner"), "is an option of the whole fleet: put it under defaults"),
        (docker and key in NodeOptions.model_fields, "is an option of the node: put it beside docker, not under it"),
        (key in _NOT_A_KEY, f"unknown key: {_NOT_A_KEY.get(key)}"),
    ):
        if applies:
            return hint
    legal = list(_MODELS.get(place, InventoryFile).model_fields)
    return f"unknown key{did_you_mean(key, legal)} (legal: {', '.join(legal)})"
