"""The kernels that vLLM and SGLang launch for the entries of a config file, bound or compiled without a GPU.

`EntryKernels` runs the engine's launcher with an entry on tensors without memory. `bind` ends where Triton would
compile: it tells what the kernel would be specialised for. `compiled` gives the compiler's facts. `lookups.py` loads
the engine; the tuner's own launches are in `source.py`. Imports triton, and torch to launch.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import triton
import triton.language as tl

from worker.text import clean
from worker.triton_configs.engine_config_file import TOPK, EngineConfigFile
from worker.triton_configs.engine_modules import replaced
from worker.triton_configs.engine_package import PROJECTS
from worker.triton_configs.pair import Values, without_tma
from worker.triton_configs.serving_engine import LINEAR_LOOKUP, ServingEngine, taking_quantized
from worker.tuners.search.compiling import compile_candidate, compile_for, compiling, facts_of
from worker.tuners.search.source import CompileFacts, KernelSource
from worker.tuners.search.target import Target

if TYPE_CHECKING:
    import torch

QUANTIZED = ("fp8_w8a8", "int8_w8a8", "int8_w8a16", "int4_w4a16")
"""The dtypes for which both launchers have a flag `use_...`."""


class EntryKernels:
    """Launches of one engine's kernels on one device. It is a `KernelSource` as far as `compile_candidate` uses one:
    `enter` and `compile`."""

    def __init__(self, engine: ServingEngine, target: Target) -> None:
        """Raises AttributeError if the engine has no such launcher."""
        self._engine = engine
        self._target = target
        self._results: dict[str, Values] = {}  # by the key of `bind`
        self._moe_launcher = inspect.unwrap(getattr(engine.moe, PROJECTS[engine.project].moe_launcher))
        self._moe_default = inspect.unwrap(engine.moe_lookup.get_default_config)

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
            status, detail, facts = compile_candidate(source, self._target, (file, m, values))
            fact_fields = asdict(facts) if facts else {"spills": 0}
            self._results[key] = {**fact_fields, "status": status, "detail": clean(detail, 300)}
        return self._results[key]

    def enter(self, target: Target) -> None:
        """Have this process compile for a chip; see `KernelSource`."""
        compile_for(target)

    def compile(self, job: tuple[EngineConfigFile, int, Values], target: Target) -> CompileFacts:
        """Compile an entry's kernel. Raises what the compiler raises."""
        with compiling() as kernels:
            self._launch(*job)
        self._engine.kernel(job[0].layer.op).device_caches.clear()  # else it would not bind again
        return facts_of(kernels)

    def _launch(self, file: EngineConfigFile, m: int, values: Values | None) -> None:
        """Run the engine's launcher on operands without memory, with these values or the engine's default.

        Of experts it launches their first GEMM, or their second if the file is for that one.
        """
        if file.layer.op == "linear":
            table = {m: values} if values else None
            with replaced(self._engine.fp8, {LINEAR_LOOKUP: lambda *_: table}):
                self._engine.run_linear(file.layer, m)
            return
        arguments = self._moe_arguments(file, m)
        config = values or call_by_name(self._moe_default, arguments)
        arguments["config"] = without_tma(config)
        with taking_quantized(self._engine.moe, lambda _: arguments["A_scale"]):
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

        dtypes = {"fp8": self._engine.device.fp8, "int8": torch.int8, "float32": torch.float32, "int32": torch.int32}
        return torch.empty(*sizes, dtype=dtypes.get(dtype.partition("_")[0], torch.bfloat16), device="meta")


def call_by_name(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function with those of the arguments that it has parameters for."""
    names = inspect.signature(function).parameters
    return function(**{name: arguments[name] for name in names if name in arguments})
