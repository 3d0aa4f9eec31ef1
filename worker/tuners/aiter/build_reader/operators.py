"""What a tree's operators take from a row: the libtypes that they know, and the FlyDSL names that they can read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from worker.tuners.aiter.build_reader.lists import KernelLists
from worker.tuners.aiter.tree.reading import SourceFile, called

_A8W8 = "ops/gemm_op_a8w8.py"
OPERATORS = {
    "a16w16": ("tuned_gemm.py", ""),
    "a8w8_bpreshuffle": (_A8W8, "gemm_a8w8_bpreshuffle"),
    "a8w8_blockscale": (_A8W8, "gemm_a8w8_blockscale"),
    "a8w8_blockscale_bpreshuffle": (_A8W8, "gemm_a8w8_blockscale_bpreshuffle"),
}
"""Families whose rows have a libtype: the file below aiter/ with their operator, and its name ("": the whole file)."""
_FLYDSL_FILES = ("ops/flydsl/*.py", _A8W8)
_MOE_LIST = "_KERNEL_PARAMS"


class Operators:
    """The operators of one tree."""

    def __init__(self, lists: KernelLists) -> None:
        self._lists = lists
        self._package = lists.tree.package
        self.libtypes = cache(self._libtypes)
        self.flydsl_patterns = cache(self._flydsl_patterns)
        self.moe_names = cache(self._moe_names)

    def _libtypes(self, family: str) -> frozenset[str] | None:
        """The libtypes that the family's operator compares with; None where it has none, or cannot be read."""
        if family not in OPERATORS:
            return None
        file, operator = OPERATORS[family]
        source = self._lists.reader.source(self._package / file)
        if source is None or source.tree is None:
            return None
        body: list[ast.AST] = [source.tree]
        if operator:
            body = [n for n in source.walk() if isinstance(n, ast.FunctionDef) and n.name.startswith(operator)]
            body = [n for n in body if isinstance(n, ast.FunctionDef) and n.name in (operator, f"{operator}_")]
        found = {text for node in body for text in _compared(node)}
        if family == "a8w8_bpreshuffle" and "def gemm_a8w8_ASM" in source.text:
            found.add("asm")  # its int8 rows have an operator of their own, which asks for no libtype
        return frozenset(found) or None

    def _flydsl_patterns(self) -> tuple[str, ...]:
        """The regular expressions by which the tree reads FlyDSL kernels' names."""
        out: list[str] = []
        for path in self._files():
            source = self._lists.reader.source(path)
            if source is None or "flydsl_" not in source.text or "re." not in source.text:
                continue
            module = self._lists.module(path, "")
            values = [v for v in module.names.values() if isinstance(v, str)] if module else []
            out += [v for v in (*values, *_matched(source)) if re.match(r"\^?flydsl_.*[\\(]", v)]
        return tuple(dict.fromkeys(out))

    def _moe_names(self, gfx: str) -> tuple[dict[str, Any], str]:
        """(fmoe's FlyDSL kernels by name, the expression for what may follow a name)."""
        module = self._lists.module(self._package / "ops" / "flydsl" / "moe_kernels.py", gfx)
        if module is None:
            return {}, ""
        found, ending = module.names.get(_MOE_LIST), module.names.get("_SUFFIX_RE")
        return found if isinstance(found, dict) else {}, ending if isinstance(ending, str) else ""

    def reads_flydsl(self, name: str, gfx: str) -> bool:
        """Whether a FlyDSL kernel's name is one that the tree can make a kernel of."""
        if name.startswith("flydsl_moe"):
            known, ending = self.moe_names(gfx)
            if name in known or (ending and re.sub(ending, "", name) in known):
                return True
        return self._mxmoe(name) or any(re.match(p, name) for p in self.flydsl_patterns())

    def _mxmoe(self, name: str) -> bool:
        """A name of the form `flydsl_mxmoe_g1_a4w4_<tile>[_flag...]`, with flags that the tree knows."""
        module = self._lists.module(self._package / "ops" / "flydsl" / "mxfp4_kname.py", "")
        named = module.names if module else {}
        numbers, prefixes = named.get("_MXMOE_NUMERIC_TOKENS"), named.get("_MXMOE_PREFIX")
        if not isinstance(numbers, dict) or not isinstance(prefixes, dict):
            return False
        for stage, prefix in prefixes.items():
            flags = named.get(f"_MXMOE_G{stage}_FLAG_TOKENS")
            if not name.startswith(str(prefix)) or not isinstance(flags, set):
                continue
            words = [w.upper() for w in name.removeprefix(str(prefix)).split("_") if w]
            return all(
                w in flags or re.fullmatch(r"\d+X\d+X\d+", w) or w.rstrip("0123456789") in numbers for w in words
            )
        return False

    def speaks_of(self, file: str, word: str) -> bool:
        """Whether a file of the package has this word."""
        source = self._lists.reader.source(self._package / file)
        return source is not None and word in source.text

    def _files(self) -> Iterator[Path]:
        for pattern in _FLYDSL_FILES:
            yield from sorted(p for p in self._package.glob(pattern) if pattern != _A8W8 or p.is_file())


def _compared(tree: ast.AST) -> Iterator[str]:
    """Texts that libtype is compared with, and the keys of a dictionary that it chooses from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and "libtype" in ast.unparse(node.left):
            for right in node.comparators:
                yield from (
                    c.value for c in ast.walk(right) if isinstance(c, ast.Constant) and isinstance(c.value, str)
                )
        elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "solMap" for t in node.targets):
            keys = node.value.keys if isinstance(node.value, ast.Dict) else []
            yield from (k.value for k in keys if isinstance(k, ast.Constant) and isinstance(k.value, str))


def _matched(source: SourceFile) -> Iterator[str]:
    """Expressions that are written where they are used: `re.match(r"...", name)`."""
    for node in source.walk():
        if called(node) in ("match", "fullmatch") and isinstance(node, ast.Call) and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value
