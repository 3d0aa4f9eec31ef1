"""Kernels of a tree of AITER by name: lists of instances (CK, CK-Tile, opus, fmoe) and of ASM kernels, and the libtypes
and FlyDSL names that its operators read.

Read from ROCm/aiter at v0.1.5 to e4048607a5 (2026-08-22). A list is read as data (`evaluate`); AITER is not imported.
"""

from __future__ import annotations

import ast
import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from worker.aiter_tree.evaluate import Module
from worker.aiter_tree.expressions import Instance, NoValueError
from worker.aiter_tree.locate import DEFAULT_GFX, Tree
from worker.aiter_tree.reading import SourceFile, TreeReader, called

_BLOCKSCALE = "ck_gemm_a8w8_blockscale/gemm_a8w8_blockscale"
_BLOCKSCALE_TILE = (
    ("ck_gemm_a8w8_blockscale/gemm_a8w8_blockscale_cktile_instance.py",),
    ("candidate_kernels_cktile_dict", "kernels_list"),
    "ck_gemm_a8w8_blockscale/gen_instances_cktile.py",
)
_LIST = ("candidate_kernels_dict", "kernels_list")
ASM: Mapping[str, tuple[str, ...]] = {
    "a4w4_blockscale": ("f4gemm",),
    "a8w8_bpreshuffle": ("i8gemm",),
    "a8w8_blockscale_bpreshuffle": ("fp8gemm_blockscale",),
    "a16w16": ("bf16gemm",),
    "fmoe": ("fmoe", "fmoe_2stages"),
}
"""Folders below hsa/<gfx>/ with a family's ASM kernels and their lists."""
_ENDING = re.compile(
    r"Nswizzle(?P<swizzle>\d)_Quant(?P<quant>\d+)_MulRoutedWeight(?P<routed>\d)"
    r"(?:_(?P<act>[a-z]+))?_(?P<a>[A-Z0-9]+)_(?P<b>[A-Z0-9]+)_(?P<c>[A-Z0-9]+)"
)
_A8W8 = "ops/gemm_op_a8w8.py"
_FLYDSL_FILES = ("ops/flydsl/*.py", _A8W8)
_MOE_LIST = "_KERNEL_PARAMS"


@dataclass(frozen=True, slots=True)
class Operator:
    """Operator of rows with a libtype: the file below aiter/, its name there ("": the whole file), and one of the ASM
    rows alone that reads no libtype, if any."""

    file: str
    name: str = ""
    of_asm: str = ""


OPERATORS = {
    "a16w16": Operator("tuned_gemm.py"),
    "a8w8_bpreshuffle": Operator(_A8W8, "gemm_a8w8_bpreshuffle", of_asm="gemm_a8w8_ASM"),
    "a8w8_blockscale": Operator(_A8W8, "gemm_a8w8_blockscale"),
    "a8w8_blockscale_bpreshuffle": Operator(_A8W8, "gemm_a8w8_blockscale_bpreshuffle"),
    "batched_gemm_a8w8_blockscale_mxscale": Operator("ops/batched_gemm_op_a8w8.py", "_batched_gemm_a8w8_mxscale_impl"),
}


@dataclass(frozen=True, slots=True)
class ListPlace:
    """Place of a list of instances: the files below csrc/ that may hold it (the first that is there counts), the
    dictionary's names (or those of a tuple of them), what makes code of it, and the module that is built. `whole`: all
    of it is compiled, whatever tables hold, and a row's kernelId is what is called."""

    files: tuple[str, ...]
    names: tuple[str, ...]
    codegen: str
    module: str
    whole: bool = False


def _ck(folder: str, stem: str) -> ListPlace:
    return ListPlace((f"{folder}/{stem}_common.py",), _LIST, f"{folder}/gen_instances.py", f"module_{stem}")


_OPUS = ListPlace(("opus_gemm/opus_gemm_common.py",), (), "opus_gemm/gen_instances.py", "module_deepgemm_opus")

