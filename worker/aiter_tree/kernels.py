"""Availability of a tuned row's kernel in a tree of AITER: loaded, compiled from tables, or impossible.

Built modules (`aiter/jit/<module>.so`) are searched as bytes for the kernels' names.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from worker.aiter_tree.kernel_lists import ASM, PLACES, KernelList, KernelLists
from worker.aiter_tree.locate import Tree
from worker.families import FAMILIES, backend_of

MAX_BYTES = 4 << 30

Standing = Literal["there", "compiled", "cannot", "unread"]
NULLS = frozenset(("", "Null", "null", "NULL", "NaN", "nan", "None"))
_CK2STAGES = "moe_ck2stages_gemm"
_CHOSEN = re.compile(r"_Nswizzle[01]_|_[BF]16$")
"""Parts of the name of one of fmoe's CK kernels that every kernel may have either way."""


class Built:
    """The built modules of a package."""

    def __init__(self, package: Path) -> None:
        self._folder = package / "jit"
        self.names = cache(self._names)

    def _names(self, module: str, wanted: frozenset[str]) -> frozenset[str] | None:
        """The wanted kernels that the module holds; None where it is not built, or holds none (stripped)."""
        path = self._folder / f"{module}.so"
        try:
            size = path.stat().st_size
            if not path.is_file() or not 0 < size <= MAX_BYTES:
                return None
            with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return frozenset(_held(data, wanted)) or None
        except OSError:
            return None


def _held(data: mmap.mmap, wanted: Iterable[str]) -> Iterable[str]:
    """Names found as a whole text, or in a C++ symbol, which has the name's length before it."""
    for name in wanted:
        raw = name.encode()
        if data.find(raw + b"\0") >= 0 or data.find(str(len(raw)).encode() + raw) >= 0:
            yield name


@dataclass(frozen=True, slots=True)
class KernelAvailability:
    """A row's kernel in a tree.

    `there`: it loads. `compiled`: it loads if it is in the module that was built, by its name alone (`by_name`) or
    for this very shape; `in_module`: the built module holds its name, None where there is no module.
    `cannot`: nothing of AITER's loads it. `unread`: the list that would show it is not readable here.
    """

    standing: Standing
    why: str = ""
    by_name: bool = False
    in_module: bool | None = None
    opus: bool = False


_THERE = KernelAvailability("there")


