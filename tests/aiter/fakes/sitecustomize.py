"""Lets a tree of AITER run on a CPU as it is: package, core.py, builder, lookups, tuner base, comparison, scripts.

Faked is what needs a GPU or a compiler of AMD's, each in a file beside this one: the device (gpu.py; rocminfo and
hipconfig are executables that tests/aiter/driven.py writes), the compiler and the modules it makes (compiled.py,
kernels.py), the quantiser (quantiser.py), the timer (timer.py). psutil is stood in for where it is not
installed. A module of the tree is run first and changed after, so that the files stay as they are. AITER's pools fork
where it has them spawn: a second import of torch and AITER in every process was most of the time.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import multiprocessing
import os
import sys
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.environ.get("REAL_AITER_ROOT", "")
AFTER = {
    "torch": "gpu",
    "triton.runtime.driver": "triton_driver",
    "aiter.jit.core": "compiled",
    "aiter.ops.quant": "quantiser",
    "aiter.test_common": "timer",
    "aiter.utility.mp_tuner": "kernels",
}
"""Module -> the file here whose `after(module)` is called when it was run."""
INSTEAD = {"psutil": "psutil_.py"}


def ours(name: str) -> Any:
    """A module of this folder, under a name that nobody else has."""
    full = f"gemmfleet_fake_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, os.path.join(HERE, f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._busy: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.rpartition(".")[2].startswith("module_"):
            return ours("compiled").find(name, path)
        if name in self._busy or name not in (*AFTER, *INSTEAD):
            return None
        self._busy.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy.discard(name)
        if name in INSTEAD:
            return spec or importlib.util.spec_from_file_location(name, os.path.join(HERE, INSTEAD[name]))
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            ours(AFTER[name]).after(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if ROOT:
    sys.modules["gemmfleet_fakes"] = ModuleType("gemmfleet_fakes")
    sys.modules["gemmfleet_fakes"].ours = ours  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _Finder())
    multiprocessing.set_start_method = lambda *_, **__: None
