"""The environment of AITER's processes: what is inherited and would change the result is cleared, and recorded.

Who wins for GPU_ARCHS, CU_NUM and the switches of single tuners: the inventory's `aiter:` section over its `env:` over
ours, which is the slot's own chip, over what an image brings along.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLEARED = re.compile(
    r"AITER_CONFIG_\w+|AITER_REBUILD|AITER_(?:TUNE_GEMM|ONLINE_TUNE|BYPASS_TUNE_CONFIG|LOG_MORE|LOG_TUNED_CONFIG)"
    r"|AITER_JIT_DIR|AITER_META_DIR|AITER_ASM_DIR|HIP_ONLINE_TUNING|PYTORCH_TUNABLEOP_\w+|GTUNE_\w+|TUNE_ONLY|OPUS_ONLY"
    r"|OPUS_SKIP_CKTILE"
)
"""Switches that choose other tables, other kernels or another build than the image's own."""
ASKED_FOR = re.compile(
    r"GPU_ARCHS|CU_NUM|TUNE_MOE_\w+|AITER_(?:TRITON_ONLY|KSPLIT|OPUS_TUNED_CSV_GLOB|TUNE_CANDIDATE_DUMP_DIR"
    r"|RUN_CONFIG_COS_TOL)"
)
"""Switches that change which candidates there are or how they are judged; cleared, unless the inventory names them."""
SHELL_CLEARED = "GEMMFLEET_CLEARED_ENV"
"""Names that tune.sh cleared before the worker began, GPU_ARCHS and CU_NUM with their values."""
INVENTORY = "GEMMFLEET_INVENTORY_ENV"
"""Names that the inventory sets; what else is there comes from the image."""
KNOWN_TO_AITER = ("gfx942", "gfx950")
"""Chips whose name AITER's build takes in GPU_ARCHS at every date; others it asks the driver for (`native`)."""


@dataclass(frozen=True, slots=True)
class Chip:
    """The slot's own, as rows are labelled with it."""

    gfx: str = ""
    cu_num: int | None = None

    def variables(self) -> dict[str, str]:
        """GPU_ARCHS and CU_NUM: `get_gfx()` takes the last entry of a list, which an image is built with."""
        if not self.gfx.startswith("gfx"):
            return {}
        arch = self.gfx if self.gfx in KNOWN_TO_AITER else "native"
        return {"GPU_ARCHS": arch, "CU_NUM": str(self.cu_num or 0)}


def asked_for(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Switches that the inventory sets, and that AITER is to have."""
    named = base.get(INVENTORY, "").split()
    return {n: base[n] for n in named if n in base and ASKED_FOR.fullmatch(n) and not CLEARED.fullmatch(n)}


def cleared(base: Mapping[str, str] = os.environ) -> list[str]:
    """Names of inherited variables that AITER is not to see, those that tune.sh took away among them."""
    earlier = [word.partition("=")[0] for word in base.get(SHELL_CLEARED, "").split()]
    return sorted({*earlier, *(name for name in base if _taken(name, base))})


def switched(chip: Chip, base: Mapping[str, str] = os.environ) -> dict[str, dict[str, str]]:
    """For provenance: `set` (ours), `overridden` (what the image had of those), `kept` (the inventory's)."""
    kept = asked_for(base)
    ours = {n: v for n, v in chip.variables().items() if n not in kept}
    earlier = dict(word.split("=", 1) for word in base.get(SHELL_CLEARED, "").split() if "=" in word)
    had = {**earlier, **{n: v for n, v in base.items() if n not in kept}}
    overridden = {n: had[n] for n, v in ours.items() if had.get(n, v) != v}
    return {"set": ours, "overridden": overridden, "kept": kept}


def warnings(chip: Chip, base: Mapping[str, str] = os.environ) -> list[str]:
    """What of the inventory's own switches changes the candidates."""
    kept, out = asked_for(base), []
    arch = kept.get("GPU_ARCHS", "").split(";")[-1].strip()
    if arch and arch not in ("native", chip.gfx):
        out.append(
            f"GPU_ARCHS={kept['GPU_ARCHS']} of the inventory is kept: AITER looks for the kernels of {arch}, and this "
            f"slot is {chip.gfx or 'of no chip that is known'}; candidates are missing or wrong for it"
        )
    if "CU_NUM" in kept and kept["CU_NUM"].strip() not in ("0", str(chip.cu_num)):
        out.append(
            f"CU_NUM={kept['CU_NUM']} of the inventory is kept, and this slot has {chip.cu_num} compute units: rows "
            "would be looked up for another chip"
        )
    others = sorted(n for n in kept if n not in ("GPU_ARCHS", "CU_NUM"))
    if others:
        out.append(f"{', '.join(others)} of the inventory: kept, which changes AITER's candidates or their verdicts")
    return out


def environment(
    base: Mapping[str, str],
    *,
    paths: list[Path],
    jit: Path,
    tmp: Path,
    shim: Path | None = None,
    journal: Path | None = None,
    blocked: Path | None = None,
    worker_code: Path | None = None,
    chip: Chip | None = None,
) -> dict[str, str]:
    """The environment of one process. `paths`: where `aiter` is imported from, first; `jit`, `tmp`: the slot's own.

    `worker_code` (our own package's folder) is taken off the path: nothing of ours is AITER's to import.
    """
    env = {k: v for k, v in base.items() if not _taken(k, base)}
    env = {**(chip.variables() if chip else {}), **env}
    inherited = [
        p for p in base.get("PYTHONPATH", "").split(os.pathsep)
        if p and not (worker_code and os.path.realpath(p) == os.path.realpath(worker_code))
    ]  # fmt: skip
    ours = [str(shim)] if shim else []
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*ours, *map(str, paths), *inherited]))
    env["PYTHONUNBUFFERED"] = "1"  # prints would come in blocks else
    env["PYTHONFAULTHANDLER"] = "1"
    env["AITER_JIT_DIR"] = str(jit)
    env["TMPDIR"] = str(tmp)
    for name, path in (("GEMMFLEET_AITER_JOURNAL", journal), ("GEMMFLEET_AITER_BLOCKED", blocked)):
        env.pop(name, None)
        if shim and path:
            env[name] = str(path)
    return env


def chip_of(device: Mapping[str, Any]) -> Chip:
    """Of a device as probe and torch name it."""
    number = device.get("cu_num")
    return Chip(str(device.get("gfx") or ""), int(number) if number else None)


def _taken(name: str, base: Mapping[str, str]) -> bool:
    """Whether an inherited variable is kept from AITER."""
    if CLEARED.fullmatch(name):
        return True
    return bool(ASKED_FOR.fullmatch(name)) and name not in base.get(INVENTORY, "").split()
