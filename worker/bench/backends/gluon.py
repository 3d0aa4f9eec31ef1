"""Backend `aiter-gluon`: AITER's Gluon kernels, there from v0.1.11 (2026-01-21) on, or overlaid from elsewhere.

Before anything is imported the kernel's file is read: is it there, does it fit the Triton that is installed, is there a
configuration for it. `instr_shape` of an MFMA layout has two elements before Triton 3.6 and three since; AITER's file
took both from 2026-04-07 on.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.aiter_tree.scratch import ScratchTree
from worker.bench.backends.inputs import Inputs
from worker.bench.backends.measuring import BoundCase
from worker.bench.backends.with_aiter import bound, chosen, enter
from worker.bench.case import Case
from worker.bench.software import installed
from worker.families import FAMILIES
from worker.protocol.bench import Options
from worker.tuners.common.calls import find_function
from worker.tuners.common.device import Device
from worker.tuners.common.problem import UnavailableError, UnsupportedError

OPS = {f.name: f.aiter.gluon_op for f in FAMILIES.values() if f.aiter.gluon_op}
FOLDER = "aiter/ops/triton/gluon"
CONFIGS = "aiter/ops/triton/configs"
CHIP = "gfx950"
NEW_LAYOUT = (3, 6)


class GluonBackend:
    """The wrappers of aiter/ops/triton/gluon."""

    def __init__(self, options: Options, device: Device) -> None:
        self._overlay = options.gluon
        self._device = device
        self._root = Path()

    def load(self) -> dict[str, Any]:
        tree = chosen()
        facts: dict[str, Any] = {}
        if self._overlay:
            check_version(self._overlay)
            try:
                tree = ScratchTree.with_files(tree, Path.cwd() / "aiter-with-gluon", self._overlay)
            except OSError as e:
                raise UnavailableError(f"the files of --gluon-from cannot be overlaid: {e}") from e
            facts["gluon"] = {rel: hashlib.sha256(t.encode()).hexdigest()[:16] for rel, t in self._overlay.items()}
        self._root = tree.root
        return {"aiter": enter(tree), **facts}

    def bind(self, case: Case, first: Inputs) -> BoundCase:
        op = OPS.get(case.family)
        if op is None or case.b:
            raise UnsupportedError(f"AITER has no Gluon kernel for {case.family}; it has {', '.join(OPS)}")
        gfx = str(self._device.info().get("gfx", ""))
        if self._device.gpu and gfx != CHIP:
            raise UnavailableError(f"AITER's Gluon kernels are written for {CHIP}; this is {gfx}")
        file = self._root / FOLDER / f"{op}.py"
        if not file.is_file():
            raise UnavailableError(f"this AITER has no {FOLDER}/{op}.py (it came with v0.1.11); --gluon-from overlays")
        check_version({f"{FOLDER}/{op}.py": file.read_text(errors="replace")})
        if not has_config(self._root, op):
            raise UnavailableError(
                f"there is no configuration of {op} for Gluon below {CONFIGS}; --gluon-from overlays"
            )
        function, where = find_function([(f"aiter.ops.triton.gluon.{op}", op)])
        return bound(function, where, case)


def needed_version(text: str) -> str:
    """Triton version that a kernel's file needs: `>=3.6`, `<3.6`, or "" for any (or unknown)."""
    if "TRITON_VERSION_GE_3_6" in text:
        return ""
    sizes = {len([p for p in m.split(",") if p.strip()]) for m in re.findall(r"instr_shape\s*=\s*\[([^\]]*)\]", text)}
    if sizes == {3}:
        return ">=3.6"
    return "<3.6" if sizes == {2} else ""


def check_version(files: Mapping[str, str], triton: str | None = None) -> None:
    """Raise UnavailableError where a kernel needs another Triton than the one installed."""
    there = installed().get("triton", "") if triton is None else triton
    for rel, text in files.items():
        needed = needed_version(text) if rel.endswith(".py") else ""
        if not needed:
            continue
        if not there:
            raise UnavailableError(f"{rel} wants Triton {needed}, and none is installed")
        version = tuple(int(p) for p in re.findall(r"\d+", there)[:2])
        if (version >= NEW_LAYOUT) != (needed == ">=3.6"):
            raise UnavailableError(f"{rel} wants Triton {needed} (its instr_shape), and {there} is installed")


def has_config(root: Path, op: str) -> bool:
    """True where there is a configuration, in the folders of any AITER version.

    In order of age: configs/gemm/gluon/<arch>-GEMM-NAME*.json, <arch>/gluon/gemm/, configs/<arch>/gluon/gemm/<op>/.
    """
    name = op.removeprefix("gemm_").upper()
    files = (root / CONFIGS).rglob("*.json")
    return any("gluon" in p.parts and (f"GEMM-{name}" in p.name or op in p.parts) for p in files)
