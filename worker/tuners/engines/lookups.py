"""Asks vLLM's and SGLang's own code, without a GPU, about a config file: which look-up reads it, and which kernel
Triton compiles for each of its entries.

A look-up is a function of the engine that forms a file's name from the sizes of a layer, and reads the file if it is
there. `EngineLookups.find_lookup` gives all of them the sizes in a file's name, and sees which one forms that very
name. `bind` and `compiled` then run the engine's launcher with an entry on tensors without memory: it ends where Triton
would compile, or with the compiled kernel. `orchestrator/configs/engine_check.py` makes findings of the answers; the
tuner's own launches are in `source.py`. Imports triton, and torch only to ask an engine: `configs check` itself does
without its two seconds.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import triton
import triton.language as tl

from worker.text import Level, clean
from worker.triton_configs.engine_config_file import TOPK, EngineConfigFile
from worker.triton_configs.engine_modules import replaced
from worker.triton_configs.engine_package import PROJECTS, EngineDevice, ServingEngineError
from worker.triton_configs.serving_engine import (
    LINEAR_LOOKUP,
    MOE_LOOKUP,
    Values,
    load_engine,
    recording_paths,
    taking_quantized,
)
from worker.tuners.search.compiling import compile_candidate, compile_for, compiling, facts_of
from worker.tuners.search.source import CompileFacts, KernelSource
from worker.tuners.search.target import Target, datasheet_target

if TYPE_CHECKING:
    import torch

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
QUANTIZED = ("fp8_w8a8", "int8_w8a8", "int8_w8a16", "int4_w4a16")
"""The dtypes for which both launchers have a flag `use_...`."""


class EngineLookups:
    """The look-ups and launchers of one engine, loaded into this process as they are on one device.

    It is a `KernelSource` as far as `compile_candidate` uses one: `enter` and `compile`.
    """

    def __init__(self, package: Path, device: str) -> None:
        """`device`: as in file names. Raises ServingEngineError."""
        self.target = chip_of(device)  # None: nothing can be compiled for it
        self._compile_target = self.target or datasheet_target(90)
        self._results: dict[str, Values] = {}
        self.enter(self._compile_target)
        names = PROJECTS[package.name]
        wanted = [
            names.moe_dtype,
            (names.moe_lookup, "get_default_config"),
            (names.moe, names.moe_launcher),
            (names.fp8, LINEAR_LOOKUP),
            (names.moe_lookup, MOE_LOOKUP),
            *names.further_lookups,
        ]
        more = [module for module, _ in wanted if module not in names.executed]
        name = name_in_vllm(package, device).replace("_", " ")
        self.engine = load_engine(package, EngineDevice(name, self._compile_target.arch), more)
        try:
            loaded = [inspect.unwrap(getattr(sys.modules[module], function)) for module, function in wanted]
        except AttributeError as e:
            raise ServingEngineError(f"{package} is of a version that is not known: {e}") from e
        self._moe_dtype, self._moe_default, self._moe_launcher, *self._lookups = loaded

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

    def bind(self, file: EngineConfigFile, m: int, values: Values | None) -> tuple[str, Values]:
        """(key, constants) of the kernel that the engine would launch for M rows with these values, or its default.

        The key differs wherever the code may. Raises what the engine or Triton raises.
        """
        specialization: list[str] = []
        constants: Values = {}

        def stop_compilation(*, fn: Any, compile: Values, **_: Any) -> bool:
            names = fn.jit_function.arg_names
            specialization.extend((fn.jit_function.cache_key, compile["specialization_data"]))
            constants.update({names[path[0]]: value for path, value in compile["constants"].items()})
            return True  # nothing is compiled then

        with replaced(cast(ModuleType, triton.knobs.runtime), {"jit_cache_hook": stop_compilation}):
            self._launch(file, m, values)
        return hashlib.sha256(repr(specialization).encode()).hexdigest(), constants

    def compiled(self, key: str, file: EngineConfigFile, m: int, values: Values) -> Values:
        """Status, detail and facts of an entry, which is compiled once. `key`: of `bind`."""
        if key not in self._results:
            source = cast(KernelSource, self)
            status, detail, facts = compile_candidate(source, self._compile_target, (file, m, values))
            fact_fields = asdict(facts) if facts else {"spills": 0}
            self._results[key] = {**fact_fields, "status": status, "detail": clean(detail, 300)}
        return self._results[key]

    def enter(self, target: Target) -> None:
        """Have this process compile for a chip, as the search's sources do."""
        compile_for(target)

    def compile(self, job: tuple[EngineConfigFile, int, Values], target: Target) -> CompileFacts:
        """Compile an entry's kernel. Raises what the compiler raises."""
        with compiling() as kernels:
            self._launch(*job)
        self.engine.kernel(job[0].layer.op).device_caches.clear()  # else it would not bind again
        return facts_of(kernels)

    def _launch(self, file: EngineConfigFile, m: int, values: Values | None) -> None:
        """Run the engine's launcher on operands without memory, with these values or the engine's default.

        Of experts it launches their first GEMM, or their second if the file is for that one.
        """
        if file.layer.op == "linear":
            table = {m: values} if values else None
            with replaced(self.engine.fp8, {LINEAR_LOOKUP: lambda *_: table}):
                self.engine.run_linear(file.layer, m)
            return
        arguments = self._moe_arguments(file, m)
        config = values or call_by_name(self._moe_default, arguments)
        arguments["config"] = {name: value for name, value in config.items() if name != "USE_TMA"}
        with taking_quantized(self.engine.moe, lambda _: arguments["A_scale"]):
            call_by_name(self._moe_launcher, arguments)

    def _moe_arguments(self, file: EngineConfigFile, m: int) -> Values:
        """Arguments of a MoE layer by the names of both engines' launchers and defaults, all but the config."""
        layer = file.layer
        empty = self._empty
        return {
            **self._operand_arguments(file, m),
            "M": m,
            "E": layer.e,
            "N": layer.n,
            "K": layer.k,
            "topk": TOPK,
            "dtype": layer.dtype or None,
            "is_marlin": False,
            "B_zp": None,
            "B_bias": None,
            "bias": None,
            "mul_routed_weight": file.is_second_product,
            "topk_weights": empty("float32", m, TOPK),
            "topk_ids": empty("int32", m, TOPK),
            "sorted_token_ids": empty("int32", m * TOPK),
            "expert_ids": empty("int32", m * TOPK),
            "num_tokens_post_padded": empty("int32", 1),
            "block_shape": list(layer.block) if layer.block else None,
            "compute_type": tl.float32 if layer.dtype == "float32" else tl.bfloat16,
            "per_channel_quant": file.is_per_channel,
            **{f"use_{name}": layer.dtype == name for name in QUANTIZED},
        }

    def _operand_arguments(self, file: EngineConfigFile, m: int) -> Values:
        """Operands and output of the product that the file is for: A [rows, K], B [experts, N, K], their scales, C."""
        layer = file.layer
        dtype = layer.dtype
        n = 2 * layer.n
        k = layer.k
        rows_of_token = TOPK
        if file.is_second_product:
            n = layer.k
            k = layer.n
            rows_of_token = 1
        block_n, block_k = layer.block or (n, k)
        a_scale_sizes = [m, -(-k // block_k)]
        b_scale_sizes = [layer.e, -(-n // block_n), -(-k // block_k)]
        if dtype == "fp8_w8a8" and not layer.block and not file.is_per_channel:  # one scale for a whole tensor
            a_scale_sizes = [1]
            b_scale_sizes = [layer.e]
        return {
            "A": self._empty("" if dtype.endswith("a16") else dtype, m, k),
            "A_scale": self._empty("float32", *a_scale_sizes) if dtype.endswith("a8") else None,
            "B": self._empty(dtype, layer.e, n, k),
            "B_scale": self._empty("float32", *b_scale_sizes) if "_w" in dtype else None,
            "C": self._empty("", m, TOPK, n),
            "top_k": rows_of_token,
        }

    def _empty(self, dtype: str, *sizes: int) -> torch.Tensor:
        """A tensor without memory. `dtype`: as in file names, of which the first word counts; bf16 for all others."""
        import torch

        dtypes = {"fp8": self.engine.device.fp8, "int8": torch.int8, "float32": torch.float32, "int32": torch.int32}
        return torch.empty(*sizes, dtype=dtypes.get(dtype.partition("_")[0], torch.bfloat16), device="meta")


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


def call_by_name(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function with those of the arguments that it has parameters for."""
    names = inspect.signature(function).parameters
    return function(**{name: arguments[name] for name in names if name in arguments})


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
