"""Calls of `get_gemm_config` in the modules of a tree, read without running them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class LoaderCall(NamedTuple):
    """A call within a function. `config`: pattern of the names that it may ask for; `bounds`: None where it gives none,
    () where they are no literal; `backend`: None where it names none."""

    function: str
    config: str
    bounds: tuple[int, ...] | None
    backend: str | None


def parsed(path: Path) -> ast.Module:
    """A module's tree, an empty one for a file that is none."""
    try:
        return ast.parse(path.read_text(errors="replace"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def loader_calls(module: ast.Module) -> Iterator[LoaderCall]:
    """The calls of a module's functions."""
    for function in (n for n in ast.walk(module) if isinstance(n, ast.FunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "get_gemm_config" and node.args:
                named = {k.arg: k.value for k in node.keywords}
                bounds = numbers(named["bounds"]) if "bounds" in named else None
                backend = getattr(named.get("backend"), "value", None)
                yield LoaderCall(function.name, _pattern(node.args[0], function), bounds, backend)


def readers(package: Path, config: str) -> dict[str, set[str | None]]:
    """Modules below aiter/ops/triton that read a config's files, each with the backends that it names:
    `gemm.basic.gemm_a16w16`, `gluon.gemm_a8w8`. A wrapper mostly imports the function that calls the loader."""
    texts = {path: path.read_bytes() for path in sorted(package.rglob("*.py"))}
    names = {path: ".".join(path.relative_to(package).with_suffix("").parts) for path in texts}
    found: dict[str, set[str | None]] = {}
    shared: dict[tuple[str, str], str | None] = {}
    for path in (p for p, text in texts.items() if b"get_gemm_config" in text):
        for call in loader_calls(parsed(path)):
            if re.fullmatch(call.config, config):
                found.setdefault(names[path], set()).add(call.backend)
                shared[f"aiter.ops.triton.{names[path]}", call.function] = call.backend
    stems = [module.rpartition(".")[2].encode() for module, _ in shared]
    for path in (p for p, text in texts.items() if any(stem in text for stem in stems)):
        for node in (n for n in ast.walk(parsed(path)) if isinstance(n, ast.ImportFrom)):
            for at in ((node.module or "", alias.name) for alias in node.names):
                if at in shared:
                    found.setdefault(names[path], set()).add(shared[at])
    return {name: of for name, of in found.items() if not name.startswith(("_triton_kernels.", "utils."))}


def numbers(node: ast.expr) -> tuple[int, ...]:
    """A literal tuple of whole numbers, () for anything else."""
    try:
        found = ast.literal_eval(node)
    except ValueError:
        return ()
    return tuple(found) if isinstance(found, tuple) and all(isinstance(x, int) for x in found) else ()


def _pattern(node: ast.expr, scope: ast.FunctionDef) -> str:
    """Pattern of what an expression may be, names followed within their function."""
    if isinstance(node, ast.Constant):
        return re.escape(str(node.value))
    if isinstance(node, ast.JoinedStr):
        return "".join(_pattern(part, scope) for part in node.values)
    if isinstance(node, ast.IfExp):
        return f"(?:{_pattern(node.body, scope)}|{_pattern(node.orelse, scope)})"
    given = []
    if isinstance(node, ast.Name):
        assigned = [n for n in ast.walk(scope) if isinstance(n, ast.Assign)]
        given = [n.value for n in assigned if any(getattr(to, "id", "") == node.id for to in n.targets)]
        given = [value for value in given if not any(getattr(n, "id", "") == node.id for n in ast.walk(value))]
    return f"(?:{'|'.join(_pattern(value, scope) for value in given)})" if given else ".*"
