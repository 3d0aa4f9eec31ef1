"""The columns that a script keys its tables by, in the script's order; gfx and cu_num are its own to add."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from worker.tuners.aiter.inspect.script import Script, outside_classes
from worker.tuners.aiter.tree.reading import Evidence, Source, strings

OWN = ("gfx", "cu_num")
"""Key columns that AITER adds by itself."""
_RESULT = frozenset(
    (
        "kernelId", "kernelName", "libtype", "solidx", "splitK", "us", "soltimes", "block_m", "ksplit", "us1",
        "total_us", "tflops", "bw", "errRatio", "err_ratio",
    )
)  # fmt: skip


def key_columns(script: Script) -> tuple[tuple[str, ...], Evidence | None]:
    """(columns, where they stand); empty where the files do not tell."""
    for source, line, names in _places(script):
        key: list[str] = []
        for name in (n.strip() for n in names):
            if name in _RESULT:
                break
            key.append(name)
        if _is_key(key):
            # the batched scripts of 2025-08 name it apart
            return tuple(key if "cu_num" in key else ["cu_num", *key]), source.at(line)
    return (), None


def _is_key(names: list[str]) -> bool:
    return len(set(names)) == len(names) and ({"M", "N", "K"} <= set(names) or {"token", "model_dim"} <= set(names))


def _places(script: Script) -> Iterator[tuple[Source, int, list[str]]]:
    """Lists that may be the key, the surest first."""
    for node in outside_classes(script.source):
        if isinstance(node, ast.Assign) and any(_named_key(t) for t in node.targets):
            yield from _list(script.source, node.value)
    for cls in script.lineage:
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


def _list(source: Source, node: ast.expr) -> Iterator[tuple[Source, int, list[str]]]:
    names = strings(node)
    if names:
        yield source, node.lineno, names
