"""Asks vLLM's and SGLang's own code, without a GPU, which look-up reads a config file.

A look-up is a function of the engine that forms a file's name from the sizes of a layer, and reads the file if it is
there. `EngineLookups.find_lookup` gives all of them the sizes in a file's name, and sees which one forms that very
name. `entry_kernels.py` asks which kernel an entry gets. `orchestrator/configs/engine_check.py` makes findings of both.
Imports triton, and torch only to ask an engine: `configs check` itself does without its two seconds.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import triton

from worker.text import Level
from worker.triton_configs.engine_config_file import EngineConfigFile
from worker.triton_configs.engine_modules import replaced
from worker.triton_configs.engine_package import PROJECTS, EngineDevice, ServingEngineError
from worker.triton_configs.pair import Values
from worker.triton_configs.serving_engine import LINEAR_LOOKUP, MOE_LOOKUP, load_engine, recording_paths
from worker.tuners.engines.entry_kernels import EntryKernels, call_by_name
from worker.tuners.search.compiling import compile_for
from worker.tuners.search.target import Target, datasheet_target

Table = Mapping[int, Values]
"""The entries of a file by M."""


class FileFault(NamedTuple):
    """A fault of a file or an entry: `("error", "look-up", "get_moe_configs fails: ...")`."""

    level: Level
    rule: str
    text: str


class LookupAnswer(NamedTuple):
    """The look-up that reads a file ("" if none does), the entries that it gets, and what is wrong."""

    lookup: str
    table: Table
    fault: FileFault | None


# Chips by a word of their devices' names; entries of other devices are not compiled. NVIDIA's shared memory of a
# program: CUDA C Programming Guide, table of compute capabilities.
CHIPS = {
    "A[18]00": replace(datasheet_target(90), arch=80, shared_bytes=166912),
    "L20|L40S?|RTX_4090|RTX_(6000|5880)_Ada": replace(datasheet_target(90), arch=89, shared_bytes=101376),
    "H[128]00|H20": datasheet_target(90),
    "G?B200": replace(datasheet_target(90), arch=100),
    "G?B300": replace(datasheet_target(90), arch=103),
    "RTX_PRO_6000": replace(datasheet_target(90), arch=120, shared_bytes=101376),
    "GB10": replace(datasheet_target(90), arch=121, shared_bytes=101376),
    r"MI3(00|08|25)\w?": datasheet_target("gfx942"),
    r"MI35[05]\w?": datasheet_target("gfx950"),
    "R9700": replace(datasheet_target("gfx942"), arch="gfx1201", warp_size=32),
    "8060S": replace(datasheet_target("gfx942"), arch="gfx1151", warp_size=32),
}


class EngineLookups:
    """The look-ups of one engine, loaded into this process as they are on one device, and its `kernels`."""

    def __init__(self, package: Path, device: str) -> None:
        """`device`: as in file names. Raises ServingEngineError."""
        self.target = chip_of(device)  # None: nothing can be compiled for it
        compile_target = self.target or datasheet_target(90)
        compile_for(compile_target)
        names = PROJECTS[package.name]
        lookups = [(names.fp8, LINEAR_LOOKUP), (names.moe_lookup, MOE_LOOKUP), *names.further_lookups]
        wanted = [names.moe_dtype, *lookups]
        more = [module for module, _ in wanted if module not in names.executed]
        name = name_in_vllm(package, device).replace("_", " ")
        self.engine = load_engine(package, EngineDevice(name, compile_target.arch), more)
        try:
            loaded = [inspect.unwrap(getattr(sys.modules[module], function)) for module, function in wanted]
            self.kernels = EntryKernels(self.engine, compile_target)
        except AttributeError as e:
            raise ServingEngineError(f"{package} is of a version that is not known: {e}") from e
        self._moe_dtype, *self._lookups = loaded

    def find_lookup(self, file: EngineConfigFile) -> LookupAnswer:
        """Ask each look-up that takes such sizes for the file, until one reads it or another file of its name.

        If none does, the fault names the parts of the file's name that the closest look-up does not form.
        """
        arguments = self._lookup_arguments(file)
        name_parts = _parts(file.path)
        missing_parts = name_parts
        for lookup in self._lookups:
            if not inspect.signature(lookup).parameters.keys() <= arguments.keys():
                continue
            tried, table, fault = _ask_lookup(lookup, arguments)
            if not tried:
                continue
            read_path = tried[-1]  # a look-up tries paths until one exists
            if read_path == file.path:
                return LookupAnswer(lookup.__name__, table, fault)
            folders = [path.parent for path in tried if path.name == file.path.name]
            if folders and not file.path.is_relative_to(self.engine.package):
                text = f"never read: {lookup.__name__} takes this file from {folders[0]} alone"
                return LookupAnswer(lookup.__name__, {}, FileFault("error", "override", text))
            if read_path.name == file.path.name:
                return LookupAnswer(lookup.__name__, {}, _shadowed(file.path, read_path))
            for path in tried:
                missing = [part for part in name_parts if part not in _parts(path)]
                if missing and len(missing) < len(missing_parts):
                    missing_parts = missing
        text = f"never read: no look-up of this version forms {', '.join(missing_parts)}"
        return LookupAnswer("", {}, FileFault("error", "name", text))

    def _lookup_arguments(self, file: EngineConfigFile) -> Values:
        """The sizes of a file by the parameters' names of all look-ups."""
        import torch

        layer = file.layer
        block_n, block_k = layer.block or (0, 0)
        plain_dtype = torch.float32 if layer.dtype == "float32" else torch.bfloat16
        arguments: Values = {
            "N": layer.n,
            "inter_dim": layer.n,
            "block_n": block_n,
            "block_k": block_k,
            "dtype": call_by_name(self._moe_dtype, {"dtype": plain_dtype, f"use_{layer.dtype}": True}),
            "per_channel_quant": file.is_per_channel,
            "down_moe": file.is_second_product,
        }
        if layer.op == "moe":
            return {**arguments, "E": layer.e, "num_experts": layer.e}
        return {**arguments, "K": layer.k}


