"""A tuner script as its files have it: its class with all bases, the key columns of its tables, its options.

The bases may lie anywhere in the tree. Options that the script offers and then ignores are found as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from worker.aiter_tree.locate import Tree
from worker.aiter_tree.reading import Evidence, SourceFile, TreeReader, called, strings

_DEEPEST = 6
_FLAG_ACTIONS = frozenset(("store_true", "store_false", "store_const", "append_const", "count", "help", "version"))
_OF_CANDIDATES = ("--warmup", "--iters", "--timeout")
_OWN_OPTIONS = "_setup_specific_arguments"

OWN = ("gfx", "cu_num")
"""Key columns that AITER adds by itself."""
_RESULT = frozenset(
    (
        "kernelId", "kernelName", "libtype", "solidx", "splitK", "us", "soltimes", "block_m", "ksplit", "us1",
        "total_us", "tflops", "bw", "errRatio", "err_ratio",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClassOf:
    """A class and the file it stands in."""

    source: SourceFile
    node: ast.ClassDef

    def method(self, name: str) -> ast.FunctionDef | None:
        return next((n for n in self.node.body if isinstance(n, ast.FunctionDef) and n.name == name), None)


@dataclass(frozen=True, slots=True)
class Script:
    """A script of a family. `lineage`: the class it makes, then its bases; empty where it has none.

    `sources`: the script's file first, then those of the lineage outside aiter/utility/.
    """

    path: Path
    source: SourceFile
    lineage: tuple[ClassOf, ...]
    sources: tuple[SourceFile, ...]
    defaults: dict[str, object] = field(default_factory=dict)

    def method(self, name: str) -> tuple[SourceFile, ast.FunctionDef] | None:
        """The method that an object of the class has under this name."""
        for cls in self.lineage:
            node = cls.method(name)
            if node is not None:
                return cls.source, node
        return None


def read_script(reader: TreeReader, tree: Tree, path: Path) -> Script | None:
    """The script, None where it cannot be read (the reader's problems say why)."""
    source = reader.source(path)
    if source is None or source.tree is None:
        return None
    lineage = _made_by(reader, tree, source)
    sources = [source]
    for cls in lineage:
        if cls.source not in sources and cls.source.path.parent != tree.package / "utility":
            sources.append(cls.source)
    return Script(path, source, lineage, tuple(sources), _defaults(lineage))


def outside_classes(source: SourceFile) -> Iterator[ast.AST]:
    """Every node that stands in no class."""
    todo: list[ast.AST] = [source.tree] if source.tree else []
    while todo:
        node = todo.pop(0)
        if isinstance(node, ast.ClassDef):
            continue
        yield node
        todo[:0] = ast.iter_child_nodes(node)


def _made_by(reader: TreeReader, tree: Tree, source: SourceFile) -> tuple[ClassOf, ...]:
    """The lineage of the class that the script makes an object of. Of several, the one the others are derived from."""
    found: list[tuple[ClassOf, ...]] = []
    for node in outside_classes(source):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
            cls = _class(reader, tree, source, node.value.func.id)
            if cls is not None:
                found.append(tuple(_lineage(reader, tree, cls, _DEEPEST)))
    tuners = [line for line in found if any("Tuner" in c.node.name for c in line)]
    return min(tuners or found, key=len, default=())


def _lineage(reader: TreeReader, tree: Tree, cls: ClassOf, deepest: int) -> Iterator[ClassOf]:
    yield cls
    for base in cls.node.bases:
        name = base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else ""
        up = _class(reader, tree, cls.source, name) if deepest else None
        if up is not None and up.node is not cls.node:
            yield from _lineage(reader, tree, up, deepest - 1)


def _class(reader: TreeReader, tree: Tree, source: SourceFile, name: str) -> ClassOf | None:
    """The class of that name in this file, or in the file of the tree that it is imported from."""
    for node in source.tree.body if source.tree else ():
        if isinstance(node, ast.ClassDef) and node.name == name:
            return ClassOf(source, node)
    for line in source.walk():
        if isinstance(line, ast.ImportFrom) and line.module and not line.level:
            for alias in line.names:
                if (alias.asname or alias.name) == name:
                    other = _module(reader, tree, source, line.module)
                    return _class(reader, tree, other, alias.name) if other else None
    return None


def _module(reader: TreeReader, tree: Tree, source: SourceFile, dotted: str) -> SourceFile | None:
    """The file of a module that a script imports, as far as it lies in the tree: beside it, in the package, or in a
    folder that scripts put on their path (hsa/gfx942 in 2025)."""
    parts = dotted.split(".")
    if parts[0] == "aiter":
        return reader.source(tree.package.joinpath(*parts[1:]).with_suffix(".py")) if len(parts) > 1 else None
    here = [source.path.parent]
    try:
        here += sorted((tree.meta / "hsa").glob("gfx*"))
    except OSError:
        pass
    for folder in here:
        path = folder.joinpath(*parts).with_suffix(".py")
        if path != source.path:
            found = reader.source(path)
            if found is not None:
                return found
    return None


def _defaults(lineage: tuple[ClassOf, ...]) -> dict[str, object]:
    """ARG_DEFAULTS as an object of the class has them. A class that does not spread its base's has its own alone."""
    for at, cls in enumerate(lineage):
        for node in cls.node.body:
            if isinstance(node, ast.Assign):
                names, value = node.targets, node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                names, value = [node.target], node.value
            else:
                continue
            if not any(isinstance(n, ast.Name) and n.id == "ARG_DEFAULTS" for n in names):
                continue
            if not isinstance(value, ast.Dict):
                return {}
            out: dict[str, object] = {}
            for key, item in zip(value.keys, value.values, strict=True):
                if key is None:
                    out.update(_defaults(lineage[at + 1 :]))
                elif isinstance(key, ast.Constant) and isinstance(key.value, str):
                    out[key.value] = item.value if isinstance(item, ast.Constant) else ...
            return out
    return {}


def calls_super(node: ast.FunctionDef) -> bool:
    """True if a method calls its base's."""
    return any(called(n) == node.name and "super()" in ast.unparse(n) for n in ast.walk(node))


def key_columns(script: Script) -> tuple[tuple[str, ...], Evidence | None]:
    """(columns, where they stand); empty where the files do not show it."""
    for source, line, names in _places(script):
        key: list[str] = []
        for name in (n.strip() for n in names):
            if name in _RESULT:
                break
            key.append(name)
        if _is_key(key):
            # the batched scripts of 2025-08 name cu_num apart
            return tuple(key if {*OWN} & {*key} else ["cu_num", *key]), source.at(line)
    return (), None


def _is_key(names: list[str]) -> bool:
    needed = ({"m", "n", "k"}, {"token", "model_dim"})
    return len(set(names)) == len(names) and any(some <= {n.lower() for n in names} for some in needed)


def _places(script: Script) -> Iterator[tuple[SourceFile, int, list[str]]]:
    """Lists that may be the key, the surest first."""
    for node in outside_classes(script.source):
        if isinstance(node, ast.Assign) and any(_named_key(t) for t in node.targets):
            yield from _list(script.source, node.value)
    for cls in script.lineage:
        for part in cls.node.body:
            if isinstance(part, ast.AnnAssign) and part.value is not None and _named_key(part.target):
                yield from _list(cls.source, part.value)
        init = cls.method("__init__")
        if init is None:
            continue
        plain = [*init.args.posonlyargs, *init.args.args]
        pairs = list(zip(reversed(plain), reversed(init.args.defaults), strict=False))
        pairs += [(a, d) for a, d in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True) if d is not None]
        for argument, default in pairs:
            if argument.arg.lower() in ("key", "keys"):
                yield from _list(cls.source, default)
        for node in ast.walk(init):
            if isinstance(node, ast.Assign) and any(_named_key(t) for t in node.targets):
                yield from _list(cls.source, node.value)
    # before 2025-09 there is no base: what is written down, first as a table's columns
    for source in script.sources:
        for node in source.walk():
            names = strings(node) or []
            if {"cu_num", "kernelId"} <= set(names):
                yield source, node.lineno if isinstance(node, ast.expr) else 0, names
    for source in script.sources:
        for node in source.walk():
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(",") > 5:
                header = node.value.strip().split(",")
                if {"cu_num", "libtype"} <= set(header):
                    yield source, node.lineno, header
    for source in script.sources:
        for node in source.walk():
            if isinstance(node, ast.Dict):
                names = [k.value for k in node.keys if isinstance(k, ast.Constant) and isinstance(k.value, str)]
                if len(names) == len(node.keys) and {"cu_num", "kernelId"} <= set(names):
                    yield source, node.lineno, names
    for source in script.sources:
        for node in source.walk():
            names = strings(node) or []
            if "cu_num" in names:
                yield source, node.lineno if isinstance(node, ast.expr) else 0, names


