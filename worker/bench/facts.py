"""What a software stack is, for the record: versions, commits, device, and the switches in its environment."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.device.software import installed
from worker.text import clean
from worker.tuners.aiter.tree.versions import commit_of

SWITCH = re.compile(
    r"(AITER|AMD|AMDGCN|CUDA|DISABLE|GPU|HIP|HIPBLASLT|HSA|LLVM|MIOPEN|MKL|NVIDIA|OMP|PYTORCH|ROCBLAS|ROCM|TENSILE|TORCH"
    r"|TORCHINDUCTOR|TRITON)_[A-Z0-9_]+\Z"
)
"""Variables that may change what is compiled or how fast it runs."""
PRIVATE = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL")
OURS = ("AITER_JIT_DIR", "TRITON_CACHE_DIR")
"""Folders that we set ourselves: different by design."""


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
            commit, _ = commit_of(root, "")
            return commit, _branch(root)
    return "", ""


def _branch(root: Path) -> str:
    try:
        head = (root / ".git" / "HEAD").read_text(errors="replace").strip()
    except OSError:
        return ""
    return clean(head.removeprefix("ref: refs/heads/"), 100) if head.startswith("ref: ") else ""
