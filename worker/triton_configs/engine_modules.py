"""Modules of a serving engine (vLLM, SGLang), run from their unchanged files in this process without a server.

`serving_engine.load_engine` makes an `EngineImporter` of the engine's package and calls `execute_modules`, which
imports the few modules that look configs up and launch kernels. Whatever else these import is a `Stub`, or a name that
`supplied_to_vllm` and `supplied_to_sglang` give: the device, and that the server has no special mode. If a new version
of an engine asks for another name, add it there. Importing this module imports neither torch nor triton.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any, NoReturn

from worker.triton_configs.engine_package import EngineDevice, ServingEngineError

Names = Mapping[str, Any]
"""Names of a module with their values."""


class Stub:
    """Stands for a module or name of the engine. `real`: attributes that are no stubs; all others are.

    A stub may be imported, subclassed, used as an annotation and, while modules are loaded, called as a decorator.
    Using its value is a ServingEngineError, so that no decision of the engine rests on something that was not there.
    """

    importing = False

    def __init__(self, name: str, real: Names) -> None:
        self._stub = name
        self.__dict__.update(real)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return self.__dict__.setdefault(key, Stub(f"{self._stub}.{key}", {}))

    def __call__(self, *args: Any, **named: Any) -> Any:
        if not Stub.importing:
            self._refuse()
        is_plain_decorator = len(args) == 1 and not named and callable(args[0])
        return args[0] if is_plain_decorator else Stub(f"{self._stub}()", {})

    def _refuse(self, *_: Any) -> NoReturn:
        raise ServingEngineError(
            f"{self._stub} decides something here, but it is not loaded: this version needs more files"
        )

    __bool__ = __len__ = __iter__ = __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = _refuse
    __hash__ = object.__hash__

    def __or__(self, _: Any) -> Any:
        return self

    __ror__ = __getitem__ = __or__


class EngineImporter(MetaPathFinder, Loader):
    """Imports everything below one package: the modules that are executed from their files, all others as stubs."""

    def __init__(self, package: Path, project: str, executed: Sequence[str], supplied: Mapping[str, Names]) -> None:
        """`executed`: the modules whose files are run. `supplied`: names of ours that the stubs have, by module."""
        self.package = package
        self.project = project
        self.executed = executed
        self.supplied = supplied

    def file_of(self, module: str) -> Path:
        """The file of a module, whether or not there is one."""
        stem = self.package.joinpath(*module.split(".")[1:])
        return stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != self.project and name not in self.supplied:
            return None
        is_package = name not in self.executed or self.file_of(name).name == "__init__.py"
        return ModuleSpec(name, self, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> Any:
        """None lets the import machinery make an ordinary module."""
        if spec.name in self.executed:
            return None
        return Stub(spec.name, self.supplied.get(spec.name, {}))

    def exec_module(self, module: ModuleType) -> None:
        if isinstance(module, ModuleType):  # and no stub, which has nothing to run
            file = self.file_of(module.__name__)
            module.__file__ = str(file)
            exec(_compiled_file(file, file.stat().st_mtime_ns), vars(module))


@functools.cache
def _compiled_file(file: Path, _modified_ns: int) -> CodeType:
    """The code of a file. The time of its last change is part of the cache's key."""
    return compile(file.read_bytes(), str(file), "exec", dont_inherit=True)


def execute_modules(importer: EngineImporter) -> None:
    """Import the importer's modules into this process, in place of what an earlier one imported of the package."""
    others = [finder for finder in sys.meta_path if not isinstance(finder, EngineImporter)]
    sys.meta_path[:] = [importer, *others]
    for name in list(sys.modules):
        if name.partition(".")[0] == importer.project:
            del sys.modules[name]
    Stub.importing = True
    module = ""
    try:
        for module in importer.executed:
            importlib.import_module(module)
    except Exception as e:
        raise ServingEngineError(
            f"{importer.package} is not a {importer.project} of a version that is known: {module} cannot be loaded: "
            f"{type(e).__name__}: {e}"
        ) from e
    finally:
        Stub.importing = False


