"""The environment of a process of AITER: which inherited variables it gets, and which switches are recorded.

A switch is a variable that changes AITER's candidates, tables or build. Two patterns (worker/protocol/paths.py) name
them: AITER never inherits those of AITER_CLEARED, and those of AITER_SWITCHES only if the inventory sets them. The one
that counts for GPU_ARCHS, CU_NUM and the switches of single tuners is, in this order: the inventory's `aiter:` section,
its `env:`, the slot's own chip, the image. tune.sh has cleared some before us; CLEARED_ENV has their names and values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker import PACKAGE_PARENT
from worker.protocol.paths import AITER_CLEARED, AITER_SWITCHES, CLEARED_ENV, INVENTORY_ENV
from worker.tuners.aiter.findings import SHIM

WATCH_ENV = "GEMMFLEET_AITER_WATCH"
"""Names the folder in which the shim writes its records of the candidates."""
KNOWN_TO_AITER = ("gfx942", "gfx950")
"""Chips whose name AITER's build takes in GPU_ARCHS at every date; others it queries from the driver (`native`)."""


def chip_variables(device: Mapping[str, Any]) -> dict[str, str]:
    """GPU_ARCHS and CU_NUM of the slot's device. They are set because an image's GPU_ARCHS may be a list, of which
    AITER's `get_gfx()` takes the last entry, perhaps another chip."""
    gfx = str(device.get("gfx") or "")
    if not gfx.startswith("gfx"):
        return {}
    return {"GPU_ARCHS": gfx if gfx in KNOWN_TO_AITER else "native", "CU_NUM": str(device.get("cu_num") or 0)}


def environment(
    base: Mapping[str, str], root: Path, slot: Path | None, device: Mapping[str, Any], watched: Path | None = None
) -> dict[str, str]:
    """The environment of a process that imports `aiter` from `root`. Nothing of ours is AITER's to import.

    `device`: gfx and cu_num as far as they are known. `slot`: the slot's folder with `jit` (where AITER builds) and
    `tmp`. `watched`: the folder of a process whose candidates the shim reports.
    """
    env = chip_variables(device)
    env |= {name: value for name, value in base.items() if not _is_cleared(name, base)}

    ours = os.path.realpath(PACKAGE_PARENT)
    inherited = base.get("PYTHONPATH", "").split(os.pathsep)
    path = [str(root), *(folder for folder in inherited if folder and os.path.realpath(folder) != ours)]
    if watched:
        path.insert(0, str(SHIM))
        env[WATCH_ENV] = str(watched)
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
    env["PYTHONUNBUFFERED"] = "1"  # or prints would come in blocks
    env["PYTHONFAULTHANDLER"] = "1"
    if slot:
        env["AITER_JIT_DIR"] = str(slot / "jit")
        env["TMPDIR"] = str(slot / "tmp")
    return env


def inventory_switches(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Switches that the inventory sets, with their values; AITER gets them."""
    names = [name for name in base.get(INVENTORY_ENV, "").split() if name in base and is_switch(name)]
    return {name: base[name] for name in names if not _is_cleared(name, base)}


def cleared_names(base: Mapping[str, str] = os.environ) -> list[str]:
    """Names of inherited variables that AITER does not get, those that tune.sh cleared among them."""
    names = {word.partition("=")[0] for word in base.get(CLEARED_ENV, "").split()}
    names |= {name for name in base if is_switch(name) and _is_cleared(name, base)}
    return sorted(names)


def is_switch(name: str) -> bool:
    """True for a variable that changes AITER's candidates, tables or build."""
    return bool(AITER_CLEARED.fullmatch(name) or AITER_SWITCHES.fullmatch(name))


def _is_cleared(name: str, base: Mapping[str, str]) -> bool:
    """True if AITER must not inherit the variable."""
    if name == WATCH_ENV or AITER_CLEARED.fullmatch(name):
        return True
    return is_switch(name) and name not in base.get(INVENTORY_ENV, "").split()


def switch_record(device: Mapping[str, Any], base: Mapping[str, str] = os.environ) -> dict[str, dict[str, str]]:
    """Switches for provenance: `set` (ours), `overridden` (what the image had of those), `kept` (the inventory's)."""
    kept = inventory_switches(base)
    image_values = dict(word.split("=", 1) for word in base.get(CLEARED_ENV, "").split() if "=" in word)
    image_values |= base
    ours = {name: value for name, value in chip_variables(device).items() if name not in kept}
    overridden = {name: image_values[name] for name, value in ours.items() if image_values.get(name, value) != value}
    return {"set": ours, "overridden": overridden, "kept": kept}


def switch_warnings(device: Mapping[str, Any], base: Mapping[str, str] = os.environ) -> list[str]:
    """Warnings about switches of the inventory that change the candidates."""
    gfx = device.get("gfx")
    cu_num = device.get("cu_num")
    harmless = {"GPU_ARCHS": ("native", gfx), "CU_NUM": ("0", str(cu_num))}
    here = f"this slot has {gfx or 'no chip that is known'} with {cu_num} compute units"
    warnings = []
    for name, value in inventory_switches(base).items():
        if value.split(";")[-1].strip() not in harmless.get(name, ()):
            kept = f"{name}={value} of the inventory is kept"
            warnings.append(f"{kept}, which changes AITER's candidates or their verdicts: {here}")
    return warnings
