"""Runs modules of an engine from their unchanged files. Whatever else these import is a recording stub.

A stub may be imported, subclassed, used as an annotation and, while modules are loaded, called as a decorator. Using
its value is an EngineError, so that no decision of the engine rests on something that was not there.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

Names = Mapping[str, Any]


class EngineError(ValueError):
    """The folder holds no engine, or one that cannot be loaded or asked."""


class Stub:
    """Stands for a module or name of the engine. `given`: attributes that are real; all others are stubs too."""

    importing = False

    def __init__(self, name: str, given: Names) -> None:
        self._stub = name
        self.__dict__.update(given)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return self.__dict__.setdefault(key, Stub(f"{self._stub}.{key}", {}))

    def __call__(self, *args: Any, **named: Any) -> Any:
        if not Stub.importing:
            self._refuse()
        # a decorator without arguments, or with them
        return args[0] if len(args) == 1 and not named and callable(args[0]) else Stub(f"{self._stub}()", {})

    def _refuse(self, *_: Any) -> NoReturn:
        raise EngineError(f"{self._stub} decides something here, but it is not loaded: this version needs more files")

    __bool__ = __len__ = __iter__ = __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = _refuse
    __hash__ = object.__hash__

    def __or__(self, _: Any) -> Any:
        return self

    __ror__ = __getitem__ = __or__


class Finder(MetaPathFinder, Loader):
    """Imports everything below one package. `executed`: modules whose files are run. Other modules are stubs;
    `supplied`: names of these that are ours."""

    def __init__(self, package: Path, project: str, executed: Sequence[str], supplied: Mapping[str, Names]) -> None:
        self.package, self.project, self.executed, self.supplied = package, project, executed, supplied

    def file(self, module: str) -> Path:
        """The file of a module, whether or not there is one."""
        stem = self.package.joinpath(*module.split(".")[1:])
        return stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != self.project and name not in self.supplied:
            return None
        return ModuleSpec(name, self, is_package=name not in self.executed or self.file(name).name == "__init__.py")

    def create_module(self, spec: ModuleSpec) -> Any:
        """None lets the import machinery make an ordinary module."""
        return None if spec.name in self.executed else Stub(spec.name, self.supplied.get(spec.name, {}))

    def exec_module(self, module: ModuleType) -> None:
        if isinstance(module, ModuleType):
            file = self.file(module.__name__)
            module.__file__ = str(file)
            exec(_code(file, file.stat().st_mtime_ns), vars(module))


@functools.cache
def _code(file: Path, _stamp: int) -> CodeType:
    return compile(file.read_bytes(), str(file), "exec", dont_inherit=True)


def execute(finder: Finder) -> None:
    """Import the finder's modules into this process, in place of what an earlier finder imported of the package."""
    sys.meta_path[:] = [finder, *(f for f in sys.meta_path if not isinstance(f, Finder))]
    for name in [m for m in sys.modules if m.partition(".")[0] == finder.project]:
        del sys.modules[name]
    Stub.importing = True
    module = ""
    try:
        for module in finder.executed:
            importlib.import_module(module)
    except Exception as e:
        raise EngineError(
            f"{finder.package} is not a {finder.project} of a version that is known: {module} cannot be loaded: "
            f"{type(e).__name__}: {e}"
        ) from e
    finally:
        Stub.importing = False
