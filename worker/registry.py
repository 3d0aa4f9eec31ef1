"""Look-up of tuners and engines by name: built-in ones by their files, others by entry points. Standard library only.

A built-in one is a module of a package with a `SPEC`: `NAME/spec.py` or `NAME.py`. Every other one comes from an
installed package, by an entry point `NAME = "package.module:SPEC"`; entry points are read for names that are not built
in only, and imported when one is looked up.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import importlib.metadata

Spec = TypeVar("Spec")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,30}\Z")


def entry_points(group: str) -> tuple[importlib.metadata.EntryPoint, ...]:
    """Entry points of the installed packages in a group."""
    import importlib.metadata  # email, zipfile and more: not for the help of a command

    return tuple(importlib.metadata.entry_points(group=group))


@dataclass(frozen=True)
class Registry(Generic[Spec]):
    """Specs of one kind, such as `tuner`. `others`: modules of the package that are none; `error`: what is raised."""

    kind: str
    spec: type[Spec]
    package: str
    folder: Path
    group: str
    others: tuple[str, ...]
    error: type[LookupError]

    def built_in(self) -> tuple[str, ...]:
        """Names of the package, sorted."""
        stems = {p.stem for p in self.folder.iterdir() if p.suffix == ".py" or (p / "spec.py").is_file()}
        stems = {s.replace("_", "-") for s in stems}
        return tuple(sorted(name for name in stems if self._module(name)))

    def from_packages(self) -> tuple[str, ...]:
        """Names of installed packages, sorted; those packages are not imported."""
        return tuple(sorted({e.name for e in entry_points(self.group)} - set(self.built_in())))

    def find(self, name: str) -> Spec:
        """The spec of that name. Raises `error` where there is none, or its package is broken."""
        if not _NAME.match(name):
            raise self.error(f"{name!r} is not the name of {self._a}")
        if module := self._module(name):
            built_in: Spec = importlib.import_module(module).SPEC
            return built_in
        found = next((e for e in entry_points(self.group) if e.name == name), None)
        if found is None:
            raise self.error(f"there is no {self.kind} {name!r}")
        try:
            loaded: Any = found.load()
        except Exception as e:
            raise self.error(f"the {self.kind} {name} ({found.value}) cannot be imported: {e}") from e
        if not isinstance(loaded, self.spec) or getattr(loaded, "name", "") != name:
            raise self.error(f"{found.value} is not the {self.spec.__name__} of {self._a} {name}")
        package = getattr(loaded, "worker_package", None)
        if package is not None and package != found.value.partition(":")[0].partition(".")[0]:
            raise self.error(f"{found.value}: worker_package is not its package, so that no node would have it")
        return loaded

    @property
    def _a(self) -> str:
        return f"{'an' if self.kind[0] in 'aeiou' else 'a'} {self.kind}"

    def _module(self, name: str) -> str:
        """Module of a built-in SPEC, "" where there is none."""
        if name in self.others or "_" in name or not _NAME.match(name):
            return ""
        stem = name.replace("-", "_")  # `aiter-triton` lies in aiter_triton
        if (self.folder / stem / "spec.py").is_file():
            return f"{self.package}.{stem}.spec"
        return f"{self.package}.{stem}" if (self.folder / f"{stem}.py").is_file() else ""
