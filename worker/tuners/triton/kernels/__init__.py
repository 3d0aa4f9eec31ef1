"""The kernels, one file an idea: `tiled` (a program a tile, split-K), `persistent` (a program a multiprocessor), `mx`
(operands with e8m0 scales), all from the steps in `parts`.

Kernels are found by name, so that a launch plan is plain data and can go to another process.
"""

from __future__ import annotations

from typing import Any


def get(name: str) -> Any:
    """The jitted kernel of a name. Imports triton. Raises KeyError for a name that is none."""
    from worker.tuners.triton.kernels import mx, persistent, tiled

    return {"tiled": tiled.tiled, "persistent": persistent.persistent, "mx": mx.mx}[name]
