"""Kernels of a tree of AITER by name, and for a tuned row whether its kernel loads there.

`KernelLists` reads lists of instances (CK, CK-Tile, opus, fmoe) and of ASM kernels, and the libtypes and FlyDSL names
that AITER's operators read, and judges rows by them. Built modules (`aiter/jit/<module>.so`) are searched as bytes for
the kernels' names.

**Reading the lists of instances runs code of the tree**: `list_child` imports AITER's own list modules in a process of
its own (`worker.foreign`), with 60 s and 2 GB. AITER itself, torch and the GPU are not touched.
"""

from __future__ import annotations

import ast
import csv
import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from worker.aiter_tree.list_child import ReadList, read_lists
from worker.aiter_tree.locate import DEFAULT_GFX, Tree, TreeFiles
from worker.families import FAMILIES, NULLS, backend_of
from worker.foreign.runner import ForeignCodeError, Limits, call
from worker.text import clean

LIMITS = Limits(seconds=60, memory=2 << 30)

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
_A8W8 = "ops/gemm_op_a8w8.py"
_MOE = "csrc/ck_gemm_moe_2stages_codegen/gemm_moe_ck2stages_common.py"
_OTHERS = {
    "two_stages": (_MOE, "two_stages"), "opus_moe": ("csrc/opus_moe/opus_moe_common.py", "opus_moe"),
    "flydsl_moe": ("aiter/ops/flydsl/moe_kernels.py", "flydsl"),
    "flydsl_mxmoe": ("aiter/ops/flydsl/mxfp4_kname.py", "flydsl"),
}  # fmt: skip
"""fmoe's lists: the file, and the function of `list_child` that reads it."""


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
    """A list as read. `by_name`: True if the code is made for a row's kernelName, not its kernelId. `refuses`: True if
    code generation stops at a kernel that the list lacks (since 7136b240e1) instead of skipping it."""

    file: str
    names: frozenset[str]
    by_id: Mapping[int, str] = field(default_factory=dict)
    by_name: bool = False
    refuses: bool = False


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


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


MAX_BYTES = 4 << 30

Standing = Literal["loads", "rebuild", "cannot", "unread", "compiled"]
_CK2STAGES = "moe_ck2stages_gemm"
_CHOSEN = re.compile(r"_Nswizzle[01]_|_[BF]16$")
"""Parts of the name of one of fmoe's CK kernels that every kernel may have either way."""


