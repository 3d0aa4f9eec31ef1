"""The compiler of AITER's modules and what it makes: an empty file of the module's name; kernels.py is what is in it.

The builder is the tree's own (aiter/jit/core.py), with its locks, its code generators and its folders; only the last
step, hipcc by ninja, is `_compile`. A built module is found where the builder put its file, and nowhere else. Modules
with enums read them from the tree's header; those that are called through ctypes get the pointers that core.py makes.
"""

from __future__ import annotations

import ctypes
import enum
import importlib.abc
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(os.environ["REAL_AITER_ROOT"])
ENUMS = ("ActivationType", "QuantType", "MlaVersion")


def after(core: Any) -> None:
    core._jit_compile = _compile
    ctypes.CDLL = _Library  # type: ignore[misc]


def _compile(name: str, *_: Any, build_directory: str, **__: Any) -> None:
    Path(build_directory, f"{name}.so").touch()


def find(name: str, path: Any) -> Any:
    """The spec of a module that was built into a folder of `path`; None where it was not."""
    file = f"{name.rpartition('.')[2]}.so"
    for folder in path or sys.path:
        if os.path.exists(os.path.join(folder, file)):
            return importlib.util.spec_from_loader(name, _Loader(), origin=os.path.join(folder, file))
    return None


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: Any) -> Any:
        return _Module(spec)

    def exec_module(self, module: Any) -> None:
        del module


class _Numbered(enum.Enum):
    """Enum like pybind's: named in text, a number where one is needed."""

    def __int__(self) -> int:
        return int(self.value)


class _Module(ModuleType):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec.name)
        self.__file__ = spec.origin
        for kind in ENUMS:
            if values := _enum(kind):
                made = _Numbered(kind, values, module=spec.name)  # type: ignore[call-arg]
                made.__doc__ = "Members:"  # as pybind's have it; core.py asks
                setattr(self, kind, made)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "aiter_tensor_t":
            return _tensor
        if name == "_set_current_hip_stream":
            return lambda stream: None
        return _function(name)


def _enum(kind: str) -> dict[str, int]:
    text = re.sub(r"//.*", "", (ROOT / "csrc/include/aiter_enum.h").read_text())
    found = re.search(rf"enum class {kind}\b[^{{]*\{{([^}}]*)\}}", text)
    values: dict[str, int] = {}
    for word in filter(None, map(str.strip, found[1].split(",") if found else ())):
        name, _, value = word.partition("=")
        values[name.strip()] = int(value) if value else max(values.values(), default=-1) + 1
    return values


def _function(name: str) -> Any:
    from gemmfleet_fakes import ours  # type: ignore[import-not-found]

    call = ours("kernels").call

    def op(*args: Any, **kwargs: Any) -> Any:
        return call(name, [*args, *kwargs.values()])

    op.__doc__ = "Members:"  # spares core.py the comparison of a signature that there is not
    return op


def _tensor(ptr: int, numel: int, ndim: int, shape: Any, strides: Any, dtype: int, device: int) -> Any:
    """The tensor at an address, without a copy."""
    del device
    import torch
    from aiter.utility import dtypes  # type: ignore[import-not-found]

    kind = {v: k for k, v in dtypes._torch_to_aiter_dtype.items()}[dtype]
    if not numel:
        return torch.empty(list(shape[:ndim]), dtype=kind)
    extent = 1 + sum((n - 1) * s for n, s in zip(shape[:ndim], strides[:ndim], strict=True))
    memory = (ctypes.c_char * (extent * kind.itemsize)).from_address(ptr)
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(kind)
    return flat.as_strided(list(shape[:ndim]), list(strides[:ndim]))


class _Library(ctypes.CDLL):
    """ctypes.CDLL, but for modules of AITER's."""

    def __new__(cls, name: Any = None, *_: Any, **__: Any) -> Any:
        if os.path.basename(str(name)).startswith("module_"):
            return _Ours()
        return super().__new__(cls)


class _Ours:
    """A library of the second ABI: a call returns a status, and the words of an error are read afterwards."""

    def __init__(self) -> None:
        self._words = b""

    def __getattr__(self, name: str) -> Any:
        def function(*args: Any) -> Any:
            if name == "aiter_ctypes_abi_version":
                return 2
            if name == "aiter_get_last_error":
                return self._words
            if name == "aiter_clear_last_error":
                self._words = b""
                return None
            if name == "getPaddedM":
                return _padded(*args[:4])
            try:
                _function(name)(*map(_plain, args[:-1]))
            except RuntimeError as e:
                self._words = str(e).encode()
                return 1
            return 0

        return function


def _padded(m: int, n: int, k: int, level: int) -> int:
    step = 16 if m <= 256 else 32 if m <= 1024 else 64 if m <= 4096 else 128
    if level == 0:
        return -(-m // step) * step
    return 8192 if m > 8192 and n > 4096 else 1 << (m - 1).bit_length()


def _plain(value: Any) -> Any:
    struct = getattr(value, "_obj", None)
    if struct is not None:
        args = (struct.ptr, struct.numel_, struct.ndim, list(struct.shape), list(struct.strides), struct.dtype_)
        return _tensor(*args, struct.device_id)
    if isinstance(value, (ctypes.c_int, ctypes.c_long, ctypes.c_float, ctypes.c_bool, ctypes.c_char_p)):
        value = value.value
    if isinstance(value, bytes):
        return value.decode()
    return None if type(value).__name__.startswith("LP_") else value
