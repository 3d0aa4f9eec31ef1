"""Runs a real tuner script as far as its argument parser, in a process of its own, and prints what the parser knows.

`python parsers.py ROOT SCRIPT`: prints a JSON object with `options` (long name to flag or value), `keys` of the
tuner, or `error`. Whatever the script imports that is not its own or the tree's base_tuner.py is a mock:
torch, triton, pandas, the kernels. This is the truth that the static probe is held against.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

REAL = "aiter.utility.base_tuner"
TUNERS = ("GemmTuner", "fmoe_2stages", "opus_gemm_common")
"""Modules of the tree that hold a script's tuner, or a list that is checked before there is a parser."""
MOCKED = ("aiter", "torch", "triton", "flydsl", "op_tests", "pandas", "numpy")


class Mock(types.ModuleType):
    """A module that has everything. Names that start with AITER_ are paths of the tree."""

    root = Path()
    __path__ = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = {"AITER_META_DIR": f"{self.root}", "AITER_ROOT_DIR": f"{self.root}", "get_gfx": lambda: "gfx950"}
        value: Any = known.get(name) or MagicMock(name=name)
        if name.startswith("AITER_C"):  # AITER_CSRC_DIR, AITER_CONFIG_...
            value = f"{self.root}/csrc" if name == "AITER_CSRC_DIR" else f"{self.root}/{name}.csv"
        elif name.isupper() and not name.startswith("AITER"):
            value = 4  # a constant of a kernels' list
        setattr(self, name, value)
        return value


class Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what nobody else does, and all of `aiter` but REAL."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == REAL:
            return importlib.util.spec_from_file_location(name, self.root / "aiter/utility/base_tuner.py")
        top = name.split(".")[0]
        if top in MOCKED or not (top in TUNERS or self._installed(name, path)):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def _installed(self, name: str, path: Any) -> bool:
        """Return whether this Python has it and the tree, whose helpers need ROCm when they are imported, does not."""
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        builtin = name.split(".")[0] in sys.stdlib_module_names
        return builtin or (spec is not None and not str(spec.origin).startswith(str(self.root)))

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = Mock(spec.name)
        module.root = self.root
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return None


class Inline:
    """multiprocessing.Process that runs at once and here."""

    exitcode = 0

    def __init__(self, target: Any = None, args: tuple[Any, ...] = (), **_: Any) -> None:
        self.start = lambda: target(*args)
        self.join = self.is_alive = lambda *_: None


def show(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> argparse.Namespace:
    """In place of parse_args: print and leave."""
    options = {
        name: "flag" if action.nargs == 0 else "value"
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--") and name != "--help"
    }
    keys = getattr(sys._getframe(1).f_locals.get("self"), "keys", None)
    told = {"options": options, "keys": keys if isinstance(keys, list) else None}
    print(json.dumps(told), file=sys.__stdout__, flush=True)
    os._exit(0)


if __name__ == "__main__":
    root, script = (Path(word).resolve() for word in sys.argv[1:])
    sys.meta_path.insert(0, Mocks(root))
    argparse.ArgumentParser.parse_args = show  # type: ignore[assignment]
    multiprocessing.Process = Inline  # type: ignore[assignment,misc]
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except BaseException as e:  # noqa: BLE001
        print(json.dumps({"error": f"{type(e).__name__}: {e}"}))
