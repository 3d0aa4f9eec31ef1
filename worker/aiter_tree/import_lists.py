"""Imports AITER's lists of kernels and gives the names in them.

`kernel_lists.py` calls `read_lists` in a process of its own, because it runs code of the tree. Only AITER's own files
are imported. Its package is a namespace, so aiter/__init__.py never runs. A package that is not of Python's standard
library (torch, flydsl, ...) is a mock, and so is a file of AITER that cannot be imported without them.

Each reader (`READERS`) takes the file of a list, and reads the form that AITER's lists of that sort have.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
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
_QUANT_TYPES = range(8)
"""The numbers of AITER's QuantType, and some more."""


@dataclass(frozen=True)
class ReadList:
    """One list as read."""

    names: list[str] = field(default_factory=list)
    by_id: dict[int, str] = field(default_factory=dict)
    """Names by number, if they have numbers."""
    tables: dict[str, str | list[str] | dict[str, str]] = field(default_factory=dict)
    """The tables by which FlyDSL's names are read."""
    error: str = ""
    """The reason why it cannot be read, "" if it was."""


class _Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds AITER's modules as files of its package, and a mock for everything else that Python does not bring."""

    def __init__(self, package: Path) -> None:
        self._package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        parts = name.split(".")
        if parts[0] in sys.stdlib_module_names:
            return None
        file = self._package.parent.joinpath(*parts)
        is_aiters = file.is_dir() or file.with_suffix(".py").is_file()
        if parts[0] != "aiter" or not is_aiters:
            return self._spec_beside(name) or importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec = importlib.machinery.ModuleSpec(name, self, origin=str(file.with_suffix(".py")), is_package=file.is_dir())
        if file.is_dir():
            spec.submodule_search_locations = [str(file)]
        return spec

    def _spec_beside(self, name: str) -> Any:
        """A module on the path, such as the one beside a list that is imported; None for folders and packages."""
        if "." in name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name)
        return spec if spec is not None and spec.origin else None

    def exec_module(self, module: types.ModuleType) -> None:
        file = Path(module.__spec__.origin or "") if module.__spec__ else Path()
        if file.is_file():
            try:
                exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
                return
            except Exception as e:  # noqa: BLE001 - a mock takes its place
                print(f"{file}: {type(e).__name__}: {e}", file=sys.stderr)
        stand_in = mock.MagicMock()
        module.__getattr__ = lambda name: getattr(stand_in, name)  # type: ignore[method-assign]


def imported_names(path: str) -> dict[str, Any]:
    """The names of a file, which is imported. Its folder is on the path meanwhile, as when AITER's code generator runs
    there."""
    name = _module_name(Path(path))
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        sys.path.insert(0, os.path.dirname(path))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(os.path.dirname(path))
    return {name: value for name, value in vars(sys.modules[name]).items() if not name.startswith("__")}


def _module_name(path: Path) -> str:
    """`aiter.ops.flydsl.moe_kernels` for a file of the package's operators, which may be imported by others; a name of
    our own for any other file."""
    parts = path.with_suffix("").parts
    if "aiter" in parts:
        package = len(parts) - 1 - parts[::-1].index("aiter")
        if parts[package + 1] == "ops":
            return ".".join(parts[package:])
    return "gemmfleet_list_" + "_".join(parts[-2:])


def _kernel_dictionaries(names: Mapping[str, Any]) -> Iterator[dict[Any, Any]]:
    """The dictionaries of a file whose values all have names, alone or in a tuple."""
    for value in names.values():
        for dictionary in value if isinstance(value, tuple) else (value,):
            if not isinstance(dictionary, dict):
                continue
            if all(isinstance(getattr(kernel, "name", None), str) for kernel in dictionary.values()):
                yield dictionary


