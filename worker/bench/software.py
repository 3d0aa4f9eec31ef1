"""Finds the software of this machine or image without importing it: ROCm, torch, triton, AITER, switches."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.aiter_tree.locate import NotATreeError, commit_of, find_trees, imported_package, pick
from worker.protocol.paths import IMAGE_ENV
from worker.text import clean

TRITONS = ("triton", "pytorch-triton-rocm", "pytorch-triton", "amd-triton", "triton-rocm")
"""Distributions that contain the module triton."""
SWITCH = re.compile(
    r"(AITER|AMD|AMDGCN|CUDA|DISABLE|GPU|HIP|HIPBLASLT|HSA|LLVM|MIOPEN|MKL|NVIDIA|OMP|PYTORCH|ROCBLAS|ROCM|TENSILE|TORCH"
    r"|TORCHINDUCTOR|TRITON)_[A-Z0-9_]+\Z"
)
"""Variables that may change what is compiled or how fast it runs."""
PRIVATE = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL")
OURS = ("AITER_JIT_DIR", "TRITON_CACHE_DIR")
"""Folders that we set ourselves, and that differ by design."""


def installed(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Versions by name (rocm, torch, hip, triton, image), of those that are installed."""
    torch, hip = _torch()
    found = {
        "rocm": _rocm(env),
        "torch": torch,
        "hip": hip,
        "triton": next((v for v in map(_distribution, TRITONS) if v), ""),
        "image": clean(env.get(IMAGE_ENV, ""), 200),
    }
    return {name: value for name, value in found.items() if value}


def aiter(gfx: str = "") -> dict[str, Any] | None:
    """The AITERs of this machine: what `import aiter` means, which tree would be used, and all of them; or None."""
    trees = find_trees(gfx=gfx)
    package = imported_package()
    if not trees and package is None:
        return None
    try:
        chosen, notes = pick(trees)
    except NotATreeError as e:
        return {"imported": str(package or ""), "chosen": "", "notes": [str(e)], "trees": []}
    return {
        "imported": str(package or ""),
        "chosen": str(chosen.root),
        "notes": list(notes),
        "trees": [t.as_json() for t in trees],
    }


def switches() -> dict[str, str]:
    """The switches that are set, without what may be private."""
    found = [n for n in sorted(os.environ) if SWITCH.match(n) and not PRIVATE.search(n) and n not in OURS]
    return {name: clean(os.environ[name], 100) for name in found[:30]}


def stack() -> dict[str, Any]:
    """python, torch, triton, rocm, hip, commits of source checkouts, switches; nothing is imported."""
    commits = {f"{package}_commit": commit for package in ("triton", "aiter") if (commit := _commit(package))}
    return {"python": platform.python_version(), **installed(), **commits, "switches": switches()}


def _commit(package: str) -> str:
    """Commit of the git checkout that a package is imported from; "" if it is not a checkout."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return ""
    roots = list(Path(spec.origin).parents)[:5] if spec and spec.origin else []
    return next((commit_of(root, "") for root in roots if (root / ".git").exists()), "")


def _distribution(name: str) -> str:
    try:
        return clean(importlib.metadata.version(name), 80)
    except (importlib.metadata.PackageNotFoundError, ValueError, OSError, KeyError):
        return ""


def _torch() -> tuple[str, str]:
    """(version, HIP version) from torch/version.py, because a build from source may have no metadata."""
    try:
        spec = importlib.util.find_spec("torch")
        text = (Path(spec.origin).parent / "version.py").read_text(errors="replace") if spec and spec.origin else ""
    except (ImportError, ValueError, OSError):
        text = ""
    version, hip = (
        re.search(rf"""^{name}\s*(?::[^=\n]*)?=\s*['"]([^'"]{{1,80}})""", text, re.M) for name in ("__version__", "hip")
    )
    return clean(version[1]) if version else _distribution("torch"), clean(hip[1]) if hip else ""


def _rocm(env: Mapping[str, str]) -> str:
    """The version of the ROCm that ROCM_PATH names, else of the usual one; "" if neither is there."""
    for folder in filter(None, (env.get("ROCM_PATH"), "/opt/rocm")):  # an empty path would be the current folder
        with contextlib.suppress(OSError):
            return clean((Path(folder) / ".info" / "version").read_text(errors="replace").split("\n")[0], 80)
    return ""
