"""Imports AITER's lists of kernels and gives the names in them. `kernels` calls `read_lists` in a process of its own.

Only AITER's own files are imported. Its package is a
namespace, so aiter/__init__.py never runs. A package that is not of Python's standard library (torch, flydsl, ...) is a
mock, and so is a file of AITER that cannot be imported without them.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

_TYPES = ("B16", "F16", "F8", "I8", "I4", "FP4X2")
_SWITCHES: tuple[dict[str, bool], ...] = (
    {},
    {"preshuffle": True},
    {"splitk": True},
    {"preshuffle": True, "splitk": True},
)


@dataclass(frozen=True)
class ReadList:
    """One list as read. `by_id`: names by number, if they have numbers. `tables`: what FlyDSL's names are read by.
    `error`: why it cannot be read."""

    names: list[str] = field(default_factory=list)
    by_id: dict[int, str] = field(default_factory=dict)
    tables: dict[str, str | list[str] | dict[str, str]] = field(default_factory=dict)
    error: str = ""


class _Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds AITER's modules as files of its package, and a mock for everything else that Python does not bring."""

    def __init__(self, package: Path) -> None:
        self._package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        parts = name.split(".")
        if parts[0] in sys.stdlib_module_names:
            return None
        file = self._package.parent.joinpath(*parts)
        if parts[0] != "aiter" or not (file.is_dir() or file.with_suffix(".py").is_file()):
            beside = importlib.machinery.PathFinder.find_spec(name) if len(parts) == 1 else None
            spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
            return beside if beside is not None and beside.origin else spec
        spec = importlib.machinery.ModuleSpec(name, self, origin=str(file.with_suffix(".py")), is_package=file.is_dir())
        if file.is_dir():
            spec.submodule_search_locations = [str(file)]
        return spec

    def exec_module(self, module: types.ModuleType) -> None:
        file = Path(module.__spec__.origin or "") if module.__spec__ else Path()
        if file.is_file():
            try:
                exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
                return
            except Exception as e:  # noqa: BLE001 - a mock takes its place
                print(f"{file}: {type(e).__name__}: {e}", file=sys.stderr)
        made = mock.MagicMock()
        module.__getattr__ = lambda name: getattr(made, name)  # type: ignore[method-assign]


def imported(path: str) -> dict[str, Any]:
    """Imports a file; its names. The folder of the file is on the path, as when AITER's code generator runs there."""
    parts = Path(path).with_suffix("").parts
    inside = len(parts) - 1 - parts[::-1].index("aiter") if "aiter" in parts else 0
    name = ".".join(parts[inside:]) if parts[inside + 1] == "ops" else "gemmfleet_list_" + "_".join(parts[-2:])
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        sys.path.insert(0, os.path.dirname(path))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(os.path.dirname(path))
    return {k: v for k, v in vars(sys.modules[name]).items() if not k.startswith("__")}


def instances(path: str, wanted: list[str]) -> ReadList:
    """The kernels of a list. `wanted`: names of the dictionaries that may hold them, of which the first that is there
    counts; none for all dictionaries of kernels."""
    found = imported(path)
    given = [found[n] for n in wanted if n in found][:1] if wanted else list(found.values())
    by_id: dict[int, str] = {}
    names: set[str] = set()
    for kind in (k for some in given for k in (some if isinstance(some, tuple) else (some,))):
        if isinstance(kind, dict) and all(isinstance(getattr(v, "name", None), str) for v in kind.values()):
            names |= {v.name for v in kind.values()}
            by_id |= {k: v.name for k, v in kind.items() if isinstance(k, int)}
    return ReadList(sorted(names), by_id)


def two_stages(path: str) -> ReadList:
    """fmoe's CK kernels, those of every combination of types that AITER takes, without swizzle and with B16 output."""
    found = imported(path)
    names: set[str] = set()
    cells = itertools.product(_TYPES, _TYPES, range(8), (False, True), _SWITCHES, ("silu", "gelu", "swiglu", ""))
    for a, b, quant, routed, switches, act in cells:
        options: dict[str, Any] = {"Adtype": a, "Bdtype": b, "Cdtype": "B16", "Nswizzle": False, **switches}
        stage = {"ActOP": act} if act else {}
        try:
            make = found[f"get_gemm{1 if act else 2}_kernels_list"]
            names |= {
                str(k.name) for k in make(**options, **stage, QuantType=quant, MulRoutedWeight=routed)[1].values()
            }
        except Exception:  # noqa: BLE001 - a combination that AITER refuses
            continue
    return ReadList(sorted(names))


def opus_moe(path: str) -> ReadList:
    """fmoe's opus kernels by all their names."""
    kernels = [v for kind in imported(path).values() if isinstance(kind, dict) for v in kind.values()]
    found = (getattr(k, word, None) for k in kernels for word in ("name", "profile_name"))
    return ReadList(sorted({name for name in found if isinstance(name, str)}))


def flydsl(path: str) -> ReadList:
    """The tables by which AITER reads the names of FlyDSL's kernels of fmoe: texts, and regular expressions."""
    tables: dict[str, Any] = {}
    for name, value in imported(path).items():
        if name == "_MXMOE_PREFIX":
            tables[name] = {str(stage): prefix for stage, prefix in value.items()}
        elif name.startswith(("_MXMOE_", "_KERNEL_PARAMS", "_SUFFIX_RE")):
            tables[name] = getattr(value, "pattern", sorted(value) if isinstance(value, (dict, set)) else value)
    return ReadList(tables=tables)


def patterns(path: str) -> ReadList:
    """Regular expressions for FlyDSL kernels' names that a file has under names of its own."""
    found = (getattr(v, "pattern", v) for v in imported(path).values())
    return ReadList([p for p in found if isinstance(p, str) and p.lstrip("^").startswith("flydsl_") and "(" in p])


READERS: dict[str, Callable[..., ReadList]] = {
    "instances": instances,
    "two_stages": two_stages,
    "opus_moe": opus_moe,
    "flydsl": flydsl,
    "patterns": patterns,
}


def read_lists(package: Path, gfx: str, asked: dict[str, list[Any]]) -> dict[str, ReadList]:
    """Read the lists that are asked for: name -> the reader's name, the file, and more arguments. Call it in a process
    of its own, because it runs code of the tree."""
    chip = types.ModuleType("chip_info")
    for name in ("get_gfx", "get_gfx_runtime", "get_rocm_arch"):
        setattr(chip, name, lambda: gfx)
    sys.modules["chip_info"] = sys.modules["aiter.jit.utils.chip_info"] = chip
    sys.meta_path.insert(0, _Mocks(package))
    lists: dict[str, ReadList] = {}
    for name, (reader, *arguments) in asked.items():
        try:
            lists[name] = READERS[reader](*arguments)
        except Exception as e:  # noqa: BLE001 - this list cannot be read, others can
            lists[name] = ReadList(error=f"{type(e).__name__}: {e}"[:300])
    return lists