lookups_of = lru_cache(1)(EngineLookups)
"""The latest are kept: a process holds one engine."""


def chip_of(device: str) -> Target | None:
    """The chip of a device as file names have it, None for one that we do not know."""
    for word, target in CHIPS.items():
        if re.search(rf"(?:^|_)(?:{word})(?=[-_]|$)", device):
            return target
    return None


def name_in_vllm(package: Path, device: str) -> str:
    """The name that vLLM's map of AMD's device ids gives to a chip. The device's own if it has none, and for SGLang,
    which takes torch's names."""
    path = package / "platforms" / "rocm.py"
    if not path.is_file():
        return device
    names = re.findall(r'^    "0x\w+": "(\w+)"', path.read_text(), re.MULTILINE)
    chip = re.search(r"MI\d+|\d{4}[A-Z]", device)
    if chip is None or device in names:
        return device
    return next((name for name in names if chip[0] in name), device)


def _ask_lookup(lookup: Callable[..., Any], arguments: Values) -> tuple[list[Path], Table, FileFault | None]:
    """The paths that a look-up tries, in its order; the entries that it returns; the fault if it fails."""
    tried: list[Path] = []
    with replaced(os.path, {"exists": recording_paths(tried, os.path.exists)}):
        try:
            return tried, call_by_name(lookup, arguments) or {}, None
        except Exception as e:  # noqa: BLE001 - the engine's own errors are of any type
            fault = FileFault("error", "look-up", f"{lookup.__name__} fails: {type(e).__name__}: {e}")
            return tried, {}, fault


def _shadowed(path: Path, read_path: Path) -> FileFault:
    """SGLang has a folder of files for each version of Triton, and reads that of the one that is installed first."""
    text = f"not read by Triton {triton.__version__}, for which the file in {read_path.parent.name} counts"
    return FileFault("warning", "shadowed", f"{text}; only by that of {path.parent.name}")


def _parts(path: Path) -> list[str]:
    """The parts of a file's name: `E=8`, `N=7168`, `device_name=NVIDIA_H200`, ..."""
    return re.split(r",(?=[a-z])", path.name.removesuffix(".json"))