def _held(path: Path, wanted: frozenset[str]) -> frozenset[str] | None:
    """The wanted kernels that a built module holds; None where it is not built, or holds none (stripped). A name counts
    as a whole text, or in a C++ symbol, which has the name's length before it."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None
        with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            raw = {name: name.encode() for name in wanted}
            whole = (n for n, r in raw.items() if data.find(r + b"\0") >= 0 or data.find(b"%d%s" % (len(r), r)) >= 0)
            return frozenset(whole) or None
    except (OSError, ValueError):  # ValueError: an empty file
        return None


@dataclass(frozen=True, slots=True)
class KernelAvailability:
    """A row's kernel in a tree.

    `loads`, maybe after a `rebuild`. `compiled`: it loads if it is in the module that was built, by its name alone
    (`by_name`) or for this very shape; `in_module`: the built module holds its name, None where there is no module.
    `cannot`: nothing of AITER's loads it. `unread`: the list that would show it is not readable here.
    """

    standing: Standing
    why: str = ""
    by_name: bool = False
    in_module: bool | None = None
    opus: bool = False


_LOADS = KernelAvailability("loads")


def _cannot(why: str) -> KernelAvailability:
    return KernelAvailability("cannot", why)


def _no_name(name: str) -> KernelAvailability:
    return _cannot(f"{name[:120] or 'an empty name'} is not a kernel of this family")


class KernelLists:
    """The kernels of one tree. If a list cannot be read, it is None, and `problems` has a sentence about it."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._files = TreeFiles(tree)
        self.problems = self._files.problems
        self.instances = cache(self._instances)
        self.asm = cache(self._asm)
        self.libtypes = cache(self._libtypes)
        self._imported = cache(self._import_lists)
        self._patterns = cache(self._flydsl_patterns)
        self._built = cache(lambda module, wanted: _held(tree.package / "jit" / f"{module}.so", wanted))
        self._dispatched_by_name = cache(self.called_by_name)

    def _instances(self, family: str, backend: str, gfx: str) -> KernelList | None:
        """The list of a family's backend for a chip; empty if the tree has none, None if it could not be read."""
        place = PLACES[family, backend]
        path = self._file(place)
        if path is None:
            return KernelList("", frozenset())
        found = self._list(f"{family} {backend}", gfx)
        if found is None or not found.names:
            if found is not None:
                self._files.problem(f"{self._files.name(path)}: holds no list of kernels that can be read here")
            return None
        code = self._files.text(self.tree.meta / "csrc" / place.codegen)
        refuses = "bad_rows" in code + self._files.text(self.tree.package / "jit" / "utils" / "chip_info.py")
        names = frozenset(found.names)
        return KernelList(self._files.name(path), names, found.by_id, "kernels_by_name=" in code, refuses)

    def _asm(self, family: str, gfx: str) -> frozenset[str]:
        """The ASM kernels of a family for a chip (of all chips where it is not known)."""
        out: set[str] = set()
        base = self.tree.meta / "hsa"
        for folder in ASM.get(family, ()):
            for path in sorted(base.glob(f"{gfx or '*'}/{folder}/**/*.csv")):
                kept = any(path.parent.glob("*.co"))
                for row in csv.DictReader(self._files.text(path).splitlines(), skipinitialspace=True):
                    code = (row.get("co_name") or "").strip()
                    if not kept or not code or (path.parent / code).is_file():
                        out.add((row.get("knl_name") or "").strip())
        return frozenset(out - {""})

    def reads_flydsl(self, name: str, gfx: str) -> bool:
        """True if the tree can make a kernel of a FlyDSL name."""
        if name.startswith("flydsl_moe"):
            tables = self._flydsl_tables("flydsl_moe", gfx)
            known, ending = tables.get("_KERNEL_PARAMS", ()), tables.get("_SUFFIX_RE", "")
            if name in known or (isinstance(ending, str) and _is_pattern(ending) and re.sub(ending, "", name) in known):
                return True
        return self._mxmoe(name) or any(re.match(p, name) for p in self._patterns())

    def called_by_name(self, family: str) -> bool:
        """True if the operator calls a compiled kernel by its name (some do since 7136b240e1), not by the shape."""
        folder = self.tree.meta / "csrc" / f"ck_gemm_{family}"
        return any(
            "is not present in the compiled registry" in self._files.text(p) for p in sorted(folder.glob("*.cu"))
        )

    def _libtypes(self, family: str) -> frozenset[str] | None:
        """The libtypes that the family's operator compares with; None where it has none, or cannot be read."""
        if family not in OPERATORS:
            return None
        file, name, of_asm = OPERATORS[family]
        text = self._files.text(self.tree.package / file)
        nodes = list(ast.walk(_parsed(text) or ast.Module([], [])))
        inside = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name in (name, f"{name}_")]
        found = {word for node in (inside if name else nodes[:1]) for word in _compared(node)}
        if of_asm and f"def {of_asm}" in text:
            found.add("asm")
        return frozenset(found) or None

    def _flydsl_patterns(self) -> tuple[str, ...]:
        """The regular expressions by which the tree reads FlyDSL kernels' names: those that are written down whole, and
        those that a file puts together when it is imported."""
        made = (read.names for name, read in self._imported(DEFAULT_GFX).items() if name.startswith("patterns "))
        texts = map(self._files.text, (*self._flydsl_files(), self.tree.package / _A8W8))
        nodes = (n for text in texts for n in ast.walk(_parsed(text) or ast.Module([], [])))
        whole = (n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))
        found = [*whole, *(p for names in made for p in names)]
        return tuple(dict.fromkeys(v for v in found if re.match(r"\^?flydsl_\S*[\\(]\S*$", v) and _is_pattern(v)))

    def _mxmoe(self, name: str) -> bool:
        """A name of the form `flydsl_mxmoe_g1_a4w4_<tile>[_flag...]`, with flags that the tree knows."""
        tables = self._flydsl_tables("flydsl_mxmoe", "")
        prefixes = tables.get("_MXMOE_PREFIX")
        for stage, prefix in prefixes.items() if isinstance(prefixes, dict) else ():
            flags, numbers = tables.get(f"_MXMOE_G{stage}_FLAG_TOKENS", ()), tables.get("_MXMOE_NUMERIC_TOKENS", ())
            if name.startswith(prefix):
                words = [w.upper() for w in name.removeprefix(prefix).split("_") if w]
                return all(
                    w in flags or re.fullmatch(r"\d+X\d+X\d+", w) or w.rstrip("0123456789") in numbers for w in words
                )
        return False

    def _flydsl_tables(self, name: str, gfx: str) -> Mapping[str, str | list[str] | dict[str, str]]:
        found = self._list(name, gfx)
        return found.tables if found else {}

    def _names(self, name: str, gfx: str) -> Sequence[str]:
        found = self._list(name, gfx)
        return found.names if found else ()

    def _list(self, name: str, gfx: str) -> ReadList | None:
        """A list as read for a chip; None if it does not exist or cannot be read."""
        found = self._imported(gfx or DEFAULT_GFX).get(name)
        if found is None or not found.error:
            return found
        file = self._files.name(Path(self._asked[name][1]))
        self._files.problem(f"{file} cannot be imported: {clean(found.error, 300)}")
        return None

    @cached_property
    def _asked(self) -> dict[str, list[Any]]:
        """Questions to `read_lists`: name -> reader, file, and more arguments."""
        asked: dict[str, list[Any]] = {}
        for (family, backend), place in PLACES.items():
            if path := self._file(place):
                asked[f"{family} {backend}"] = ["instances", str(path), list(place.names)]
        for name, (file, reader) in _OTHERS.items():
            path = (self.tree.package.parent if file.startswith("aiter/") else self.tree.meta) / file
            if path.is_file():
                asked[name] = [reader, str(path)]
        return asked | {f"patterns {path.name}": ["patterns", str(path)] for path in self._flydsl_files()}

    def _import_lists(self, gfx: str) -> dict[str, ReadList]:
        try:
            return call(read_lists, self.tree.package, gfx, self._asked, limits=LIMITS)
        except (OSError, ForeignCodeError) as e:
            return dict.fromkeys(self._asked, ReadList(error=f"the process that reads its lists {e}"))

    def _flydsl_files(self) -> list[Path]:
        """Files that read names of FlyDSL kernels."""
        files = sorted((self.tree.package / "ops" / "flydsl").glob("*.py"))
        return [p for p in files if "flydsl_" in self._files.text(p) and "re.compile(" in self._files.text(p)]

    def _file(self, place: ListPlace) -> Path | None:
        paths = (self.tree.meta / "csrc" / f for f in place.files)
        return next((p for p in paths if p.is_file()), None)

    def kernel(self, family: str, gfx: str, row: Mapping[str, str]) -> KernelAvailability:
        """The kernel of a row for the chip that the row is of ("": not known, so any chip's kernels count)."""
        if FAMILIES[family].two_stages:
            stages = (row.get(n, "") for n in ("kernelName1", "kernelName2"))
            found = [self._stage(family, gfx, name) for name in stages if name not in NULLS]
            order: tuple[Standing, ...] = ("cannot", "unread", "compiled", "loads")
            return min(found, key=lambda k: order.index(k.standing), default=_cannot("names no kernel"))
        name = row.get("kernelName", "")
        libtypes = self.libtypes(family)
        libtype = row.get("libtype", "").lower()
        if libtypes is not None and libtype and libtype not in libtypes and libtype not in NULLS:
            return _cannot(f"its operator knows no libtype {libtype[:40]} ({', '.join(sorted(libtypes))})")
        backend = backend_of(family, row)
        if backend in ("triton", "torch", "skinny", "hipblaslt"):
            return _LOADS if libtypes and backend in libtypes else _no_name(name)
        if backend == "flydsl":
            known = self.reads_flydsl(name, gfx)
            return _LOADS if known else _cannot(f"no FlyDSL kernel of the tree is called {name[:120]}")
        if backend == "asm":
            return self._asm_kernel(family, gfx, name)
        return self._instance(family, backend, gfx, row) if (family, backend) in PLACES else _no_name(name)

    def _asm_kernel(self, family: str, gfx: str, name: str) -> KernelAvailability:
        if name in self.asm(family, gfx):
            return _LOADS
        where = " and ".join(f"hsa/{gfx or '*'}/{folder}" for folder in ASM.get(family, ()))
        return _cannot(f"no list of {where} has an ASM kernel {name[:120]}") if where else _no_name(name)

    def _instance(self, family: str, backend: str, gfx: str, row: Mapping[str, str]) -> KernelAvailability:
        found = self.instances(family, backend, gfx)
        if found is None:
            return KernelAvailability("unread", f"the list of {backend} kernels cannot be read")
        place, name, number = PLACES[family, backend], row.get("kernelName", ""), row.get("kernelId", "")
        numbered = found.by_id.get(int(number) if number.isdigit() else -1, "none")
        if place.whole:
            why = f"AITER calls the kernel of kernelId {number[:20]} here: {numbered[:120]}"
            return _LOADS if numbered == name else _cannot(why)
        if name not in found.names:
            ends = ": a build with this row in the table stops with an error" if found.refuses else ""
            return _cannot(f"{found.file or 'the tree'} lists no kernel {name[:120]}{ends}")
        opus = backend == "opus"
        if not (opus or found.by_name) and number.isdigit() and numbered != name:
            return _cannot(f"AITER compiles the kernel of kernelId {number} here, which is {numbered[:120]}")
        held, by_name = self._built(place.module, found.names), opus or self._dispatched_by_name(family)
        return KernelAvailability("compiled", "", by_name, None if held is None else name in held, opus)

    def _stage(self, family: str, gfx: str, name: str) -> KernelAvailability:
        """One stage of fmoe. Its CK modules are built at first use with every kernel of a combination of types."""
        backend = backend_of(family, {"kernelName": name})
        if name.startswith(_CK2STAGES):
            plain = _CHOSEN.sub(lambda m: "_Nswizzle0_" if m[0].endswith("_") else "_B16", name)
            listed = plain in self._names("two_stages", gfx)
            return _LOADS if listed else _cannot(f"no list of fmoe's CK kernels has {name[:160]}")
        if backend == "asm":
            return self._asm_kernel(family, gfx, name)
        # a cktile name is a label: block size and types choose the kernel
        known = (
            (backend == "flydsl" and self.reads_flydsl(name, gfx))
            or ("cktile" in name and "cktile_moe_stage1" in self._files.text(self.tree.package / "fused_moe.py"))
            or name.replace("opus_moe2_layout_", "opus_moe2_") in self._names("opus_moe", "")
        )
        return _LOADS if known else _cannot(f"fmoe's operator knows no kernel {name[:160]}")
