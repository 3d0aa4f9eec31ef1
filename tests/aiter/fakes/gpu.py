"""torch's view of one MI355X, whose memory and arithmetic are the CPU's."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_CUDA = re.compile(r"cuda(:\d+)?\Z")
CPU = torch.device("cpu")
_IS_CUDA: Any = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
HIP = "7.1.0"
"""Version that hipconfig prints (tests/aiter/driven.py); flags of a module's compiler follow it."""
FLUSHED = 128 << 20
"""Numbers of the buffer that gradlib's tuner empties a GPU's cache with, once a shape."""


class _Properties:
    name = "a CPU that stands in for a GPU"
    gcnArchName = "gfx950:sramecc+:xnack-"
    multi_processor_count = 256
    total_memory = 1 << 34
    major, minor = 9, 5
    L2_cache_size = 4 << 20
    warp_size = 64


class _Stream:
    cuda_stream = 0
    stream_id = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class _OnTheCpu(torch.overrides.TorchFunctionMode):
    """Make on the CPU whatever is requested on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func == _IS_CUDA:
            return True
        if func is torch.ones and args == (FLUSHED,):
            args = (1,)
        return func(*map(_here, args), **{k: _here(v) for k, v in (kwargs or {}).items()})


def _here(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return CPU
    if isinstance(value, str) and _CUDA.match(value):
        return "cpu"
    return value


def after(module: Any) -> None:
    """One GPU, for who asks; the worker's canary computes on the CPU by itself."""
    del module
    cuda: Any = torch.cuda
    torch.version.hip = HIP
    computing = sys.argv[-1:] == ["canary"]
    for name, answer in {
        "is_available": not computing, "device_count": 1, "current_device": 0, "set_device": None, "synchronize": None,
        "empty_cache": None, "is_current_stream_capturing": False, "mem_get_info": (1 << 33, 1 << 34),
        "reset_peak_memory_stats": None, "get_device_properties": _Properties(), "get_device_name": _Properties.name,
        "get_device_capability": (9, 5), "current_stream": _Stream(), "default_stream": _Stream(),
    }.items():  # fmt: skip
        setattr(cuda, name, lambda *_, _answer=answer, **__: _answer)
    cuda.Stream = lambda *_, **__: _Stream()
    torch.set_default_device = lambda *_: None  # it would come after the mode below, which has no GPU to name
    _leave_the_compiler_out()
    _older_trees_define_with_the_namespace(torch)
    if not computing:
        _OnTheCpu().__enter__()  # type: ignore[no-untyped-call]


def _leave_the_compiler_out() -> None:
    """AITER imports torch's compiler to set an option of it, which takes as long as torch; nothing is compiled here."""
    module: Any = ModuleType("torch._dynamo")
    module.__path__ = []
    module.config = SimpleNamespace(ignore_logger_methods=())
    module.__getattr__ = lambda name: _plain if not name.startswith("__") else _no(name)
    sys.modules["torch._dynamo"] = torch._dynamo = module


def _no(name: str) -> Any:
    raise AttributeError(name)


def _plain(*args: Any, **_: Any) -> Any:
    """A decorator that leaves the function as it is."""
    return args[0] if args and callable(args[0]) else _plain


def _older_trees_define_with_the_namespace(torch: Any) -> None:
    """`aiter::name`, which the torch of their day took for `name`; the newest keeps it and fails at exit."""
    library = torch.library.Library
    define, impl = library.define, library.impl

    def bare(self: Any, name: Any) -> Any:
        return name.removeprefix(f"{self.ns}::") if isinstance(name, str) else name

    library.define = lambda self, schema, *a, **k: define(self, bare(self, schema), *a, **k)
    library.impl = lambda self, name, fn, *a, **k: impl(self, bare(self, name), _inside(fn), *a, **k)


def _inside(op: Any) -> Any:
    """An operator of AITER's, within which the mode is on again: torch turns it off for what is called through it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _OnTheCpu():
            return op(*args, **kwargs)

    return run
