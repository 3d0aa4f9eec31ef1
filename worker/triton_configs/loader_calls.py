"""The calls of AITER's loader of configs (`get_gemm_config`) in a tree, read without running them.

A kernel's module asks for `get_gemm_config("GEMM-A16W16", M, N, K, bounds=...)`; public wrappers mostly import the
function that does.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ANYTHING = ".*"
"""The pattern of an expression that is not understood."""


class LoaderCall(NamedTuple):
    """A call of the loader within a function."""

    function: str
    config: str
    """Pattern of the config names that it may ask for: `GEMM\\-A16W16`, `FUSED\\-(?:A|B)`."""
    bounds: tuple[int, ...] | None
    """None if the call has none, () if they are not a literal."""
    backend: str | None
    """None if the call does not name one."""


def _parse_module(path: Path) -> ast.Module:
    """A module's tree; an empty one for a file that cannot be read or is no Python."""
    try:
        return ast.parse(path.read_text(errors="replace"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def find_loader_calls(path: Path) -> Iterator[LoaderCall]:
    """The calls in the functions of a module's file."""
    for function in ast.walk(_parse_module(path)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "get_gemm_config" and node.args:
                yield _loader_call(node, function)


def _loader_call(call: ast.Call, function: ast.FunctionDef) -> LoaderCall:
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    bounds = None
    if "bounds" in keywords:
        bounds = literal_numbers(keywords["bounds"])
    backend = getattr(keywords.get("backend"), "value", None)
    return LoaderCall(function.name, _pattern_of(call.args[0], function), bounds, backend)


def find_readers(package: Path, config: str) -> dict[str, set[str | None]]:
    """Modules below aiter/ops/triton that read a config's files, each with the backends that it names:
    `gemm.basic.gemm_a16w16`, `gluon.gemm_a8w8`. A wrapper mostly imports the function that calls the loader."""
    texts = {path: path.read_bytes() for path in sorted(package.rglob("*.py"))}
    names = {path: ".".join(path.relative_to(package).with_suffix("").parts) for path in texts}
    readers: dict[str, set[str | None]] = {}
    backend_of: dict[tuple[str, str], str | None] = {}  # by the calling function: its module and name
    for path, text in texts.items():
        if b"get_gemm_config" not in text:
            continue
        for call in find_loader_calls(path):
            if re.fullmatch(call.config, config):
                readers.setdefault(names[path], set()).add(call.backend)
                backend_of[f"aiter.ops.triton.{names[path]}", call.function] = call.backend
    stems = [module.rpartition(".")[2].encode() for module, _ in backend_of]
    for path, text in texts.items():
        if not any(stem in text for stem in stems):  # it cannot import one of the functions
            continue
        for imported in _imported_names(path):
            if imported in backend_of:
                readers.setdefault(names[path], set()).add(backend_of[imported])
    return {name: backends for name, backends in readers.items() if not name.startswith(("_triton_kernels.", "utils."))}


def _imported_names(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of each `from module import name` in a file."""
    for node in ast.walk(_parse_module(path)):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.module or "", alias.name


def literal_numbers(node: ast.expr) -> tuple[int, ...]:
    """A literal tuple of whole numbers, () for anything else."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return ()
    if isinstance(value, tuple) and all(isinstance(item, int) for item in value):
        return value
    return ()


def _pattern_of(node: ast.expr, function: ast.FunctionDef) -> str:
    """Pattern of what an expression may be, names followed within their function."""
    if isinstance(node, ast.Constant):
        return re.escape(str(node.value))
    if isinstance(node, ast.JoinedStr):
        return "".join(_pattern_of(part, function) for part in node.values)
    if isinstance(node, ast.IfExp):
        return f"(?:{_pattern_of(node.body, function)}|{_pattern_of(node.orelse, function)})"
    values: list[ast.expr] = []
    if isinstance(node, ast.Name):
        # a value that holds the name itself (`name = name + "x"`) would be followed without end
        values = [value for value in _assigned_values(node.id, function) if not _mentions(value, node.id)]
    if not values:
        return ANYTHING
    return f"(?:{'|'.join(_pattern_of(value, function) for value in values)})"


def _assigned_values(name: str, function: ast.FunctionDef) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(_is_name(target, name) for target in node.targets):
            yield node.value


def _mentions(value: ast.expr, name: str) -> bool:
    return any(_is_name(node, name) for node in ast.walk(value))


def _is_name(node: ast.AST, name: str) -> bool:
    return getattr(node, "id", "") == name
