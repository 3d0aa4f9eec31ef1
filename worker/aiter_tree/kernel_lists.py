"""The lists of kernels that a tree of AITER has, read from its files: which kernels its CK, CK-Tile, opus and ASM
backends know for a family and a chip, which libtypes its operators take, and which names of FlyDSL kernels it reads.

`KernelLists` of a tree reads each list once, when it is asked for. `kernels.py` judges rows of tuned tables by them.
A new list of instances is a line of `PLACES`, a new folder of ASM kernels one of `ASM`.

**Reading the lists of instances runs code of the tree**: `import_lists.py` imports AITER's own list modules in a
process of its own (`worker.foreign`), with 60 s and 2 GB. AITER itself, torch and the GPU are not touched. Everything
else is read as text, and built modules (`aiter/jit/<module>.so`) are searched as bytes for the kernels' names.
"""

from __future__ import annotations

import ast
import csv
import mmap
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from worker.aiter_tree.import_lists import ReadList, read_lists
from worker.aiter_tree.locate import DEFAULT_GFX, Tree, TreeFiles
from worker.foreign.runner import ForeignCodeError, Limits, call
from worker.text import clean

LIMITS = Limits(seconds=60, memory=2 << 30)
MAX_MODULE_BYTES = 4 << 30
"""A larger built module is not searched."""
ASM: Mapping[str, tuple[str, ...]] = {
    "a4w4_blockscale": ("f4gemm",),
    "a8w8_bpreshuffle": ("i8gemm",),
    "a8w8_blockscale_bpreshuffle": ("fp8gemm_blockscale",),
    "a16w16": ("bf16gemm",),
    "fmoe": ("fmoe", "fmoe_2stages"),
}
"""Folders below hsa/<gfx>/ with a family's ASM kernels and their lists."""
_A8W8 = "ops/gemm_op_a8w8.py"
_MOE = "csrc/ck_gemm_moe_2stages_codegen/gemm_moe_ck2stages_common.py"
_MOE_LISTS = {
    "two_stages": (_MOE, "two_stages"), "opus_moe": ("csrc/opus_moe/opus_moe_common.py", "opus_moe"),
    "flydsl_moe": ("aiter/ops/flydsl/moe_kernels.py", "flydsl"),
    "flydsl_mxmoe": ("aiter/ops/flydsl/mxfp4_kname.py", "flydsl"),
}  # fmt: skip
"""fmoe's lists: the file, and the function of `import_lists` that reads it."""
OPERATORS: Mapping[str, tuple[str, str, str]] = {
    "a16w16": ("tuned_gemm.py", "", ""),
    "a8w8_bpreshuffle": (_A8W8, "gemm_a8w8_bpreshuffle", "gemm_a8w8_ASM"),
    "a8w8_blockscale": (_A8W8, "gemm_a8w8_blockscale", ""),
    "a8w8_blockscale_bpreshuffle": (_A8W8, "gemm_a8w8_blockscale_bpreshuffle", ""),
    "batched_gemm_a8w8_blockscale_mxscale": (
        "ops/batched_gemm_op_a8w8.py", "_batched_gemm_a8w8_mxscale_impl", "",
    ),
}  # fmt: skip
"""Operators of rows with a libtype: the file below aiter/, its name there ("": the whole file), and one of the ASM
rows alone that reads no libtype, if any."""


@dataclass(frozen=True, slots=True)
class ListPlace:
    """The place of a list of instances in a tree."""

    files: tuple[str, ...]
    """The files below csrc/ that may hold it; the first that is there counts."""
    names: tuple[str, ...]
    """The names that its dictionary may have there."""
    codegen: str
    """The file below csrc/ that makes code of it."""
    module: str
    """The module that is built of that code."""
    whole: bool = False
    """All of it is compiled, whatever tables hold, and a row's kernelId is what is called."""


_LIST = ("candidate_kernels_dict", "kernels_list")
_BLOCKSCALE = "ck_gemm_a8w8_blockscale/gemm_a8w8_blockscale"
_BLOCKSCALE_TILE = (
    ("ck_gemm_a8w8_blockscale/gemm_a8w8_blockscale_cktile_instance.py",),
    ("candidate_kernels_cktile_dict", "kernels_list"),
    "ck_gemm_a8w8_blockscale/gen_instances_cktile.py",
)
_OPUS = ListPlace(("opus_gemm/opus_gemm_common.py",), (), "opus_gemm/gen_instances.py", "module_deepgemm_opus")


def _ck(folder: str, stem: str) -> ListPlace:
    return ListPlace((f"{folder}/{stem}_common.py",), _LIST, f"{folder}/gen_instances.py", f"module_{stem}")


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
MODULES = tuple(dict.fromkeys(place.module for place in PLACES.values()))
"""The modules that are compiled from tuned tables, as AITER calls them."""