PLACES: Mapping[tuple[str, str], ListPlace] = {
    ("a4w4_blockscale", "ck"): _ck("ck_gemm_a4w4_blockscale", "gemm_a4w4_blockscale"),
    ("a8w8", "ck"): _ck("ck_gemm_a8w8", "gemm_a8w8"),
    ("a8w8_blockscale", "ck"): ListPlace(
        (f"{_BLOCKSCALE}_instance.py", f"{_BLOCKSCALE}_common.py"), _LIST,
        "ck_gemm_a8w8_blockscale/gen_instances.py", "module_gemm_a8w8_blockscale",
    ),
    ("a8w8_blockscale", "cktile"): ListPlace(*_BLOCKSCALE_TILE, "module_gemm_a8w8_blockscale_cktile"),
    ("a8w8_blockscale_bpreshuffle", "ck"): _ck(
        "ck_gemm_a8w8_blockscale_bpreshuffle", "gemm_a8w8_blockscale_bpreshuffle"
    ),
    ("a8w8_blockscale_bpreshuffle", "cktile"): ListPlace(
        *_BLOCKSCALE_TILE, "module_gemm_a8w8_blockscale_bpreshuffle_cktile"
    ),
    ("a8w8_bpreshuffle", "ck"): _ck("ck_gemm_a8w8_bpreshuffle", "gemm_a8w8_bpreshuffle"),
    ("a8w8_bpreshuffle", "cktile"): _ck("cktile_gemm_a8w8_bpreshuffle", "gemm_a8w8_bpreshuffle_cktile"),
    ("batched_a8w8", "ck"): _ck("ck_batched_gemm_a8w8", "batched_gemm_a8w8"),
    ("batched_bf16", "ck"): _ck("ck_batched_gemm_bf16", "batched_gemm_bf16"),
    ("a8w8_blockscale_bpreshuffle", "opus"): _OPUS,
    ("a16w16", "opus"): _OPUS,
    ("batched_gemm_a8w8_blockscale_mxscale", "opus"): replace(
        _OPUS, names=("a8w8_mxscale_bmm_kernel_lists",), whole=True
    ),
}  # fmt: skip
"""(family, backend): its list. opus keeps one for all chips, in many dictionaries: any of them counts, but for the
batched products, whose numbers are their own."""
MODULES = tuple(dict.fromkeys(p.module for p in PLACES.values()))
"""The modules that are compiled from tuned tables, as AITER calls them."""


@dataclass(frozen=True, slots=True)
class KernelList:
    """A list as read. `by_name`: True if the code is made for a row's kernelName, not its kernelId."""

    file: str
    names: frozenset[str]
    by_id: Mapping[int, str] = field(default_factory=dict)
    by_name: bool = False
    refuses: bool = False
    """True if code generation stops at a kernel that the list lacks (since 7136b240e1) instead of skipping it."""


