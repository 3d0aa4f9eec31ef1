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
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

REAL = ("aiter.utility.base_tuner",)
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
        value: Any = str(self.root) if name in ("AITER_META_DIR", "AITER_ROOT_DIR") else MagicMock(name=name)
        if name.startswith("AITER_CONFIG"):
            value = f"{self.root}/{name}.csv"
        if name == "AITER_CSRC_DIR":
            value = f"{self.root}/csrc"
        if name[:1].isupper() and name.isupper() and not name.startswith("AITER"):
            value = 4  # a constant of a kernels' list
        if name == "get_gfx":
            value = lambda: "gfx950"  # noqa: E731
        setattr(self, name, value)
        return value


class Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what nobody else does, and all of `aiter` but REAL."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in REAL:
            file = self.root.joinpath(*fullname.split(".")).with_suffix(".py")
            return importlib.util.spec_from_file_location(fullname, file)
        top = fullname.split(".")[0]
        if top not in MOCKED and (top in TUNERS or self._installed(fullname, path)):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def _installed(self, fullname: str, path: Sequence[str] | None) -> bool:
        """Return whether this Python has it and the tree, whose helpers need ROCm when they are imported, does not."""
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        builtin = fullname.split(".")[0] in sys.stdlib_module_names
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
        self.target, self.args = target, args

    def start(self) -> None:
        self.target(*self.args)

    def join(self, timeout: float | None = None) -> None:
        return None

    def is_alive(self) -> bool:
        return False


def show(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> argparse.Namespace:
    """In place of parse_args: print and leave."""
    options = {
        name: "flag" if action.nargs == 0 else "value"
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--") and name != "--help"
    }
    maker = sys._getframe(1).f_locals.get("self")
    keys = getattr(maker, "keys", None)
    told = {"options": options, "keys": keys if isinstance(keys, list) else None}
    print(json.dumps(told), file=sys.__stdout__)
    sys.__stdout__.flush()  # type: ignore[union-attr]
    import os

    os._exit(0)


def main() -> None:
    root, script = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    sys.meta_path.insert(0, Mocks(root))
    argparse.ArgumentParser.parse_args = show  # type: ignore[assignment]
    multiprocessing.Process = Inline  # type: ignore[assignment,misc]
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except BaseException as e:  # noqa: BLE001
        print(json.dumps({"error": f"{type(e).__name__}: {e}"}))


if __name__ == "__main__":
    main()
