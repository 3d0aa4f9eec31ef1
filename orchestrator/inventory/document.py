"""Reads a YAML document as plain data, with the line of each part, and with a fault for each thing that we refuse.

Values are read as `yaml.safe_load` reads them. We refuse four things that YAML allows: duplicate keys, aliases (a few
lines of them can mean gigabytes), tags, and keys that are not text.
"""

from __future__ import annotations

from typing import Any

import yaml

from orchestrator.files.faults import Faults, escaped, shown

Loc = tuple[str | int, ...]
"""The place of a value in a document: its keys and positions from the top."""
_ALIAS = "an alias (*name): write what nodes share under defaults instead"
_TAB = "found character '\\t' that cannot start any token"
"""PyYAML's words for a line that is indented with a tab."""


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
            faults.add(_describe_error(e), line=mark.line + 1 if mark else None)

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
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            line = key_node.start_mark.line + 1
            if key_node.tag != "tag:yaml.org,2002:str":
                what = f"the key {shown(key)}" if isinstance(key, str) else "a key"
                self._faults.add(f"{what} is not text: put it in quotes", line=line)
            elif key in values:
                what = "node" if loc == ("nodes",) else "key"
                first_line = self.lines[(*loc, key)]
                text = f"{what} {shown(key)} is here twice, first in line {first_line}: drop one"
                self._faults.add(text, line=line)
            else:
                self.lines[(*loc, key)] = line
                values[key] = self._plain(value_node, (*loc, key))
        return values


def _describe_error(error: yaml.YAMLError | RecursionError) -> str:
    parts = [getattr(error, name, None) for name in ("context", "problem", "reason")]
    words = [part for part in parts if part]
    if _ALIAS in words:
        return _ALIAS
    if _TAB in words:
        return "is not valid YAML: a tab where YAML wants spaces: indent with spaces"
    return f"is not valid YAML: {escaped((', '.join(words) or str(error))[:200])}"
