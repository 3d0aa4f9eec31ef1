"""A YAML document as plain data, with the line of every key and value.

The values are those of `yaml.safe_load`. Refused is what YAML itself lets pass: two keys of one name, aliases
(a few lines of them can mean gigabytes), tags, and keys that are not text.
"""

from __future__ import annotations

from typing import Any

import yaml

from orchestrator.tables.faults import Faults, escaped, shown

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
