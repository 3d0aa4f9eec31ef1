"""Options of a script's argparse, and those that it offers and then ignores."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from worker.aiter_tree.reading import Evidence, SourceFile, called
from worker.tuners.aiter.inspect.script import Script, calls_super, outside_classes

_FLAG_ACTIONS = frozenset(("store_true", "store_false", "store_const", "append_const", "count", "help", "version"))
_OF_CANDIDATES = ("--warmup", "--iters", "--timeout")


@dataclass(frozen=True, slots=True)
class Argument:
    """One option. `names`: all of them; `kind`: flag or value; `default`: ... where the files do not tell."""

    names: tuple[str, ...]
    kind: str
    default: object

    @property
    def long(self) -> tuple[str, ...]:
        return tuple(n for n in self.names if n.startswith("--"))


def arguments(script: Script) -> list[Argument]:
    """All options, those of the bases first."""
    out: list[Argument] = []
    for _, call in _calls(script):
        names = tuple(a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
        if not names or not all(n.startswith("-") for n in names):
            continue
        words = {k.arg: k.value for k in call.keywords if k.arg}
        action = words.get("action")
        both = isinstance(action, ast.Attribute) and action.attr == "BooleanOptionalAction"
        plain = isinstance(action, ast.Constant) and action.value in _FLAG_ACTIONS
        nargs = words.get("nargs")
        kind = "flag" if both or plain or (isinstance(nargs, ast.Constant) and nargs.value == 0) else "value"
        if both:
            names += tuple(f"--no-{n[2:]}" for n in names if n.startswith("--"))
        out.append(Argument(names, kind, _default(script, words, kind)))
    return out


def ignored(script: Script, options: list[Argument]) -> dict[str, Evidence]:
    """Options that are offered and not handed to the measuring of candidates, with where that is seen."""
    out: dict[str, Evidence] = {}
    offered = {name for o in options for name in o.long}
    for option in _OF_CANDIDATES:
        if option not in offered:
            continue
        name = option[2:]
        uses = [
            node
            for source in script.sources
            for node in _tuning(script, source)
            if isinstance(node, ast.Attribute) and node.attr == name and _is_args(node.value)
        ]
        if not uses:
            out[option] = _own_number(script, name) or script.source.missing(f"args.{name} is not used in tuning")
    return out


def undefined_defaults(script: Script) -> Evidence | None:
    """A default that the base asks its table for and that this class's table lacks: the script ends with a KeyError
    before it has read its arguments."""
    if not script.defaults:
        return None
    for source, call in _calls(script):
        for word in call.keywords:
            name = _asked(word.value) if word.arg == "default" else None
            if name is not None and name not in script.defaults:
                return source.at(call.lineno, f"default=defaults[{name!r}], which this script's ARG_DEFAULTS lacks")
    return None


def _calls(script: Script) -> Iterator[tuple[SourceFile, ast.Call]]:
    """Every add_argument that runs, in its order."""
    for name in ("__init__", "_setup_common_arguments", "_setup_specific_arguments"):
        hands_on = True
        for cls in script.lineage:
            node = cls.method(name)
            if node is None or not hands_on:
                continue
            for inner in ast.walk(node):
                if isinstance(inner, ast.Call) and called(inner) == "add_argument":
                    yield cls.source, inner
            hands_on = name == "__init__" or calls_super(node)
    for inner in outside_classes(script.source):
        if isinstance(inner, ast.Call) and called(inner) == "add_argument":
            yield script.source, inner


def _default(script: Script, words: dict[str, ast.expr], kind: str) -> object:
    value = words.get("default")
    if value is None:
        return False if kind == "flag" else None
    if isinstance(value, ast.Constant):
        return value.value
    name = _asked(value)
    if name is not None:
        return script.defaults.get(name, ...)
    if (
        called(value) == "get"
        and isinstance(value, ast.Call)
        and value.args
        and isinstance(value.args[0], ast.Constant)
    ):
        other = value.args[1] if len(value.args) > 1 else None
        return script.defaults.get(str(value.args[0].value), other.value if isinstance(other, ast.Constant) else None)
    return ...


def _asked(node: ast.expr) -> str | None:
    """`timeout` of `defaults["timeout"]`."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value) if node.value.id == "defaults" else None
    return None


def _tuning(script: Script, source: SourceFile) -> Iterator[ast.AST]:
    """Every node of a file that may run when shapes are tuned: neither run_config, which measures what is tuned
    already, nor other tuners that the file holds."""
    ours = [cls.node for cls in script.lineage]
    todo: list[ast.AST] = [source.tree] if source.tree else []
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef) and node.name.startswith("run_config"):
            continue
        if isinstance(node, ast.ClassDef) and "Tuner" in node.name and node not in ours:
            continue
        yield node
        todo.extend(ast.iter_child_nodes(node))


def _is_args(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id == "args") or (
        isinstance(node, ast.Attribute) and node.attr == "args"
    )


def _own_number(script: Script, name: str) -> Evidence | None:
    """The script's own `"num_warmup": 10`."""
    for source in script.sources:
        for node in _tuning(script, source):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == f"num_{name}" and isinstance(value, ast.Constant):
                        return source.at(key.lineno)
    return None