def instances(path: str, wanted: list[str]) -> ReadList:
    """The kernels of a list. `wanted`: names of the dictionaries that may hold them, of which the first that is there
    counts; none for all dictionaries of kernels."""
    names = imported_names(path)
    if wanted:
        first = next((name for name in wanted if name in names), None)
        names = {} if first is None else {first: names[first]}
    kernels: set[str] = set()
    by_id: dict[int, str] = {}
    for dictionary in _kernel_dictionaries(names):
        for kernel_id, kernel in dictionary.items():
            kernels.add(kernel.name)
            if isinstance(kernel_id, int):
                by_id[kernel_id] = kernel.name
    return ReadList(sorted(kernels), by_id)


def two_stages(path: str) -> ReadList:
    """fmoe's CK kernels, those of every combination of types that AITER takes, without swizzle and with B16 output."""
    names = imported_names(path)
    kernels: set[str] = set()
    activations = ("silu", "gelu", "swiglu", "")  # "": the second stage, which has none
    for a, b, quant_type, is_weight_in_first, switches, activation in itertools.product(
        _TYPES, _TYPES, _QUANT_TYPES, (False, True), _SWITCHES, activations
    ):
        options = {"Adtype": a, "Bdtype": b, "Cdtype": "B16", "Nswizzle": False, **switches}
        options |= {"QuantType": quant_type, "MulRoutedWeight": is_weight_in_first}
        maker = "get_gemm2_kernels_list"
        if activation:
            maker = "get_gemm1_kernels_list"
            options["ActOP"] = activation
        try:
            _, dictionary, *_ = names[maker](**options)
            kernels |= {str(kernel.name) for kernel in dictionary.values()}
        except Exception:  # noqa: BLE001 - a combination that AITER refuses
            continue
    return ReadList(sorted(kernels))


def opus_moe(path: str) -> ReadList:
    """fmoe's opus kernels by all their names."""
    kernels: set[str] = set()
    for dictionary in imported_names(path).values():
        for kernel in dictionary.values() if isinstance(dictionary, dict) else ():
            names = (getattr(kernel, "name", None), getattr(kernel, "profile_name", None))
            kernels.update(name for name in names if isinstance(name, str))
    return ReadList(sorted(kernels))


def flydsl(path: str) -> ReadList:
    """The tables by which AITER reads the names of FlyDSL's kernels of fmoe: texts, and regular expressions."""
    tables: dict[str, Any] = {}
    for name, value in imported_names(path).items():
        if name == "_MXMOE_PREFIX":
            tables[name] = {str(stage): prefix for stage, prefix in value.items()}
        elif name.startswith(("_MXMOE_", "_KERNEL_PARAMS", "_SUFFIX_RE")):
            words = sorted(value) if isinstance(value, (dict, set)) else value
            tables[name] = getattr(value, "pattern", words)
    return ReadList(tables=tables)


def patterns(path: str) -> ReadList:
    """Regular expressions for FlyDSL kernels' names that a file has under names of its own."""
    texts = (getattr(value, "pattern", value) for value in imported_names(path).values())
    return ReadList([t for t in texts if isinstance(t, str) and t.lstrip("^").startswith("flydsl_") and "(" in t])


READERS: dict[str, Callable[..., ReadList]] = {
    "instances": instances,
    "two_stages": two_stages,
    "opus_moe": opus_moe,
    "flydsl": flydsl,
    "patterns": patterns,
}


def read_lists(package: Path, gfx: str, questions: dict[str, list[Any]]) -> dict[str, ReadList]:
    """Read lists for a chip: `questions` has for each list's name the reader's name, the file, and more arguments.

    AITER's code asks for the chip while its lists are imported, and gets this one.
    """
    chip = types.ModuleType("chip_info")
    for name in ("get_gfx", "get_gfx_runtime", "get_rocm_arch"):
        setattr(chip, name, lambda: gfx)
    sys.modules["chip_info"] = sys.modules["aiter.jit.utils.chip_info"] = chip
    sys.meta_path.insert(0, _Mocks(package))
    lists: dict[str, ReadList] = {}
    for name, (reader, *arguments) in questions.items():
        try:
            lists[name] = READERS[reader](*arguments)
        except Exception as e:  # noqa: BLE001 - this list cannot be read, others can
            lists[name] = ReadList(error=f"{type(e).__name__}: {e}"[:300])
    return lists
