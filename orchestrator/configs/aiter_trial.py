"""AITER's own `get_gemm_config`, asked in a process of its own.

It imports `aiter` as it is with AITER_TRITON_ONLY=1, on a Triton without a GPU that is made to name the chip. If this
import fails (no torch, an older AITER), the packages above the loader stay empty and its own three files run. Without
Triton there is no trial, and gemmfleet's own reading counts.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from worker.foreign.runner import ForeignCodeError, Limits, call
from worker.triton_configs.config_file import Bucket

TRIAL_LIMITS = Limits(seconds=300, memory=16 << 30)
LOADER_MODULE = "aiter.ops.triton.utils.gemm_config_utils"
PACKAGES = ("aiter", "aiter.ops", "aiter.ops.triton", "aiter.ops.triton.utils", "aiter.ops.triton.utils._triton")
"""The packages above the loader's three files."""
LoaderArguments = dict[str, Any]
"""Arguments of one call of `get_gemm_config`, None for those not given; K is the logical one."""


class LoaderAnswers(NamedTuple):
    """Answers of `call_loader`."""

    values: list[Bucket | None]
    """The config for each call, None if the call failed."""
    how: str
    """The way in which the loader was imported."""
    triton: str
    """Triton's version."""


class LookupTrial(NamedTuple):
    """The answers of AITER's function, or why it could not be asked."""

    answers: Sequence[Bucket | None] = ()
    """The config for each call, None if the call failed."""
    how: str = ""
    """The function that answered, for the user: `get_gemm_config with Triton 3.4.0, imported as it is`."""
    why_not: str = ""
    """The reason why it could not be asked, "" if it was."""


def run_trial(root: Path, arch: str, calls: Sequence[LoaderArguments], *, alone: bool = False) -> LookupTrial:
    """Ask the real function; `alone` its three files without the rest of `aiter`, which takes seconds to import.

    No exception: what stands in the way is in `why_not`.
    """
    arguments = [{name: value for name, value in one_call.items() if value is not None} for one_call in calls]
    env = {"AITER_TRITON_ONLY": "1"}
    try:
        answers = call(call_loader, root, arch, alone, arguments, limits=TRIAL_LIMITS, env=env, packages=True)
    except (OSError, ForeignCodeError) as e:
        why_not = f"AITER's function cannot run here: it {e}"
        if re.search("No module named '(?!aiter)", str(e)):
            why_not += "; pip install '.[triton]' in a checkout of gemmfleet"
        return LookupTrial(why_not=why_not)
    if len(answers.values) != len(calls):
        return LookupTrial(why_not=f"AITER's function gave {len(answers.values)} answers to {len(calls)} calls")
    return LookupTrial(answers.values, f"get_gemm_config with Triton {answers.triton}, {answers.how}")


def call_loader(root: Path, arch: str, alone: bool, calls: list[LoaderArguments]) -> LoaderAnswers:
    """Call the `get_gemm_config` of a tree. It runs code of the tree: call it in a process of its own."""
    import triton

    _name_chip(triton, int(arch) if arch.isdigit() else arch)
    sys.path.insert(0, str(root))
    loader, how = _import_loader(root, alone)
    values: list[Bucket | None] = []
    for arguments in calls:
        if "bounds" in arguments:
            arguments["bounds"] = tuple(arguments["bounds"])
        try:
            answer = loader.get_gemm_config(**arguments)
        except Exception:  # noqa: BLE001 - whatever the tree raises
            values.append(None)
        else:
            values.append(answer[0] if isinstance(answer, tuple) else answer)
    return LoaderAnswers(values, how, triton.__version__)


def _import_loader(root: Path, alone: bool) -> tuple[ModuleType, str]:
    """(the loader's module, how it was imported)"""
    how = "the loader alone"
    if not alone:
        try:
            return importlib.import_module(LOADER_MODULE), "imported as it is"
        except Exception as e:  # noqa: BLE001 - whatever the tree raises
            how = f"the loader alone ({type(e).__name__} in `import aiter`)"
    _leave_packages_empty(root)
    return importlib.import_module(LOADER_MODULE), how


def _name_chip(triton: Any, arch: int | str) -> None:
    """Make a Triton without a GPU name the chip."""
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda" if isinstance(arch, int) else "hip", arch, 64)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))


def _leave_packages_empty(root: Path) -> None:
    """Let the loader's packages be folders whose `__init__` does not run."""
    for name in list(sys.modules):
        if name.split(".")[0] == "aiter":
            del sys.modules[name]
    for name in PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package
