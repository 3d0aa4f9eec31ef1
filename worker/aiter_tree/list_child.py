"""Imports AITER's lists of kernels and prints the names in them as JSON. `kernels` starts it as a process.

`python -I -S list_child.py` reads one JSON object on stdin. Only AITER's own files are imported. Its package is a
namespace, so aiter/__init__.py never runs. A package that is not of Python's standard library (torch, flydsl, ...) is a
mock, and so is a file of AITER that cannot be imported without them.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import os
import resource
import sys
import types
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


def instances(path: str, wanted: list[str]) -> dict[str, Any]:
    """The kernels of a list: `names`, and `by_id` where they have numbers. `wanted`: names of the dictionaries that may
    hold them, of which the first that is there counts; none for all dictionaries of kernels."""
    found = imported(path)
    given = [found[n] for n in wanted if n in found][:1] if wanted else list(found.values())
    by_id: dict[int, str] = {}
    names: set[str] = set()
    for kind in (k for some in given for k in (some if isinstance(some, tuple) else (some,))):
        if isinstance(kind, dict) and all(isinstance(getattr(v, "name", None), str) for v in kind.values()):
            names |= {v.name for v in kind.values()}
            by_id |= {k: v.name for k, v in kind.items() if isinstance(k, int)}
    return {"names": sorted(names), "by_id": by_id}


def two_stages(path: str) -> list[str]:
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
    return sorted(names)


def opus_moe(path: str) -> list[str]:
    """fmoe's opus kernels by all their names."""
    kernels = [v for kind in imported(path).values() if isinstance(kind, dict) for v in kind.values()]
    found = (getattr(k, word, None) for k in kernels for word in ("name", "profile_name"))
    return sorted({name for name in found if isinstance(name, str)})


def flydsl(path: str) -> dict[str, Any]:
    """The tables by which AITER reads the names of FlyDSL's kernels of fmoe: plain values and regular expressions."""
    kept = {}
    for name, value in imported(path).items():
        if name.startswith(("_MXMOE_", "_KERNEL_PARAMS", "_SUFFIX_RE")):
            kept[name] = getattr(value, "pattern", sorted(value) if isinstance(value, (dict, set)) else value)
            if name == "_MXMOE_PREFIX":
                kept[name] = {str(k): v for k, v in value.items()}
    return kept


def patterns(path: str) -> list[str]:
    """Regular expressions for FlyDSL kernels' names that a file has under names of its own."""
    found = (getattr(v, "pattern", v) for v in imported(path).values())
    return [p for p in found if isinstance(p, str) and p.lstrip("^").startswith("flydsl_") and "(" in p]


def main() -> None:
    asked = json.load(sys.stdin)
    for what, most in zip(
        (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE), asked["limits"], strict=True
    ):
        resource.setrlimit(what, (most, most))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the lists' own prints out of our answer
    chip = types.ModuleType("chip_info")
    for name in ("get_gfx", "get_gfx_runtime", "get_rocm_arch"):
        setattr(chip, name, lambda: asked["gfx"])
    sys.modules["chip_info"] = sys.modules["aiter.jit.utils.chip_info"] = chip
    sys.meta_path.insert(0, _Mocks(Path(asked["package"])))
    readers: dict[str, Any] = {
        "instances": instances,
        "two_stages": two_stages,
        "opus_moe": opus_moe,
        "flydsl": flydsl,
        "patterns": patterns,
    }
    out: dict[str, Any] = {}
    for name, (reader, *arguments) in asked["lists"].items():
        try:
            out[name] = {"found": readers[reader](*arguments)}
        except Exception as e:  # noqa: BLE001 - this list cannot be read, others can
            out[name] = {"error": f"{type(e).__name__}: {e}"[:300]}
    json.dump(out, answers)
    answers.flush()
    os._exit(0)  # skips exit handlers that the lists registered


if __name__ == "__main__":
    main()
