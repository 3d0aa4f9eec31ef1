"""Every look-up of an engine's config files, and the launchers of those for Triton, asked without a GPU: what reads a
file, and what Triton makes of each entry.

A look-up gets the sizes in a file's name. The engine reads the file only if the look-up then asks for that very name.
Launchers run on operands without memory, and end where Triton would compile, or with the compiled kernel. vLLM and
SGLang. Imports torch and triton.
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
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl

from worker.text import Level, clean
from worker.triton_configs.engine import PARTS, Device, EngineError, Layer, Values, load, noting, replaced
from worker.tuners.search.compiling import compile_candidate, compile_for, compiling, facts_of
from worker.tuners.search.source import CompileFacts, KernelSource, Target, known

Table = Mapping[int, Values]
Fault = tuple[Level, str, str]
"""Level, rule, text."""
_V, _S = PARTS["vllm"], PARTS["sglang"]
LINEAR, MOE = "get_w8a8_block_fp8_configs", "get_moe_configs"
"""Look-ups of both engines by whose entries launchers can be asked here."""
# Module and name: of what gives the dtype of a MoE layer as file names have it, of its default, of the launcher of its
# GEMMs, of all look-ups.
FUNCTIONS = {
    "vllm": (
        ("vllm.model_executor.layers.fused_moe.config", "_get_config_dtype_str"), (_V.moe_lookup, "get_default_config"),
        (_V.moe, "invoke_fused_moe_triton_kernel"), (_V.fp8, LINEAR), (_V.moe_lookup, MOE),
        ("vllm.model_executor.layers.fused_moe.fused_flydsl_moe", "try_get_optimal_config"),
    ),
    "sglang": (
        (_S.moe_lookup, "get_config_dtype_str"), (_S.moe_lookup, "get_default_config"),
        (_S.moe, "invoke_fused_moe_kernel"), (_S.fp8, LINEAR), (_S.moe_lookup, MOE),
        (_S.fp8, "get_w8a8_channelwise_fp8_configs"),
        ("sglang.kernels.ops.gemm.int8_kernel", "get_w8a8_block_int8_configs"),
    ),
}  # fmt: skip
# Devices by a word of their names; files of others are only looked up. NVIDIA's shared memory of a program: CUDA C
# Programming Guide, table of compute capabilities.
_CHIPS = {
    "A[18]00": replace(known(90), arch=80, shared_bytes=166912),
    "L20|L40S?|RTX_4090|RTX_(6000|5880)_Ada": replace(known(90), arch=89, shared_bytes=101376),
    "H[128]00|H20": known(90),
    "G?B200": replace(known(90), arch=100),
    "G?B300": replace(known(90), arch=103),
    "RTX_PRO_6000": replace(known(90), arch=120, shared_bytes=101376),
    "GB10": replace(known(90), arch=121, shared_bytes=101376),
    r"MI3(00|08|25)\w?": known("gfx942"),
    r"MI35[05]\w?": known("gfx950"),
    "R9700": replace(known("gfx942"), arch="gfx1201", warp_size=32),
    "8060S": replace(known("gfx942"), arch="gfx1151", warp_size=32),
}
HIDDEN, TOPK = 4096, 8
"""No name says these: hidden size and experts of a token of a MoE layer."""
_NAME = re.compile(
    r"(?:E=(\d+),N=(\d+)|N=(\d+),K=(\d+)),device_name=([^,]*?)(?:,dtype=(\w+?))?(?:,block_shape=\[(\d+), ?(\d+)\])?"
    r"((?:,\w+=\w+?)*(?:_down)?)\.json"
)


class File(NamedTuple):
    """A config file by its name: the layer, the device, and what follows them (`_down`)."""

    path: Path
    layer: Layer
    device: str
    rest: str

    @classmethod
    def of(cls, path: Path) -> File | None:
        """None for a file that is not named as config files are."""
        found = _NAME.fullmatch(path.name)
        if found is None:
            return None
        e, moe_n, n, k, device, dtype, bn, bk, rest = found.groups("")
        block = (int(bn), int(bk)) if bn else None
        layer = Layer("moe" if e else "linear", int(moe_n or n), int(k or HIDDEN), int(e or 0), TOPK, dtype, block)
        return cls(path, layer, device, rest)


class Lookups:
    """All look-ups of an engine on a file's device, and its launchers, in this process."""

    def __init__(self, package: Path, device: str) -> None:
        """`device`: as in file names. Raises EngineError."""
        named = (t for word, t in _CHIPS.items() if re.search(rf"(?:^|_)(?:{word})(?=[-_]|$)", device))
        self.target = next(named, None)
        self._like, wanted, self._results = self.target or known(90), FUNCTIONS[package.name], dict[str, Values]()
        self.enter(self._like)
        further = [module for module, _ in wanted if module not in PARTS[package.name].executed]
        self.engine = load(package, Device(_mapped(package, device).replace("_", " "), self._like.arch), further)
        try:
            found = [inspect.unwrap(getattr(sys.modules[module], function)) for module, function in wanted]
        except AttributeError as e:
            raise EngineError(f"{package} is of a version that is not known: {e}") from e
        self._dtype, self._default, self._launcher, *self._lookups = found

    def ask(self, file: File) -> tuple[str, Table, Fault | None]:
        """(the look-up that reads the file, what it gets, a fault) by asking all look-ups for the file."""
        layer, own = file.layer, _parts(file.path)
        bn, bk = layer.block or (0, 0)
        plain = torch.float32 if layer.dtype == "float32" else torch.bfloat16
        sizes = {"E": layer.e, "num_experts": layer.e} if layer.e else {"K": layer.k}
        given = {
            **sizes, "N": layer.n, "inter_dim": layer.n, "block_n": bn,
            "block_k": bk, "dtype": _by_name(self._dtype, {"dtype": plain, f"use_{layer.dtype}": True}),
            "per_channel_quant": "per_channel" in file.rest, "down_moe": file.rest.endswith("_down"),
        }  # fmt: skip
        strange = own
        of_kind = [f for f in self._lookups if inspect.signature(f).parameters.keys() <= given.keys()]
        for lookup in of_kind:
            name, sought = lookup.__name__, [file.path.parent]
            table: Table = {}
            fault: Fault | None = None
            with replaced(os.path, {"exists": noting(sought, os.path.exists)}):
                try:
                    table = _by_name(lookup, given) or {}
                except Exception as e:  # noqa: BLE001 - the engine's own errors are of any type
                    fault = "error", "look-up", f"{name} fails: {type(e).__name__}: {e}"
            first = sought[-1]  # that exists
            if first == file.path:
                return name, table, fault
            folders = [path.parent for path in sought[1:] if path.name == file.path.name]
            if folders and not file.path.is_relative_to(self.engine.package):
                return name, {}, ("error", "override", f"never read: {name} takes this file from {folders[0]} alone")
            if first.name == file.path.name:
                text = f"not read by Triton {triton.__version__}, for which the file in {first.parent.name} counts"
                return name, {}, ("warning", "shadowed", f"{text}; only by that of {file.path.parent.name}")
            others = ([part for part in own if part not in _parts(path)] for path in sought[1:])
            strange = min([strange, *filter(None, others)], key=len)
        return "", {}, ("error", "name", f"never read: no look-up of this version forms {', '.join(strange)}")

    def bind(self, file: File, m: int, values: Values | None) -> tuple[str, Values]:
        """(key, constants) of the kernel that the engine would launch for M rows with these values, or its default.

        The key differs wherever the code may. Raises what the engine or Triton raises.
        """
        seen: list[str] = []
        constants: Values = {}

        def stop(*, fn: Any, compile: Values, **_: Any) -> bool:
            names = fn.jit_function.arg_names
            seen.extend((fn.jit_function.cache_key, compile["specialization_data"]))
            constants.update({names[path[0]]: value for path, value in compile["constants"].items()})
            return True  # nothing is compiled then

        with replaced(cast(ModuleType, triton.knobs.runtime), {"jit_cache_hook": stop}):
            self.launch(file, m, values)
        return hashlib.sha256(repr(seen).encode()).hexdigest(), constants

    def compiled(self, key: str, file: File, m: int, values: Values) -> Values:
        """Status, detail and facts of an entry, which is compiled once."""
        if key not in self._results:
            status, detail, facts = compile_candidate(cast(KernelSource, self), self._like, (file, m, values))
            found = asdict(facts) if facts else {"spills": 0}
            self._results[key] = {**found, "status": status, "detail": clean(detail, 300)}
        return self._results[key]

    def enter(self, target: Target) -> None:
        """Has this process compile for a chip, as the search's sources do."""
        compile_for(target)

    def compile(self, job: tuple[File, int, Values], target: Target) -> CompileFacts:
        """Compiles an entry's kernel. Raises what the compiler raises."""
        with compiling() as kernels:
            self.launch(*job)
        self.engine.kernel(job[0].layer.op).device_caches.clear()  # else it would not bind again
        return facts_of(kernels)

    def launch(self, file: File, m: int, values: Values | None) -> None:
        """Run the engine's launcher on operands without memory: of a MoE layer for its first GEMM, or for its second if
        the file is for that one."""
        layer, dtype, of, down = file.layer, file.layer.dtype, self._of, file.rest.endswith("_down")
        if not layer.e:
            with replaced(self.engine.fp8, {LINEAR: lambda *_: {m: values} if values else None}):
                self.engine.run_linear(layer, m)
            return
        n, k = (layer.k, layer.n) if down else (2 * layer.n, layer.k)
        bn, bk = layer.block or (n, k)
        one = dtype == "fp8_w8a8" and not layer.block and "per_channel" not in file.rest  # scale of a tensor
        a_scale = of("float32", *([1] if one else [m, -(-k // bk)])) if dtype.endswith("a8") else None
        given: Values = {
            "M": m, "E": layer.e, "N": layer.n, "K": layer.k, "topk": TOPK, "dtype": dtype or None, "is_marlin": False,
            "A": of("" if dtype.endswith("a16") else dtype, m, k), "A_scale": a_scale, "B": of(dtype, layer.e, n, k),
            "B_scale": of("float32", layer.e, *([] if one else [-(-n // bn), -(-k // bk)])) if "_w" in dtype else None,
            "B_zp": None, "B_bias": None, "bias": None, "C": of("", m, TOPK, n), "mul_routed_weight": down,
            "topk_weights": of("float32", m, TOPK), "topk_ids": of("int32", m, TOPK), "top_k": 1 if down else TOPK,
            "sorted_token_ids": of("int32", m * TOPK), "expert_ids": of("int32", m * TOPK),
            "num_tokens_post_padded": of("int32", 1), "block_shape": [bn, bk] if layer.block else None,
            "compute_type": tl.float32 if dtype == "float32" else tl.bfloat16,
            "per_channel_quant": "per_channel" in file.rest,
            **{f"use_{d}": d == dtype for d in ("fp8_w8a8", "int8_w8a8", "int8_w8a16", "int4_w4a16")},
        }  # fmt: skip
        config = values or _by_name(self._default, given)
        given["config"] = {name: value for name, value in config.items() if name != "USE_TMA"}
        moe = self.engine.moe
        # activations come quantized
        ours = {n: lambda a, *_, **__: (a, a_scale) for n in vars(moe) if re.search("_quant_(fp|int)8$|_fp8_quant$", n)}
        with replaced(moe, ours):
            _by_name(self._launcher, given)

    def _of(self, dtype: str, *sizes: int) -> torch.Tensor:
        known = {"fp8": self.engine.device.fp8, "int8": torch.int8, "float32": torch.float32, "int32": torch.int32}
        return torch.empty(*sizes, dtype=known.get(dtype.partition("_")[0], torch.bfloat16), device="meta")


lookups_of = lru_cache(1)(Lookups)
"""The latest are kept: a process holds one engine."""


def _mapped(package: Path, device: str) -> str:
    """The name that vLLM's map of AMD's device ids gives to a chip. The device's own if it has none, and for SGLang,
    which takes torch's names."""
    path = package / "platforms" / "rocm.py"
    names = re.findall(r'^    "0x\w+": "(\w+)"', path.read_text() if path.is_file() else "", re.MULTILINE)
    chip = re.search(r"MI\d+|\d{4}[A-Z]", device)
    same = [name for name in names if chip and chip[0] in name]
    return device if device in names else "".join(same[:1]) or device


def _by_name(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    return function(**{name: given[name] for name in inspect.signature(function).parameters if name in given})


def _parts(path: Path) -> list[str]:
    return re.split(r",(?=[a-z])", path.name.removesuffix(".json"))
