"""Kernels of a tuned table, maybe of another image, as this image's tuner knows them.

CK's candidates have no name in AITER's tuners, only a number, and numbers move from version to version.
"""

from __future__ import annotations

from typing import Any

from worker.aiter_tree.kernel_lists import PLACES, KernelLists
from worker.aiter_tree.locate import Tree
from worker.protocol import Spec, TableKernel


def chosen_kernels(tree: Tree, gfx: str, spec: Spec) -> list[dict[str, Any]]:
    """Entries for the shim on the shapes of which only some kernels are to be measured."""
    lists = KernelLists(tree)

    def here(kernel: TableKernel) -> list[Any]:
        place, numbers = (spec.family, kernel.libtype), list[str]()
        if place in PLACES or kernel.libtype == "hipblaslt":  # the tuners name all other candidates
            found = lists.instances(*place, gfx) if place in PLACES else None
            by_id = found.by_id if found is not None else {}
            numbers = [str(n) for n, name in by_id.items() if name == kernel.name] if by_id else [kernel.number]
        return [kernel.libtype, numbers, kernel.name, kernel.split]

    out = []
    for shape in spec.shapes:
        kernels = spec.kernels_of(shape.id)
        if kernels is not None:
            sizes = [str(v) for v in shape.key.values() if isinstance(v, int)]
            out.append({"sizes": sizes, "kernels": [here(k) for k in kernels]})
    return out
