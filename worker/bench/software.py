"""Finds the software of this machine or image without importing it: ROCm, torch, triton, AITER, switches.

`stack` is what a bench records of each side (child.py); `installed` and `aiter_trees` are what `worker probe` prints.
"""

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
MAX_SWITCHES = 30


def installed(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Versions by name (rocm, torch, hip, triton, image), of those that are installed."""
    source = _torch_version_source()
    versions = {
        "rocm": _rocm(env),
        "torch": _assigned(source, "__version__") or _distribution("torch"),
        "hip": _assigned(source, "hip"),
        "triton": "",
        "image": clean(env.get(IMAGE_ENV, ""), 200),
    }
    for name in TRITONS:
        versions["triton"] = versions["triton"] or _distribution(name)
    return {name: version for name, version in versions.items() if version}


def aiter_trees(gfx: str = "") -> dict[str, Any] | None:
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
    names = [n for n in sorted(os.environ) if SWITCH.match(n) and not PRIVATE.search(n) and n not in OURS]
    return {name: clean(os.environ[name], 100) for name in names[:MAX_SWITCHES]}


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
    if spec is None or spec.origin is None:
        return ""
    for folder in list(Path(spec.origin).parents)[:5]:
        if (folder / ".git").exists():
            return commit_of(folder, "")
    return ""


def _distribution(name: str) -> str:
    try:
        return clean(importlib.metadata.version(name), 80)
    except (importlib.metadata.PackageNotFoundError, ValueError, OSError, KeyError):
        return ""


def _torch_version_source() -> str:
    """Text of torch/version.py, "" if there is none. A build from source may have no other metadata."""
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return ""
        return (Path(spec.origin).parent / "version.py").read_text(errors="replace")
    except (ImportError, ValueError, OSError):
        return ""


def _assigned(source: str, name: str) -> str:
    """The text that Python source assigns to a name, such as `hip: Optional[str] = "7.0.1"`; "" if there is none."""
    match = re.search(rf"""^{name}\s*(?::[^=\n]*)?=\s*['"]([^'"]{{1,80}})""", source, re.M)
    return clean(match[1]) if match else ""


def _rocm(env: Mapping[str, str]) -> str:
    """The version of the ROCm that ROCM_PATH names, else of the usual one; "" if neither is there."""
    for folder in filter(None, (env.get("ROCM_PATH"), "/opt/rocm")):  # an empty path would be the current folder
        with contextlib.suppress(OSError):
            return clean((Path(folder) / ".info" / "version").read_text(errors="replace").split("\n")[0], 80)
    return ""