class KernelLists:
    """The lists of one tree. What cannot be read is a sentence in `problems`, and its list is None."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.reader = TreeReader(tree.root)
        self.problems: list[str] = []
        self.instances = cache(self._instances)
        self.asm = cache(self._asm)
        self.module = cache(self._module)
        self.ck2stages = cache(self._ck2stages)
        self.opus_moe = cache(self._opus_moe)

    def _instances(self, family: str, backend: str, gfx: str) -> KernelList | None:
        """The list of a family's backend for a chip; an empty one where the tree has none, None where it is unread."""
        place = PLACES[family, backend]
        paths = [self.tree.meta / "csrc" / f for f in place.files]
        path = next((p for p in paths if p.is_file()), None)
        if path is None:
            return KernelList("", frozenset())
        name = self.reader.name(path)
        module = self._module(path, gfx)
        found = [module.names.get(n) for n in place.names if n in module.names] if module else []
        kinds = found[:1] if place.names else list(module.names.values()) if module else []
        kinds = [one for kind in kinds for one in (kind if isinstance(kind, tuple) else (kind,))]
        by_id: dict[int, str] = {}
        names: set[str] = set()
        try:
            for kind in kinds:
                if module is None or not isinstance(kind, dict) or not kind:
                    continue
                if not all(isinstance(v, Instance) for v in kind.values()):
                    continue
                named = {k: str(module.attribute(v, "name")) for k, v in kind.items()}
                names |= set(named.values())
                by_id |= {k: v for k, v in named.items() if isinstance(k, int)}
        except NoValueError as e:
            self._problem(f"{name}: the names of its kernels cannot be read: {e}")
            return None
        if not names:
            self._problem(f"{name}: holds no list of kernels that can be read here")
            return None
        code = self._text(self.tree.meta / "csrc" / place.codegen)
        shared = self._text(self.tree.package / "jit" / "utils" / "chip_info.py")
        refuses = "bad_rows" in shared or "bad_rows" in code
        return KernelList(name, frozenset(names), by_id, "kernels_by_name=" in code, refuses)

    def _asm(self, family: str, gfx: str) -> frozenset[str]:
        """The ASM kernels of a family for a chip (of all chips where it is not known)."""
        out: set[str] = set()
        base = self.tree.meta / "hsa"
        for folder in ASM.get(family, ()):
            for path in sorted(base.glob(f"{gfx or '*'}/{folder}/**/*.csv")):
                source = self.reader.source(path)
                if source is None:
                    continue
                kept = any(path.parent.glob("*.co"))
                for row in csv.DictReader(source.text.splitlines(), skipinitialspace=True):
                    code = (row.get("co_name") or "").strip()
                    if not kept or not code or (path.parent / code).is_file():
                        out.add((row.get("knl_name") or "").strip())
        return frozenset(out - {""})

    def _module(self, path: Path, gfx: str) -> Module | None:
        source = self.reader.source(path)
        if source is None or source.tree is None:
            return None
        chip = gfx or DEFAULT_GFX
        given = {name: (lambda: chip) for name in ("get_gfx", "get_gfx_runtime", "get_rocm_arch")}
        return Module(source.tree, given)

    def _ck2stages(self, gfx: str, ending: str, stage: str) -> frozenset[str]:
        """fmoe's CK kernels of a stage for one combination of types, named by the `ending` of their names."""
        path = self.tree.meta / "csrc" / "ck_gemm_moe_2stages_codegen" / "gemm_moe_ck2stages_common.py"
        module = self.module(path, gfx)
        parts = _ENDING.fullmatch(ending)
        if module is None or parts is None:
            return frozenset()
        arguments: dict[str, Any] = {
            "Adtype": parts["a"], "Bdtype": parts["b"], "Cdtype": parts["c"], "Nswizzle": parts["swizzle"] == "1",
            "QuantType": int(parts["quant"]), "MulRoutedWeight": parts["routed"] == "1",
        }  # fmt: skip
        names: set[str] = set()
        for switches in ({}, {"preshuffle": True}, {"splitk": True}, {"preshuffle": True, "splitk": True}):
            act = {"ActOP": parts["act"]} if stage == "1" and parts["act"] else {}
            try:
                _, kernels = module.call(f"get_gemm{stage}_kernels_list", **arguments, **act, **switches)
                names |= {str(module.attribute(k, "name")) for k in kernels.values()}
            except (NoValueError, TypeError, ValueError, AttributeError, LookupError):
                continue
        return frozenset(names)

    def _opus_moe(self) -> frozenset[str]:
        """fmoe's opus kernels."""
        module = self.module(self.tree.meta / "csrc" / "opus_moe" / "opus_moe_common.py", "")
        kinds = [v for v in module.names.values() if isinstance(v, dict)] if module else []
        out: set[str] = set()
        for one in (v for kind in kinds for v in kind.values() if isinstance(v, Instance)):
            for word in ("name", "profile_name"):
                try:
                    out.add(str(module.attribute(one, word)) if module else "")
                except NoValueError:
                    continue
        return frozenset(out)

    def _text(self, path: Path) -> str:
        source = self.reader.source(path)
        return source.text if source else ""

    def _problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)


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
        operator = OPERATORS.get(family)
        source = self._lists.reader.source(self._package / operator.file) if operator else None
        if operator is None or source is None or source.tree is None:
            return None
        body: list[ast.AST] = [source.tree]
        if operator.name:
            names = (operator.name, f"{operator.name}_")
            body = [n for n in source.walk() if isinstance(n, ast.FunctionDef) and n.name in names]
        found = {text for node in body for text in _compared(node)}
        if operator.of_asm and f"def {operator.of_asm}" in source.text:
            found.add("asm")
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
        """True if the tree can make a kernel of a FlyDSL name."""
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
        """True if a file of the package has this word."""
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
