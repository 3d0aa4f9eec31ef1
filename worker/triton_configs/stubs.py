"""Runs modules of an engine from their unchanged files. Whatever else these import is a recording stub.

A stub may be imported, subclassed, used as an annotation and, while modules are loaded, called as a decorator. Using
its value is an EngineError, so that no decision of the engine rests on something that was not there.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

Names = Mapping[str, Any]


class EngineError(ValueError):
    """The folder holds no engine, or one that cannot be loaded."""


class Stub:
    """Stands for a name of the engine. `given`: attributes that are real; all others are stubs too."""

    importing = False

    def __init__(self, name: str, given: Names | None = None) -> None:
        self._stub = name
        self.__dict__.update(given or {})

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return Stub(f"{self._stub}.{key}")

    def __call__(self, *args: Any, **named: Any) -> Any:
        if not Stub.importing:
            self._refuse()
        # a decorator without arguments, or with them
        return args[0] if len(args) == 1 and not named and callable(args[0]) else Stub(f"{self._stub}()")

    def _refuse(self, *_: Any) -> NoReturn:
        raise EngineError(f"{self._stub} decides something here, but it is not loaded: this version needs more files")

    __bool__ = __len__ = __iter__ = __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = _refuse
    __hash__ = object.__hash__

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return ()

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __getitem__ = __or__


class Finder(MetaPathFinder, Loader):
    """Imports everything below one package. `executed`: modules whose files are run; `supplied`: names that are ours.

    `stubbed` collects the dotted names that stubs stand for.
    """

    def __init__(self, package: Path, project: str, executed: Sequence[str], supplied: Mapping[str, Names]) -> None:
        self.package, self.project = package, project
        self.executed, self.supplied = executed, supplied
        self.stubbed: set[str] = set()

    def file(self, module: str) -> Path:
        """The file of a module; EngineError if there is none."""
        stem = self.package.joinpath(*module.split(".")[1:])
        for file in (stem.with_suffix(".py"), stem / "__init__.py"):
            if file.is_file():
                return file
        raise EngineError(
            f"{self.package} has no {stem.relative_to(self.package)}.py, so it is not a {self.project} whose layout "
            "is known, or not a whole one"
        )

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != self.project:
            return None
        is_package = name not in self.executed or self.file(name).name == "__init__.py"
        return ModuleSpec(name, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in self.executed:
            file = self.file(name)
            module.__file__ = str(file)
            exec(_code(file, file.stat().st_mtime_ns), vars(module))
            return
        if name not in self.supplied:
            self.stubbed.add(name)
        vars(module).update(self.supplied.get(name, {}))
        vars(module)["__getattr__"] = functools.partial(self._missing, name)

    def _missing(self, module: str, key: str) -> Any:
        name = f"{module}.{key}"
        if key.startswith("__"):
            raise AttributeError(name)
        if any(f"{known}.".startswith(f"{name}.") for known in (*self.executed, *self.supplied)):
            return importlib.import_module(name)
        self.stubbed.add(name)
        return Stub(name)


@functools.cache
def _code(file: Path, _stamp: int) -> CodeType:
    return compile(file.read_bytes(), str(file), "exec", dont_inherit=True)


def execute(finder: Finder) -> None:
    """Import the finder's modules into this process, in place of what an earlier finder imported of the package."""
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, Finder)]
    for name in [m for m in sys.modules if m.partition(".")[0] == finder.project]:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    # vLLM uses `regex` like `re`
    lacking = importlib.util.find_spec("regex") is None
    if lacking:
        sys.modules["regex"] = re
    Stub.importing = True
    module = ""
    try:
        for module in finder.executed:
            importlib.import_module(module)
    except EngineError:
        raise
    except Exception as e:
        raise EngineError(f"{finder.file(module)} cannot be loaded: {type(e).__name__}: {e}") from e
    finally:
        Stub.importing = False
        if lacking:
            del sys.modules["regex"]
