"""Facts that differ between dates of AITER, each read from what a file does and not from a version."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from worker.aiter_tree.reading import Evidence, SourceFile, called
from worker.tuners.aiter.inspect.script import Script

Fact = tuple[bool, Evidence | None]
"""A fact, and the line that proves it."""

_N = TypeVar("_N", bound=ast.AST)
_NO: Fact = (False, None)
_OPTIONS = ("timeout", "verbose", "mp", "errRatio")
_READS = re.compile(r"read|get_tuned|result_to_csv|load")


def topk_fault(script: Script | None) -> Fact:
    """True if a shape without a valid candidate makes all later shapes of its batch lose theirs (2025-09 to 2026-04):
    the number of winners is narrowed inside the loop over the shapes, and stays so."""
    found = script.method("post_process") if script else None
    if found is None:
        return _NO
    source, method = found
    for loop in (n for n in ast.walk(method) if isinstance(n, ast.For)):
        for node in ast.walk(loop):
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "topk" for t in node.targets):
                return True, source.at(node.lineno)
    return _NO


def profile_keeps_last_batch(script: Script | None) -> Fact:
    """True if each batch overwrites the profile file (2025-09-27 to 2025-12-12)."""
    found = script.method("post_process") if script else None
    if script is None or found is None:
        return _NO
    source, method = found
    written: Evidence | None = None
    for node in ast.walk(method):
        if not isinstance(node, ast.Call) or not any(_is_profile(a) for a in node.args):
            continue
        name = called(node)
        if _READS.search(name):
            return _NO
        other = script.method(name)
        if other and any(_READS.search(called(n)) for n in ast.walk(other[1])):
            return _NO
        if re.search(r"to_csv|write|save", name):
            written = written or source.at(node.lineno)
    return (True, written) if written else _NO


def exits_nonzero(base: SourceFile | None) -> Fact:
    """True if an exit status of 1 means shapes that were not tuned (2026-01-27 on)."""
    for node in base.walk() if base else ():
        if base and isinstance(node, ast.Call) and called(node) == "exit" and node.args:
            status = node.args[0]
            if isinstance(status, ast.Constant) and status.value == 1:
                return True, base.at(node.lineno)
    return _NO


def groups_reindexed(pool: SourceFile | None) -> Fact:
    """True if grouped shapes are given their inputs by position, so that a shape without candidates in a batch gives
    the others each other's (2025-12-30 to 2026-04-14)."""
    for node in _nodes(pool, ast.Assign):
        if pool and any(isinstance(t, ast.Name) and t.id == "new_in_datas" for t in node.targets):
            return True, pool.at(node.lineno)
    return _NO


def pool_restarts(pool: SourceFile | None) -> Fact:
    """True if AITER notices a lost process of the pool (2025-12-30 on); before, it waits for ever."""
    return _line(pool, r"Pool restarted\.")


def timeout_from_submission(pool: SourceFile | None) -> Fact:
    """True if a task's time is counted from when its whole batch was handed in (until 2026-08)."""
    function = next((n for n in _nodes(pool, ast.FunctionDef) if n.name == "mp_tuner"), None)
    if pool is None or function is None or not any(a.arg == "timeout" for a in _all_args(function)):
        return _NO
    clock: Evidence | None = None
    for node in ast.walk(function):
        if called(node) == "Pool" and isinstance(node, ast.Call) and any(k.arg == "initializer" for k in node.keywords):
            return False, pool.at(node.lineno)  # the workers report when they begin
        if called(node) in ("time", "monotonic", "perf_counter") and isinstance(node, ast.Call):
            clock = clock or pool.at(node.lineno)
    return True, clock or pool.at(function.lineno)


def checks_partial_writes(pool: SourceFile | None) -> Fact:
    """True if outputs are filled with NaN before a candidate runs (2026-05-26 on)."""
    return _line(pool, r"fill_\(float\(.nan.\)\)")


def clears_stale_locks(baton: SourceFile | None) -> Fact:
    """True if a lock whose owner died is broken by the next one (2026-07-09 on)."""
    return _line(baton, r"gethostname\(\)")


def duplicates_fatal(core: SourceFile | None) -> Fact:
    """True if rows of one key in two tables end the import with an error (2026-04-01 on)."""
    for node in _nodes(core, ast.Raise):
        if core and node.exc is not None and "duplicate shape" in ast.unparse(node.exc):
            return True, core.at(node.lineno)
    return _NO


def prefers_hipblaslt(script: Script | None) -> Fact:
    """True if hipBLASLt's best stands unless another is faster than 0.995 of its time: the ratio has to be compared
    with, not only kept."""
    for source in script.sources if script else ():
        for node in source.walk():
            if isinstance(node, ast.Attribute) and node.attr == "hipb_prefer_ratio" and isinstance(node.ctx, ast.Load):
                return True, source.at(node.lineno)
    return _NO


def loses_arguments(script: Script | None) -> Fact:
    """True if tune() rebinds the name `args` and then reads an option from it: it dies at its first
    shape (hsa/gfx950/fmoe_2stages/tune.py of 2026-01)."""
    found = script.method("tune") if script else None
    if found is None:
        return _NO
    source, method = found
    again = [
        n.lineno
        for n in ast.walk(method)
        if isinstance(n, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "args" for t in n.targets)
    ]
    for node in ast.walk(method):
        of_args = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args"
        if of_args and again and isinstance(node, ast.Attribute) and node.lineno > min(again) and node.attr in _OPTIONS:
            return True, source.at(node.lineno)
    return _NO


def lacks_a_test(script: Script | None, meta: Path) -> Fact:
    """True if the script imports a file of op_tests/ that is not there: wheels have csrc/ without it (setup.py)."""
    for node in _nodes(script.source if script else None, ast.ImportFrom):
        name = node.module or ""
        if script and name.startswith("test_") and not (meta / "op_tests" / f"{name}.py").is_file():
            return True, script.source.at(node.lineno)
    return _NO


def _line(source: SourceFile | None, pattern: str) -> Fact:
    found = source.find(pattern) if source else None
    return found is not None, found


def _is_profile(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "profile_file"


def _nodes(source: SourceFile | None, kind: type[_N]) -> Iterator[_N]:
    for node in source.walk() if source else ():
        if isinstance(node, kind):
            yield node


def _all_args(function: ast.FunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
