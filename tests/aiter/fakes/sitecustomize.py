"""Lets AITER's real tuner base run on a CPU: what it imports besides its own tuning code is served from here.

The files of the checkout (aiter/utility, csrc) are the real ones and stay as they are. Served instead of the real
modules: `aiter` itself (its kernels), aiter.jit.core, chip_info, aiter.ops.shuffle, .enum, aiter.test_common, triton.
torch is real, on the CPU; its cuda functions pretend one GPU, and inside AITER's code a device "cuda:0" is the CPU.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.environ.get("REAL_AITER_ROOT", "")
SERVED = {
    "aiter": "aiter_package.py",
    "aiter.jit": "empty.py",
    "aiter.jit.core": "jit_core.py",
    "aiter.jit.utils": "empty.py",
    "aiter.jit.utils.chip_info": "chip_info.py",
    "aiter.ops": "empty.py",
    "aiter.ops.shuffle": "shuffle.py",
    "aiter.ops.enum": "enum_.py",
    "aiter.ops.gemm_op_a4w4": "empty.py",
    "aiter.test_common": "common_.py",
    "triton": "triton_.py",
    "triton.language": "triton_language.py",
}
PACKAGES = {"aiter": "aiter", "aiter.jit": "aiter/jit", "aiter.jit.utils": "aiter/jit/utils", "aiter.ops": "aiter/ops",
            "triton": ""}  # fmt: skip
ON_THE_CPU = ("aiter.utility.mp_tuner",)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._busy: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name in SERVED:
            places = [os.path.join(ROOT, PACKAGES[name])] if name in PACKAGES else None
            return importlib.util.spec_from_file_location(
                name, os.path.join(HERE, SERVED[name]), submodule_search_locations=places
            )
        if name not in (*ON_THE_CPU, "torch") or name in self._busy:
            return None
        self._busy.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy.discard(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            (_pretend_a_gpu if name == "torch" else _on_the_cpu)(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Properties:
    name = "a CPU that stands in for a GPU"
    gcnArchName = "gfx950:sramecc+:xnack-"
    multi_processor_count = 256
    total_memory = 1 << 34


def _pretend_a_gpu(torch: Any) -> None:
    """One GPU, for who asks; what is to compute (the worker's canary) does so on the CPU."""
    computing = sys.argv[-1:] == ["canary"]
    torch.cuda.is_available = lambda: not computing
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.empty_cache = lambda: None
    torch.cuda.get_device_properties = lambda device=0: _Properties()
    torch.cuda.get_device_name = lambda device=0: _Properties.name


def _on_the_cpu(module: Any) -> None:
    torch = module.torch

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def device(*_: Any) -> Any:
            return torch.device("cpu")

    module.torch = Torch()


if ROOT:
    sys.meta_path.insert(0, _Finder())
