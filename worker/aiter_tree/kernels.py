"""Judges whether the kernel of a tuned row loads in a tree of AITER, by the tree's lists (`kernel_lists.py`).

`availability` asks in the order in which AITER's dispatch does: the libtype, the backend that it or the kernel's name
stands for, and then the list of that backend. `orchestrator/tables/aiter_build.py` goes on from there for kernels that
are compiled from tuned tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from worker.aiter_tree.kernel_lists import ASM, PLACES, KernelLists
from worker.families import FAMILIES, NULLS, backend_of

Standing = Literal["loads", "rebuild", "cannot", "unread", "compiled"]
MAX_NAME = 120
"""Most characters of a kernel's name in a sentence."""
_IN_PYTHON = ("triton", "torch", "skinny", "hipblaslt")
"""Backends of which AITER has no list: its operators call them for a libtype."""
_CK2STAGES = "moe_ck2stages_gemm"
"""The names of fmoe's CK kernels begin so."""
_CHOSEN = re.compile(r"_Nswizzle[01]_|_[BF]16$")
"""Parts of the name of one of fmoe's CK kernels that every kernel may have either way."""


@dataclass(frozen=True, slots=True)
class KernelAvailability:
    """A row's kernel in a tree: whether it loads there."""

    standing: Standing
    """`loads`: it does. `compiled`: it does if it is in the module that was built. `rebuild`: it will after a rebuild
    with the table. `cannot`: nothing of AITER's loads it. `unread`: the list that would show it is not readable."""
    why: str = ""
    by_name: bool = False
    """A `compiled` kernel that is called by its name alone, not for the very shape of the row."""
    in_module: bool | None = None
    """The built module holds the name of this `compiled` kernel; None if there is no module."""
    opus: bool = False


_LOADS = KernelAvailability("loads")
_NO_NAME = KernelAvailability("cannot", "names no kernel")


def _loads_if(condition: bool, why_not: str) -> KernelAvailability:
    return _LOADS if condition else KernelAvailability("cannot", why_not)


def availability(lists: KernelLists, family: str, gfx: str, row: Mapping[str, str]) -> KernelAvailability:
    """Judge the kernel of a row for the chip that the row is of ("": not known, so any chip's kernels count).

    `row`: its cells by column name. A row of fmoe names a kernel for each stage, and the worse one counts.
    """
    if FAMILIES[family].two_stages:
        names = (row.get(column, "") for column in ("kernelName1", "kernelName2"))
        stages = [_stage_availability(lists, family, gfx, name) for name in names if name not in NULLS]
        order: tuple[Standing, ...] = ("cannot", "unread", "compiled", "loads")
        return min(stages, key=lambda stage: order.index(stage.standing), default=_NO_NAME)
    name = row.get("kernelName", "")
    not_of_family = f"{name[:MAX_NAME] or 'an empty name'} is not a kernel of this family"
    libtype = row.get("libtype", "").lower()
    libtypes = lists.libtypes(family)
    if libtypes is not None and libtype not in (*libtypes, *NULLS):
        known = ", ".join(sorted(libtypes))
        return KernelAvailability("cannot", f"its operator knows no libtype {libtype[:40]} ({known})")
    backend = backend_of(family, row)
    if backend in _IN_PYTHON:
        return _loads_if(libtypes is not None and backend in libtypes, not_of_family)
    if backend == "flydsl":
        return _loads_if(lists.reads_flydsl(name, gfx), f"no FlyDSL kernel of the tree is called {name[:MAX_NAME]}")
    if backend == "asm" and family in ASM:
        return _asm_availability(lists, family, gfx, name)
    if (family, backend) in PLACES:
        return _instance_availability(lists, family, backend, gfx, row)
    return KernelAvailability("cannot", not_of_family)


def _asm_availability(lists: KernelLists, family: str, gfx: str, name: str) -> KernelAvailability:
    folders = " and ".join(f"hsa/{gfx or '*'}/{folder}" for folder in ASM[family])
    return _loads_if(name in lists.asm(family, gfx), f"no list of {folders} has an ASM kernel {name[:MAX_NAME]}")


def _instance_availability(
    lists: KernelLists, family: str, backend: str, gfx: str, row: Mapping[str, str]
) -> KernelAvailability:
    """The kernel of a backend with a list of instances (`PLACES`)."""
    kernels = lists.instances(family, backend, gfx)
    if kernels is None:
        return KernelAvailability("unread", f"the list of {backend} kernels cannot be read")
    place = PLACES[family, backend]
    name = row.get("kernelName", "")
    kernel_id = row.get("kernelId", "")
    has_number = kernel_id.isdigit()
    name_of_id = kernels.by_id.get(int(kernel_id), "none") if has_number else "none"
    if place.whole:
        why_not = f"AITER calls the kernel of kernelId {kernel_id[:20]} here: {name_of_id[:MAX_NAME]}"
        return _loads_if(name_of_id == name, why_not)
    if name not in kernels.names:
        end = ": a build with this row in the table stops with an error" if kernels.refuses else ""
        return KernelAvailability("cannot", f"{kernels.file or 'the tree'} lists no kernel {name[:MAX_NAME]}{end}")
    is_opus = backend == "opus"
    is_compiled_by_id = has_number and not is_opus and not kernels.by_name
    if is_compiled_by_id and name_of_id != name:
        why_not = f"AITER compiles the kernel of kernelId {kernel_id} here, which is {name_of_id[:MAX_NAME]}"
        return KernelAvailability("cannot", why_not)
    built = lists.built_kernels(place.module, kernels.names)
    return KernelAvailability(
        "compiled",
        by_name=is_opus or lists.calls_by_name(family),
        in_module=None if built is None else name in built,
        opus=is_opus,
    )


def _stage_availability(lists: KernelLists, family: str, gfx: str, name: str) -> KernelAvailability:
    """One stage of fmoe. Its CK modules are built at first use with every kernel of a combination of types."""
    if name.startswith(_CK2STAGES):
        listed_name = _CHOSEN.sub(lambda part: "_Nswizzle0_" if part[0].endswith("_") else "_B16", name)
        is_listed = listed_name in lists.names("two_stages", gfx)
        return _loads_if(is_listed, f"no list of fmoe's CK kernels has {name[:160]}")
    backend = backend_of(family, {"kernelName": name})
    if backend == "asm":
        return _asm_availability(lists, family, gfx, name)
    return _loads_if(_is_moe_kernel(lists, backend, gfx, name), f"fmoe's operator knows no kernel {name[:160]}")


def _is_moe_kernel(lists: KernelLists, backend: str, gfx: str, name: str) -> bool:
    if backend == "flydsl" and lists.reads_flydsl(name, gfx):
        return True
    if "cktile" in name:  # a label: block size and types choose the kernel
        text = lists.files.text(lists.tree.package / "fused_moe.py")
        if "cktile_moe_stage1" in text:
            return True
    return name.replace("opus_moe2_layout_", "opus_moe2_") in lists.names("opus_moe", "")
