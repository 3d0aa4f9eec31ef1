"""Candidates that a spec chooses, as the shim reads them; kernels of a table, maybe of another image, as this image's
tuner knows them.

CK's candidates have no name in AITER's tuners, only a number, and numbers move from version to version.
"""

from __future__ import annotations

from typing import Any

from worker.aiter_tree.kernel_lists import PLACES, KernelLists
from worker.aiter_tree.locate import Tree
from worker.protocol import Spec, TableKernel


def chosen_candidates(tree: Tree, gfx: str, spec: Spec) -> dict[int, dict[str, Any]]:
    """Entry of each shape of which only some candidates are to be measured.

    `sizes`: the numbers of its key, [] where identities are chosen: such a shape has a process of its own.
    """
    lists = KernelLists(tree)

    def here(kernel: TableKernel) -> dict[str, Any]:
        place, numbers = (spec.family, kernel.libtype), list[str]()
        if place in PLACES or kernel.libtype == "hipblaslt":  # the tuners name all other candidates
            found = lists.instances(*place, gfx) if place in PLACES else None
            by_id = found.by_id if found is not None else {}
            numbers = [str(n) for n, name in by_id.items() if name == kernel.name] if by_id else [kernel.number]
        return {"libtype": kernel.libtype, "numbers": numbers, "name": kernel.name, "split": kernel.split}

    out = {}
    for shape in spec.shapes:
        only = spec.only_of(shape.id)
        if only is not None:
            sizes = [] if only.identities else [str(v) for v in shape.key.values() if isinstance(v, int)]
            out[shape.id] = {"sizes": sizes, "only": [*map(list, only.identities), *map(here, only.kernels)]}
    return out