@dataclass(frozen=True, slots=True)
class KernelList:
    """A list of instances as read."""

    file: str
    """Its path in the tree; "" if the tree has no such list."""
    names: frozenset[str]
    by_id: Mapping[int, str] = field(default_factory=dict)
    """Names by the number that a row's kernelId gives."""
    by_name: bool = False
    """Code is made for a row's kernelName, not its kernelId."""
    refuses: bool = False
    """Code generation stops at a kernel that the list lacks (since 7136b240e1) instead of skipping it."""


class KernelLists:
    """The lists of one tree. If a list cannot be read, it is None or empty, and `problems` has a sentence about it."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.files = TreeFiles(tree)
        self.problems = self.files.problems
        # each list is read once
        self.instances = cache(self._read_instances)
        self.asm = cache(self._read_asm)
        self.libtypes = cache(self._read_libtypes)
        self.calls_by_name = cache(self._read_calls_by_name)
        self.built_kernels = cache(self._search_module)
        self._imported = cache(self._import_lists)

    def _read_instances(self, family: str, backend: str, gfx: str) -> KernelList | None:
        """The list of a family's backend for a chip; an empty one if the tree has none, None if it cannot be read."""
        place = PLACES[family, backend]
        path = self._file_of(place)
        if path is None:
            return KernelList("", frozenset())
        read_list = self._imported_list(f"{family} {backend}", gfx)
        if read_list is None:
            return None
        if not read_list.names:
            self.files.problem(f"{self.files.name(path)}: holds no list of kernels that can be read here")
            return None
        code = self.files.text(self.tree.meta / "csrc" / place.codegen)
        chip_info = self.files.text(self.tree.package / "jit" / "utils" / "chip_info.py")
        return KernelList(
            self.files.name(path),
            frozenset(read_list.names),
            read_list.by_id,
            by_name="kernels_by_name=" in code,
            refuses="bad_rows" in code or "bad_rows" in chip_info,
        )

    def _read_asm(self, family: str, gfx: str) -> frozenset[str]:
        """The ASM kernels of a family for a chip ("": of all chips)."""
        names: set[str] = set()
        for folder in ASM.get(family, ()):
            for path in sorted((self.tree.meta / "hsa").glob(f"{gfx or '*'}/{folder}/**/*.csv")):
                names |= self._asm_names(path)
        return frozenset(names - {""})

    def _asm_names(self, path: Path) -> set[str]:
        """The kernels of one list. A kernel whose code object is missing does not count, if the folder has others."""
        has_code_objects = any(path.parent.glob("*.co"))
        names: set[str] = set()
        for row in csv.DictReader(self.files.text(path).splitlines(), skipinitialspace=True):
            code_object = (row.get("co_name") or "").strip()
            if not has_code_objects or not code_object or (path.parent / code_object).is_file():
                names.add((row.get("knl_name") or "").strip())
        return names

    def _read_libtypes(self, family: str) -> frozenset[str] | None:
        """The libtypes that the family's operator compares with; None where it has none, or cannot be read."""
        if family not in OPERATORS:
            return None
        file, name, asm_operator = OPERATORS[family]
        text = self.files.text(self.tree.package / file)
        module = _parse(text)
        operators: list[ast.AST] = [module]
        if name:
            functions = (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef))
            operators = [function for function in functions if function.name in (name, f"{name}_")]
        libtypes = {libtype for operator in operators for libtype in _compared_libtypes(operator)}
        if asm_operator and f"def {asm_operator}" in text:
            libtypes.add("asm")
        return frozenset(libtypes) or None

    def _read_calls_by_name(self, family: str) -> bool:
        """True if the operator calls a compiled kernel by its name (some do since 7136b240e1), not by the shape."""
        sources = sorted((self.tree.meta / "csrc" / f"ck_gemm_{family}").glob("*.cu"))
        return any("is not present in the compiled registry" in self.files.text(source) for source in sources)

    def _search_module(self, module: str, wanted: frozenset[str]) -> frozenset[str] | None:
        """The wanted kernels that a built module holds; None if it is not built, or holds none (stripped)."""
        path = self.tree.package / "jit" / f"{module}.so"
        try:
            if not path.is_file() or path.stat().st_size > MAX_MODULE_BYTES:
                return None
            with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return frozenset(name for name in wanted if _holds_name(data, name.encode())) or None
        except (OSError, ValueError):  # ValueError: an empty file
            return None

    def names(self, name: str, gfx: str) -> Sequence[str]:
        """The names in one of fmoe's lists (`two_stages`, `opus_moe`); none if it cannot be read."""
        read_list = self._imported_list(name, gfx)
        return read_list.names if read_list else ()

    def reads_flydsl(self, name: str, gfx: str) -> bool:
        """True if the tree can make a kernel of a FlyDSL name."""
        return (
            (name.startswith("flydsl_moe") and self._is_moe_name(name, gfx))
            or self._is_mxmoe_name(name)
            or any(re.match(pattern, name) for pattern in self._flydsl_patterns)
        )

    def _is_moe_name(self, name: str, gfx: str) -> bool:
        """True for a name among _KERNEL_PARAMS, or one that is without its ending."""
        tables = self._flydsl_tables("flydsl_moe", gfx)
        known = tables.get("_KERNEL_PARAMS", ())
        ending = tables.get("_SUFFIX_RE", "")
        if name in known:
            return True
        return isinstance(ending, str) and _is_pattern(ending) and re.sub(ending, "", name) in known

    def _is_mxmoe_name(self, name: str) -> bool:
        """True for a name of the form `flydsl_mxmoe_g1_a4w4_<tile>[_flag...]`, with flags that the tree knows."""
        tables = self._flydsl_tables("flydsl_mxmoe", "")
        prefixes = tables.get("_MXMOE_PREFIX")
        numbered_flags = tables.get("_MXMOE_NUMERIC_TOKENS", ())
        for stage, prefix in prefixes.items() if isinstance(prefixes, dict) else ():
            if not name.startswith(prefix):
                continue
            flags = tables.get(f"_MXMOE_G{stage}_FLAG_TOKENS", ())
            words = [word.upper() for word in name.removeprefix(prefix).split("_") if word]
            return all(
                word in flags or re.fullmatch(r"\d+X\d+X\d+", word) or word.rstrip("0123456789") in numbered_flags
                for word in words
            )
        return False

    @cached_property
    def _flydsl_patterns(self) -> tuple[str, ...]:
        """The regular expressions by which the tree reads FlyDSL kernels' names: those that are written down whole, and
        those that a file puts together when it is imported."""
        patterns: list[str] = []
        for path in (*self._flydsl_files, self.tree.package / _A8W8):
            for node in ast.walk(_parse(self.files.text(path))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    patterns.append(node.value)
        for name, read_list in self._imported(DEFAULT_GFX).items():
            if name.startswith("patterns "):
                patterns += read_list.names
        return tuple(text for text in patterns if re.match(r"\^?flydsl_\S*[\\(]\S*$", text) and _is_pattern(text))

    def _flydsl_tables(self, name: str, gfx: str) -> Mapping[str, str | list[str] | dict[str, str]]:
        read_list = self._imported_list(name, gfx)
        return read_list.tables if read_list else {}

    @cached_property
    def _flydsl_files(self) -> list[Path]:
        """Files that read names of FlyDSL kernels."""
        files: list[Path] = []
        for path in sorted((self.tree.package / "ops" / "flydsl").glob("*.py")):
            text = self.files.text(path)
            if "flydsl_" in text and "re.compile(" in text:
                files.append(path)
        return files

    def _imported_list(self, name: str, gfx: str) -> ReadList | None:
        """A list as imported for a chip; None if it does not exist or cannot be imported."""
        read_list = self._imported(gfx or DEFAULT_GFX).get(name)
        if read_list is None or not read_list.error:
            return read_list
        file = self.files.name(Path(self._questions[name][1]))
        self.files.problem(f"{file} cannot be imported: {clean(read_list.error, 300)}")
        return None

    def _import_lists(self, gfx: str) -> dict[str, ReadList]:
        try:
            return call(read_lists, self.tree.package, gfx, self._questions, limits=LIMITS)
        except (OSError, ForeignCodeError) as e:
            return dict.fromkeys(self._questions, ReadList(error=f"the process that reads its lists {e}"))

    @cached_property
    def _questions(self) -> dict[str, list[Any]]:
        """The questions to `read_lists`: the name of each list -> its reader, its file, and the reader's arguments."""
        questions: dict[str, list[Any]] = {}
        for (family, backend), place in PLACES.items():
            if path := self._file_of(place):
                questions[f"{family} {backend}"] = ["instances", str(path), list(place.names)]
        for name, (file, reader) in _MOE_LISTS.items():
            folder = self.tree.package.parent if file.startswith("aiter/") else self.tree.meta
            if (folder / file).is_file():
                questions[name] = [reader, str(folder / file)]
        for path in self._flydsl_files:
            questions[f"patterns {path.name}"] = ["patterns", str(path)]
        return questions

    def _file_of(self, place: ListPlace) -> Path | None:
        paths = (self.tree.meta / "csrc" / file for file in place.files)
        return next((path for path in paths if path.is_file()), None)


def _holds_name(data: mmap.mmap, name: bytes) -> bool:
    """True if a module has a name as a whole text, or in a C++ symbol, which has the name's length before it."""
    return data.find(name + b"\0") >= 0 or data.find(b"%d%s" % (len(name), name)) >= 0


def _parse(text: str) -> ast.Module:
    """The syntax tree of a file of AITER's; an empty one if it is no Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _compared_libtypes(operator: ast.AST) -> Iterator[str]:
    """Texts that an operator compares libtype with, and the keys of a dictionary `solMap` that it chooses from."""
    for node in ast.walk(operator):
        if isinstance(node, ast.Compare) and "libtype" in ast.unparse(node.left):
            for right in node.comparators:
                yield from _texts_in(ast.walk(right))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and _assigns(node, "solMap"):
            yield from _texts_in(node.value.keys)


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def _texts_in(nodes: Iterable[ast.AST | None]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