class KernelReader:
    """The kernels of one tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._lists = KernelLists(tree)
        self._built = Built(tree.package)
        self._dispatched_by_name = cache(self._lists.called_by_name)

    @property
    def problems(self) -> tuple[str, ...]:
        """Sentences about what could not be read."""
        return tuple(self._lists.problems)

    def kernel(self, family: str, gfx: str, row: Mapping[str, str]) -> KernelAvailability:
        """The kernel of a row for the chip that the row is of ("": not known, so any chip's kernels count)."""
        if FAMILIES[family].two_stages:
            stages = [(n, row.get(n, "")) for n in ("kernelName1", "kernelName2")]
            found = [self._stage(family, gfx, name) for _, name in stages if name not in NULLS]
            order: tuple[Standing, ...] = ("cannot", "unread", "compiled", "there")
            return min(
                found, key=lambda k: order.index(k.standing), default=KernelAvailability("cannot", "names no kernel")
            )
        name = row.get("kernelName", "")
        libtypes = self._lists.libtypes(family)
        libtype = row.get("libtype", "").lower()
        if libtypes is not None and libtype and libtype not in libtypes and libtype not in NULLS:
            return KernelAvailability(
                "cannot", f"its operator knows no libtype {libtype[:40]} ({', '.join(sorted(libtypes))})"
            )
        backend = backend_of(family, row)
        if backend in ("triton", "torch", "skinny", "hipblaslt"):
            return _THERE if libtypes and backend in libtypes else self._no_name(name)
        if backend == "flydsl":
            known = self._lists.reads_flydsl(name, gfx)
            return (
                _THERE
                if known
                else KernelAvailability("cannot", f"no FlyDSL kernel of the tree is called {name[:120]}")
            )
        if backend == "asm":
            return self._asm(family, gfx, name)
        if (family, backend) in PLACES:
            return self._instance(family, backend, gfx, name, row)
        return self._no_name(name)

    def _no_name(self, name: str) -> KernelAvailability:
        return KernelAvailability("cannot", f"{name[:120] or 'an empty name'} is no kernel of this family")

    def _asm(self, family: str, gfx: str, name: str) -> KernelAvailability:
        known = self._lists.asm(family, gfx)
        if name in known:
            return _THERE
        if not ASM.get(family):
            return self._no_name(name)
        where = " and ".join(f"hsa/{gfx or '*'}/{folder}" for folder in ASM[family])
        return KernelAvailability("cannot", f"no list of {where} has an ASM kernel {name[:120]}")

    def _instance(self, family: str, backend: str, gfx: str, name: str, row: Mapping[str, str]) -> KernelAvailability:
        found = self._lists.instances(family, backend, gfx)
        if found is None:
            return KernelAvailability("unread", f"the list of {backend} kernels cannot be read")
        number = row.get("kernelId", "")
        if PLACES[family, backend].whole:
            there = found.by_id.get(int(number) if number.isdigit() else -1, "none")
            if there == name:
                return _THERE
            return KernelAvailability("cannot", f"AITER calls the kernel of kernelId {number[:20]} here: {there[:120]}")
        if backend == "opus":
            if name not in found.names:
                return KernelAvailability("cannot", f"{found.file or 'the tree'} lists no opus kernel {name[:120]}")
            return self._to_compile(family, backend, found, name)
        if name not in found.names:
            return KernelAvailability("cannot", _missing(found, backend, name))
        if not found.by_name and number.isdigit() and found.by_id.get(int(number)) != name:
            other = found.by_id.get(int(number), "")
            what = f"is {other[:120]}" if other else "is none"
            return KernelAvailability("cannot", f"AITER compiles the kernel of kernelId {number} here, which {what}")
        return self._to_compile(family, backend, found, name)

    def _to_compile(self, family: str, backend: str, found: KernelList, name: str) -> KernelAvailability:
        held = self._built.names(PLACES[family, backend].module, found.names)
        by_name = backend == "opus" or self._dispatched_by_name(family)
        return KernelAvailability("compiled", "", by_name, None if held is None else name in held, backend == "opus")

    def _stage(self, family: str, gfx: str, name: str) -> KernelAvailability:
        """One stage of fmoe. Its CK modules are built at first use with every kernel of a combination of types."""
        backend = backend_of(family, {"kernelName": name})
        if name.startswith(_CK2STAGES):
            plain = _CHOSEN.sub(lambda m: "_Nswizzle0_" if m[0].endswith("_") else "_B16", name)
            return (
                _THERE
                if plain in self._lists.stages(gfx)
                else KernelAvailability("cannot", f"no list of fmoe's CK kernels has {name[:160]}")
            )
        if backend == "asm":
            return self._asm(family, gfx, name)
        if backend == "flydsl" and self._lists.reads_flydsl(name, gfx):
            return _THERE
        if "cktile" in name and self._lists.speaks_of("fused_moe.py", "cktile_moe_stage1"):
            return _THERE  # a label: block size and types choose the kernel
        if name.replace("opus_moe2_layout_", "opus_moe2_") in self._lists.opus_moe():
            return _THERE
        return KernelAvailability("cannot", f"fmoe's operator knows no kernel {name[:160]}")


def _missing(found: KernelList, backend: str, name: str) -> str:
    where = found.file or f"no list of {backend} kernels is there, and none"
    text = f"{where} has no kernel {name[:120]}" if not found.file else f"{where} lists no kernel {name[:120]}"
    return text + (": a build with this row in the table stops with an error" if found.refuses else "")