def _named_key(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id.lower() in ("key", "keys")


def _list(source: SourceFile, node: ast.expr) -> Iterator[tuple[SourceFile, int, list[str]]]:
    names = strings(node)
    if names:
        yield source, node.lineno, names


# --- options --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Argument:
    """One option. `names`: all of them; `kind`: flag or value; `default`: ... where the files do not show it."""

    names: tuple[str, ...]
    kind: str
    default: object

    @property
    def long(self) -> tuple[str, ...]:
        return tuple(n for n in self.names if n.startswith("--"))


def arguments(script: Script) -> list[Argument]:
    """All options, those of the bases first, without those that the script takes back."""
    out: list[Argument] = []
    taken_back = _taken_back(script)
    for method, _, call in _calls(script):
        if taken_back and method == _OWN_OPTIONS:
            out = [o for o in out if not taken_back & {*o.names}]
            taken_back = frozenset()
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
    """Options that are offered and do nothing, with where that is seen: those that are not handed to the measuring of
    candidates, and --run_config where the base's runs nothing."""
    out: dict[str, Evidence] = {}
    offered = {name for o in options for name in o.long}
    run = script.method("run_config") if "--run_config" in offered else None
    returned = [n.value for n in ast.walk(run[1]) if isinstance(n, ast.Return)] if run else []
    if run and len(returned) == 1 and isinstance(returned[0], ast.List) and not returned[0].elts:
        out["--run_config"] = run[0].at(run[1].lineno)
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
    for _, source, call in _calls(script):
        for word in call.keywords:
            name = _table_entry(word.value) if word.arg == "default" else None
            if name is not None and name not in script.defaults:
                return source.at(call.lineno, f"default=defaults[{name!r}], which this script's ARG_DEFAULTS lacks")
    return None


def _calls(script: Script) -> Iterator[tuple[str, SourceFile, ast.Call]]:
    """Every add_argument that runs, in its order, and the method that it stands in ("": in none)."""
    for name in ("__init__", "_setup_common_arguments", _OWN_OPTIONS):
        hands_on = True
        for cls in script.lineage:
            node = cls.method(name)
            if node is None or not hands_on:
                continue
            for inner in ast.walk(node):
                if isinstance(inner, ast.Call) and called(inner) == "add_argument":
                    yield name, cls.source, inner
            hands_on = name == "__init__" or calls_super(node)
    for inner in outside_classes(script.source):
        if isinstance(inner, ast.Call) and called(inner) == "add_argument":
            yield "", script.source, inner


def _taken_back(script: Script) -> frozenset[str]:
    """Options of the bases that the script removes from its parser, to have their names for its own."""
    found = script.method(_OWN_OPTIONS)
    loops = [n for n in ast.walk(found[1]) if isinstance(n, ast.For)] if found else []
    return frozenset(
        node.left.value
        for loop in loops
        if any(isinstance(n, ast.Attribute) and n.attr == "_actions" for n in ast.walk(loop.iter))
        if any(called(n) == "remove" for n in ast.walk(loop))
        for node in ast.walk(loop)
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
    )


def _default(script: Script, words: dict[str, ast.expr], kind: str) -> object:
    value = words.get("default")
    if value is None:
        return False if kind == "flag" else None
    if isinstance(value, ast.Constant):
        return value.value
    name = _table_entry(value)
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


def _table_entry(node: ast.expr) -> str | None:
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