@contextmanager
def replaced(module: ModuleType, names: Names) -> Iterator[None]:
    """Give a module other names for a while; also names that it has from the builtins."""
    before = {name: getattr(module, name, getattr(builtins, name, None)) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)


def supplied_to_vllm(device: EngineDevice) -> dict[str, Names]:
    """Names that vLLM's executed modules ask of the modules that are stubs, by module."""
    import torch
    import triton
    import triton.language as tl

    is_amd = device.backend == "hip"
    capability = device.capability
    platform = {
        "get_device_name": lambda device_id=0: device.name,
        "get_device_capability": lambda device_id=0: capability,
        "is_device_capability": lambda wanted: capability == divmod(wanted, 10),
        "has_device_capability": lambda wanted: capability >= divmod(wanted, 10),
        "is_device_capability_family": lambda wanted: capability[0] == wanted // 10,
        "is_rocm": lambda: is_amd,
        "is_cuda": lambda: not is_amd,
        "is_cuda_alike": lambda: True,
        "is_xpu": lambda: False,
        "is_cpu": lambda: False,
        "is_fp8_fnuz": lambda: device.fp8 == torch.float8_e4m3fnuz,
        "fp8_dtype": lambda: device.fp8,
    }
    levels = ("debug", "info", "warning", "error", "debug_once", "info_once", "warning_once")
    silent_logger = Stub("vllm.logger.logger", dict.fromkeys(levels, lambda *_, **__: None))
    supplied: dict[str, Names] = {
        "vllm.logger": {"init_logger": lambda name: silent_logger},
        "vllm.platforms": {"current_platform": Stub("vllm.platforms.current_platform", platform)},
        "vllm.platforms.rocm": {"on_gfx1250": lambda: device.arch == "gfx1250"},
        "vllm.triton_utils": {"tl": tl, "triton": triton, "HAS_TRITON": False},
        "vllm.utils.import_utils": {"get_triton_kernels_version": lambda: None},
        "vllm.model_executor.layers.quantization.utils.quant_utils": {
            "GroupShape": type("GroupShape", (), {"PER_TOKEN": (1, -1), "PER_TENSOR": (-1, -1)})
        },
    }
    if not find_spec("regex"):
        supplied["regex"] = {"sub": re.sub}  # vLLM uses nothing of it that `re` has not
    return supplied


def supplied_to_sglang(device: EngineDevice) -> dict[str, Names]:
    """The same for SGLang."""
    is_cuda = device.backend == "cuda"
    is_gfx1250 = device.arch == "gfx1250"
    is_sm90 = is_cuda and device.capability[0] == 9
    is_sm90_or_newer = is_cuda and device.capability[0] >= 9
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    ordinary_mode = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
    utils = {
        "get_device_name": lambda device_id=0: device.name,
        "is_cuda": lambda: is_cuda,
        "is_hip": lambda: not is_cuda,
        "is_cpu": lambda: False,
        "is_npu": lambda: False,
        "cpu_has_amx_support": lambda: False,
        "is_sm90_supported": lambda: is_sm90,
        "is_gfx1250_supported": lambda: is_gfx1250,
        # decides between two kernels that read the same config
        "get_device_core_count": lambda: 0,
        "log_info_on_rank0": lambda logger, text: None,
    }
    logging.getLogger("sglang").setLevel(logging.CRITICAL)
    return {
        "sglang.srt.utils": utils,
        "sglang.srt.runtime_context": {
            "get_exec": lambda: ordinary_mode,
            "get_platform": lambda: SimpleNamespace(is_sm90=is_sm90),
        },
        "sglang.srt.batch_invariant_ops": {"is_batch_invariant_mode_enabled": lambda: False},
        # Triton's interpreter has no dependent launches
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: is_sm90_or_newer and not is_interpreted},
    }
