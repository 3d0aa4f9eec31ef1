"""Loading of an inventory: a YAML file into an Inventory, or an InventoryError that names every fault with its line.

The YAML's values are those of `yaml.safe_load`. Refused is what YAML itself lets pass: two keys of one name, aliases
(a few lines of them can mean gigabytes), tags, and keys that are not text. Also the rules over several options of a
node, and a node's references resolved.
"""

from __future__ import annotations

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
    Defaults,
    DockerSection,
    Inventory,
    InventoryFile,
    Node,
    NodeOptions,
    merged,
)
from orchestrator.inventory.pools import conflicts_of_pool
from orchestrator.inventory.values import NAME_RE, NAME_RULE, resolve
from orchestrator.tables.faults import MAX_TEXT, Faults, did_you_mean, escaped, shown
from orchestrator.tables.open import read_bytes

Loc = tuple[str | int, ...]

_ALIAS = "an alias (*name): write what nodes share under defaults instead"


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, _ALIAS, mark)
        return super().compose_node(parent, index)


class Document:
    """A parsed YAML document. `data`: the plain data where `readable`; else there is a fault."""

    def __init__(self, text: str, faults: Faults) -> None:
        self.data: Any = None
        self.readable = False
        self._lines: dict[Loc, int] = {}
        self._faults = faults
        try:
            self._read(text)
        except yaml.MarkedYAMLError as e:
            mark = e.problem_mark or e.context_mark
            faults.add(_syntax(e, text), line=mark.line + 1 if mark else None)
        except yaml.reader.ReaderError as e:
            faults.add("holds a control character: drop it", line=text.count("\n", 0, e.position) + 1)
        except RecursionError:
            faults.add("is nested too deeply to be an inventory")

    def line(self, loc: Loc) -> int | None:
        """The line of `loc`, or of the nearest part of the document around it."""
        while loc not in self._lines and loc:
            loc = loc[:-1]
        return self._lines.get(loc)

    def _read(self, text: str) -> None:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            self.data = None if node is None else self._plain(loader, node, ())
            self.readable = True
        finally:
            loader.dispose()

    def _plain(self, loader: yaml.SafeLoader, node: yaml.Node, loc: Loc) -> Any:
        self._lines.setdefault(loc, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(loader, node, loc)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self._plain(loader, child, (*loc, i)) for i, child in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(loader, node)
        self._faults.add(_tag(node), line=node.start_mark.line + 1)
        return None

    def _scalar(self, loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
        try:
            return loader.construct_object(node)
        except yaml.constructor.ConstructorError:
            what = _tag(node)
        except ValueError:  # 2024-99-99 looks like a date and is none
            what = f"{shown(node.value)} is no valid value: put it in quotes if it is text"
        self._faults.add(what, line=node.start_mark.line + 1)
        return None

    def _mapping(self, loader: yaml.SafeLoader, node: yaml.MappingNode, loc: Loc) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._faults.add("a key that is no plain word", line=line)
                continue
            key = key_node.value
            if key_node.tag == "tag:yaml.org,2002:merge":
                self._faults.add("merging by <<: write what nodes share under defaults instead", line=line)
            elif key_node.tag != "tag:yaml.org,2002:str":
                self._faults.add(f"the key {shown(key)} is not text: put it in quotes", line=line)
            elif key in out:
                what = "node" if loc == ("nodes",) else "key"
                first = self._lines[(*loc, key)]
                self._faults.add(f"{what} {shown(key)} is here twice, first in line {first}: drop one", line=line)
                self._plain(loader, value_node, (*loc, key, "again"))  # for what is wrong in it
            else:
                self._lines[(*loc, key)] = line
                out[key] = self._plain(loader, value_node, (*loc, key))
        return out


def _tag(node: yaml.Node) -> str:
    return f"the tag {shown(node.tag.replace('tag:yaml.org,2002:', '!!'))} has no place here: drop it"


def _syntax(e: yaml.MarkedYAMLError, text: str) -> str:
    if e.problem == _ALIAS:
        return _ALIAS
    mark, lines = e.problem_mark, text.split("\n")
    if mark and mark.line < len(lines) and "\t" in lines[mark.line][: mark.column + 1]:
        return "a tab: YAML is indented with spaces"
    if "expected a single document" in (e.context or ""):
        return "a second document: an inventory is one document, drop the '---'"
    if "could not find expected ':'" in (e.problem or ""):
        return "is no valid YAML: a ':' is missing, or the indentation is wrong"
    return f"is no valid YAML: {escaped((e.problem or 'unknown problem')[:200])}"


_SSH_ONLY = ("host", "port", "user", "identity", "proxy_jump", "ssh_config")


def conflicts_of_defaults(defaults: Defaults) -> Iterator[tuple[Loc, str]]:
    """(place, problem and way out) of options that `defaults` cannot have."""
    if defaults.host is not None:
        yield ("defaults", "host"), "a host is one node's: put it under the node, or leave it out and name the node so"


def conflicts(node: Node, options: NodeOptions) -> Iterator[tuple[Loc, str]]:
    """(place, problem and way out) of a node whose options do not fit together. `options`: the node's own; inherited
    ones that it does not need are no fault.
    """
    here: Loc = ("nodes", node.name)
    given = options.model_fields_set
    for path, problem in conflicts_of_pool(node, given):
        yield (*here, *path), problem
    if node.transport == "local":
        why = "is for transport: ssh, and this node's is local: set transport or drop it"
        if node.lease is not None:
            why = "is for transport: ssh: the options of a login node stand under hosts:, and via: names it"
        for option in _SSH_ONLY:
            if option in given and getattr(options, option) is not None:
                yield (*here, option), why
    spec = find_engine(node.engine)
    sections: dict[str, list[str]] = {}
    for other in built_in():
        for option in find_engine(other).sections:
            sections.setdefault(option, []).append(other)
    for option, of in sections.items():
        pods_own = (node.lease, option) == ("kubernetes", "image")
        if spec.name not in of and not pods_own and option in given and getattr(options, option) is not None:
            is_for = f"is for engine: {', '.join(of)}, and this node's is {spec.name}: set engine or drop it"
            yield (*here, option), is_for
    for place, what in spec.conflicts(node):
        yield (*here, *place), what
    try:
        spec.parse_options(node.engine_options)
    except ValueError as e:
        yield (*here, "engine_options"), str(e)
    if (node.gfx is None) != (node.cu_num is None):
        lacks = "cu_num" if node.cu_num is None else "gfx"
        yield here, f"gfx and cu_num go together: add {lacks}, or drop both and they are detected"
    if isinstance(node.numa, tuple):
        slots = node.gpus if isinstance(node.gpus, int) else None if node.gpus == "auto" else len(node.gpus)
        if slots is None:
            yield (*here, "numa"), "a list needs gpus: as a number or a list, so that it is known which slot is meant"
        elif len(node.numa) != max(1, slots):
            yield (*here, "numa"), f"has {len(node.numa)} entries for {max(1, slots)} slots: one NUMA node a slot"
    if node.docker.ipc == "none" and node.docker.shm_size is not None:
        yield (*here, "docker"), "ipc: none has no /dev/shm that shm_size could be for: drop one of them"


def check_references(nodes: Iterable[Node]) -> None:
    """Raise InventoryError with every reference of these nodes whose variable is not set, all at once."""
    faults: list[str] = []
    for node in nodes:
        try:
            resolved(node)
        except InventoryError as e:
            faults += e.faults
    if faults:
        raise InventoryError(list(dict.fromkeys(faults)))


def resolved(node: Node, environ: Mapping[str, str] | None = None) -> Node:
    """The node with every reference replaced, checked again. For use at once: keep and write the unresolved one.

    Raises InventoryError naming file, line, node and variable; no message holds a value.
    """
    values = resolve(node.options(), node.name, node.origin, environ)
    try:
        fixed = {"name": node.name, "source": node.source, "origins": node.origins, "login": node.login}
        return Node.model_validate({**values, **fixed})
    except ValidationError as e:
        faults = []
        for detail in e.errors(include_url=False, include_input=False):
            path = ".".join(str(p) for p in detail["loc"])
            why = str(detail.get("ctx", {}).get("error") or detail["msg"])
            faults.append(f"{node.origin(path)}: node {node.name}: {path}, its references replaced, {why}")
        raise InventoryError(faults) from None


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
    return parse_inventory(read_bytes(path, MAX_BYTES, InventoryError), str(path))


def parse_inventory(data: bytes, source: str) -> Inventory:
    """The inventory in a YAML text, as `load_inventory` reads it. `source`: its file, for messages."""
    faults = Faults(source)
    found = _parse(data, faults)
    nodes = _merge(*found, source, faults) if found else {}
    if found is None or faults.count:
        raise InventoryError(faults.by_line())
    return Inventory(source=source, defaults=found[0].defaults, nodes=nodes)


def with_image(data: bytes, image: str, source: str) -> bytes:
    """A checked inventory's text with another image wherever it names one; its comments are lost. Raises InventoryError
    where it names none."""
    raw = yaml.safe_load(data)
    named = [part for part in (raw.get("defaults"), *raw["nodes"].values()) if part and part.get("image")]
    if not named:
        raise InventoryError(f"{escaped(source)}: names no image that {shown(image)} could replace: its workers run as"
                             " processes; give the new build's inventory with -i")  # fmt: skip
    for part in named:
        part["image"] = image
    return yaml.safe_dump(raw, sort_keys=False, allow_unicode=True).encode()


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


def _merge(parsed: InventoryFile, document: Document, source: str, faults: Faults) -> dict[str, Node]:
    """The nodes with the defaults merged in; what does not fit together is added to the faults."""
    nodes = {}
    wrong = list(conflicts_of_defaults(parsed.defaults))
    for name, options in parsed.nodes.items():
        nodes[name] = merged(name, parsed.defaults, options, source, document.line, parsed.hosts)
        wrong += conflicts(nodes[name], options)
    for loc, what in wrong:
        faults.add(f"{_dotted(loc)}: {what}", line=document.line(loc))
    return nodes


def _parse(data: bytes, faults: Faults) -> tuple[InventoryFile, Document] | None:
    """The file as written, and its lines; None if there is any fault."""
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
        return None if faults.count else (parsed, document)
    except ValidationError as e:
        found = [(d["loc"], _message(d)) for d in e.errors(include_url=False)]
    for loc, message in found:
        faults.add(f"{_dotted(loc)}: {message}", line=document.line(loc))
    return None


def _prepared(document: Document, faults: Faults) -> dict[str, Any] | None:
    """The data with an empty mapping for each `NAME:` without a value; None where there is nothing to check.

    Faults of the outer form are added here, with better messages than the model's.
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
    for type_, word in ((dict, "a mapping"), (list, "a list"), (tuple, "a list")):
        if isinstance(value, type_):
            return word
    return "empty" if value is None else shown(str(value))


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


def _unknown_key(loc: Loc) -> str:
    key, in_defaults, in_docker = str(loc[-1]), loc[0] == "defaults", "docker" in loc[1:-1]
    of = InventoryFile if len(loc) == 1 else DockerSection if in_docker else Defaults if in_defaults else NodeOptions
    legal = list(of.model_fields)
    if _SECRET_KEY.match(key):
        return _NO_SECRETS
    if len(loc) == 1 and key in Defaults.model_fields:
        return "unknown key: put it under defaults"
    if not in_docker and key in DockerSection.model_fields and len(loc) > 1:
        return "is an option of containers: put it under docker"
    if key in ("family", "tuner"):
        return "is an option of the whole fleet: put it under defaults"
    if in_docker and key in NodeOptions.model_fields:
        return "is an option of the node: put it beside docker, not under it"
    if key in _NOT_A_KEY:
        return f"unknown key: {_NOT_A_KEY[key]}"
    return f"unknown key{did_you_mean(key, legal)} (legal: {', '.join(legal)})"
