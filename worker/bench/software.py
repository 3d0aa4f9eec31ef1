"""Software of this machine or image, read without importing any of it: ROCm, torch, triton, AITER, switches."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.aiter_tree.locate import NotATreeError, choose, commit_of, find_trees, imported_package, pick
from worker.protocol.paths import AITER_ROOT_ENV, IMAGE_ENV
from worker.text import clean

TRITONS = ("triton", "pytorch-triton-rocm", "pytorch-triton", "amd-triton", "triton-rocm")
"""Distributions that bring the module triton."""
SWITCH = re.compile(
    r"(AITER|AMD|AMDGCN|CUDA|DISABLE|GPU|HIP|HIPBLASLT|HSA|LLVM|MIOPEN|MKL|NVIDIA|OMP|PYTORCH|ROCBLAS|ROCM|TENSILE|TORCH"
    r"|TORCHINDUCTOR|TRITON)_[A-Z0-9_]+\Z"
)
"""Variables that may change what is compiled or how fast it runs."""
PRIVATE = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL")
OURS = ("AITER_JIT_DIR", "TRITON_CACHE_DIR")
"""Folders that we set ourselves: different by design."""


def installed(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Versions by name (rocm, torch, hip, triton, image), those that are there."""
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


def has_aiter(env: Mapping[str, str] = os.environ) -> bool:
    """True where the backends of AITER find a tree: the one that the inventory names, or this Python's."""
    try:
        choose(env.get(AITER_ROOT_ENV, ""))
    except NotATreeError:
        return False
    return True


def switches(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The switches that are set, without what may be private."""
    found = (n for n in sorted(env) if SWITCH.match(n) and not PRIVATE.search(n) and n not in OURS)
    return {name: clean(env[name], 100) for name in list(found)[:30]}


def stack() -> dict[str, Any]:
    """python, torch, triton, rocm, hip, commits of source checkouts, switches; nothing is imported."""
    made: dict[str, Any] = {"python": platform.python_version(), **installed()}
    for package in ("triton", "aiter"):
        commit, branch = _checkout(package)
        made |= {f"{package}_commit": commit} if commit else {}
        made |= {f"{package}_branch": branch} if branch else {}
    return {**made, "switches": switches()}


def _checkout(package: str) -> tuple[str, str]:
    """(commit, branch) of the git checkout that a package is imported from; "" where there is none."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return "", ""
    if spec is None or not spec.origin:
        return "", ""
    for root in list(Path(spec.origin).parents)[:5]:
        if (root / ".git").exists():
            commit = commit_of(root, "")
            return commit, _branch(root)
    return "", ""


def _branch(root: Path) -> str:
    try:
        head = (root / ".git" / "HEAD").read_text(errors="replace").strip()
    except OSError:
        return ""
    return clean(head.removeprefix("ref: refs/heads/"), 100) if head.startswith("ref: ") else ""


def _distribution(name: str) -> str:
    try:
        return clean(importlib.metadata.version(name), 80)
    except (importlib.metadata.PackageNotFoundError, ValueError, OSError, KeyError):
        return ""


def _torch() -> tuple[str, str]:
    """(version, HIP version) as torch/version.py has them; a build from source may have no metadata."""
    try:
        spec = importlib.util.find_spec("torch")
        text = (Path(spec.origin).parent / "version.py").read_text(errors="replace") if spec and spec.origin else ""
    except (ImportError, ValueError, OSError):
        text = ""
    version = re.search(r"""^__version__\s*=\s*['"]([^'"]{1,80})""", text, re.M)
    hip = re.search(r"""^hip\s*(?::[^=\n]*)?=\s*['"]([^'"]{1,80})""", text, re.M)
    return clean(version[1], 80) if version else _distribution("torch"), clean(hip[1], 80) if hip else ""


def _rocm(env: Mapping[str, str]) -> str:
    for folder in (env.get("ROCM_PATH", ""), "/opt/rocm"):
        try:
            return clean((Path(folder) / ".info" / "version").read_text(errors="replace").split("\n")[0], 80)
        except OSError:
            continue
    return ""
