"""Sizes of a rank's layers as vLLM's own classes make them: `python -m tests.support.vllm_layers ROOT`, cases on stdin.

vLLM's model classes, its linear layers, its fp8 method, and what splits the experts are executed from their unchanged
files, on torch's meta device. Everything else that they import is a stub: attention, norms, and the GPU's kernels.
`Experts` stands for `FusedMoEFactory`: it asks vLLM's functions for the parallel configuration, the number of local
experts and the shape of the blocks, and builds no weights.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

LAYERS, MODELS = "vllm.model_executor.layers", "vllm.model_executor.models"
EXECUTED = (
    "vllm.distributed.utils", "vllm.utils.math_utils", "vllm.model_executor.parameter", "vllm.model_executor.utils",
    f"{LAYERS}.linear", f"{LAYERS}.quantization.fp8", f"{LAYERS}.quantization.base_config",
    f"{LAYERS}.quantization.utils.fp8_utils", f"{LAYERS}.quantization.utils.quant_utils",
    f"{LAYERS}.fused_moe.config", f"{LAYERS}.fused_moe.oracle.fp8", f"{LAYERS}.fused_moe.expert_map_manager",
    f"{LAYERS}.fused_moe.router.gate_linear", f"{LAYERS}.mamba.gdn.base", f"{LAYERS}.mamba.gdn.qwen_gdn_linear_attn",
    *(f"{MODELS}.{name}" for name in (
        "utils", "deepseek_v2", "glm4_moe", "llama", "minimax_m2", "mixtral", "qwen2", "qwen2_moe", "qwen3",
        "qwen3_moe", "qwen3_next",
    )),
    "vllm.models.deepseek_v32.attention", "vllm.models.deepseek_v32.nvidia.model",
)  # fmt: skip
STUBBED = ("vllm", "transformers", "einops", "flashinfer", "cutlass", "cuda", "huggingface_hub", "safetensors")


class Stub:
    """Stands for what the sizes do not depend on: false, empty, and 0 beside a number."""

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return Stub()

    def __call__(self, *args: Any, **named: Any) -> Any:
        decorates = len(args) == 1 and not named and callable(args[0]) and not isinstance(args[0], Stub)
        return args[0] if decorates else Stub()

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return ()

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())

    def __or__(self, other: Any) -> Any:
        return other

    def __getitem__(self, _: Any) -> Any:
        return self

    def __setitem__(self, *_: Any) -> None:
        pass

    def __lt__(self, _: Any) -> bool:
        return False

    __ror__ = __radd__ = __rfloordiv__ = __rand__ = __and__ = __or__
    __gt__ = __le__ = __ge__ = __lt__


class Finder(MetaPathFinder, Loader):
    """Executes the modules above from their files; all other modules of the stubbed packages are empty."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in EXECUTED:
            return spec_from_file_location(name, self.root / f"{name.replace('.', '/')}.py")
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in STUBBED else None

    def exec_module(self, module: ModuleType) -> None:
        def missing(key: str) -> Any:
            if key.startswith("__"):
                raise AttributeError(key)
            whole = f"{module.__name__}.{key}"
            return importlib.import_module(whole) if whole in EXECUTED else Stub()

        vars(module)["__getattr__"] = missing


class Ranks:
    """`tp` ranks share the attention. `ep` ranks share whole experts; 1: experts are split over the `tp` ranks."""

    tp = ep = 1


def load(root: Path) -> Callable[..., dict[str, Any]]:
    """vLLM's classes; returns a function from a config to the sizes of one decoder layer."""
    import torch
    from torch import nn

    sys.modules.setdefault("regex", re)
    sys.meta_path.insert(0, Finder(root))

    class Layer(nn.Module):
        @classmethod
        def register(cls, *_: Any, **__: Any) -> Any:
            return lambda one: one

    class Never:
        pass

    class Attention(nn.Module):
        def __init__(self, **parts: Any) -> None:
            super().__init__()
            self.parts = nn.ModuleList([p for p in parts.values() if isinstance(p, nn.Module)])

        def __getattr__(self, key: str) -> Any:
            return super().__getattr__(key) if key == "parts" or key.startswith("_") else Stub()

    def give(module: str, **names: Any) -> Any:
        found = importlib.import_module(module)
        vars(found).update(names)
        return found

    give("vllm.model_executor.custom_op", PluggableLayer=Layer, CustomOp=Layer)
    ranks = {
        "get_tensor_model_parallel_world_size": lambda: Ranks.tp,
        "get_tensor_model_parallel_rank": lambda: 0,
        "get_dp_group": lambda: SimpleNamespace(rank_in_group=0),
    }
    give("vllm.distributed", divide=importlib.import_module("vllm.distributed.utils").divide, **ranks)
    give("vllm.distributed.parallel_state", **ranks)
    give(
        f"{LAYERS}.quantization",
        resolve_quant_method=lambda quant, layer, prefix: quant.get_quant_method(layer, prefix),
    )
    give(f"{LAYERS}.attention", MLAAttention=Attention)
    give(f"{LAYERS}.quantization.online.fp8", OnlineLinearBase=Never)
    moe_config = importlib.import_module(f"{LAYERS}.fused_moe.config")
    local = importlib.import_module(f"{LAYERS}.fused_moe.expert_map_manager").determine_expert_map
    refine = importlib.import_module(f"{LAYERS}.fused_moe.oracle.fp8").refine_fp8_moe_block_shape
    fp8 = give(f"{LAYERS}.quantization.fp8", RoutedExperts=Never, Attention=Never, MarlinFP8ScaledMMLinearKernel=Never)
    utils = importlib.import_module(f"{LAYERS}.quantization.utils.fp8_utils")
    linear = importlib.import_module(f"{LAYERS}.linear")
    made: list[dict[str, Any]] = []

    class Experts(nn.Module):
        def __init__(
            self,
            *,
            num_experts: int,
            hidden_size: int,
            intermediate_size: int,
            quant_config: Any,
            prefix: str,
            **_: Any,
        ) -> None:
            super().__init__()
            spread = Ranks.ep > 1
            parallel = moe_config.FusedMoEParallelConfig.make(
                tp_size_=Ranks.tp, pcp_size_=1, dp_size_=max(Ranks.ep // Ranks.tp, 1), sp_size_=1,
                vllm_parallel_config=SimpleNamespace(
                    enable_expert_parallel=spread, all2all_backend="allgather_reducescatter", enable_eplb=False
                ),
            )  # fmt: skip
            assert intermediate_size % parallel.tp_size == 0  # as FusedMoEConfig does
            width = intermediate_size // parallel.tp_size
            block = None
            if quant_config is not None:
                quant_config.packed_modules_mapping = PACKED
                skipped = fp8.is_layer_skipped(prefix, quant_config.ignored_layers, PACKED)
                if not skipped and quant_config.weight_block_size:
                    asked = SimpleNamespace(
                        intermediate_size_per_partition=width, hidden_dim=hidden_size, tp_size=parallel.tp_size
                    )
                    block = refine(asked, quant_config.weight_block_size)
                    if block is None:
                        utils.validate_fp8_block_shape_moe(width, quant_config.weight_block_size)
                        block = quant_config.weight_block_size
            es = {local(parallel.ep_size, rank, num_experts)[0] for rank in range(parallel.ep_size)}
            made.extend({"e": e, "n": width, "hidden": hidden_size, "block": block} for e in sorted(es))

    gate = importlib.import_module(f"{LAYERS}.fused_moe.router.gate_linear").GateLinear
    give(f"{LAYERS}.fused_moe", FusedMoEFactory=Experts, GateLinear=gate)
    models = {name.rpartition(".")[2]: importlib.import_module(name) for name in EXECUTED if name.startswith(MODELS)}
    vars(models["qwen3_next"])["get_quark_ocp_mx_group_size"] = lambda *_: None  # the models are not Quark's
    sparse = importlib.import_module("vllm.models.deepseek_v32.nvidia.model").DeepseekV32DecoderLayer

    class Open(SimpleNamespace):
        def __getattr__(self, key: str) -> Any:
            if key.startswith("__"):
                raise AttributeError(key)
            return Stub()

    def decoder(config: Any, quant: Any, prefix: str) -> Any:
        whole = Open(
            quant_config=quant, parallel_config=Open(use_sequence_parallel_moe=False),
            model_config=Open(use_mla=True, hf_config=config, hf_text_config=config),
        )  # fmt: skip
        kind, i = config.model_type, int(prefix.rpartition(".")[2])
        if kind in ("deepseek_v3", "kimi_k2"):
            return models["deepseek_v2"].DeepseekV2DecoderLayer(whole, prefix)
        if kind in ("deepseek_v32", "glm_moe_dsa"):
            return sparse(whole, prefix)
        if kind == "qwen3_moe":
            return models["qwen3_moe"].Qwen3MoeDecoderLayer(whole, prefix)
        if kind == "qwen3":
            return models["qwen3"].Qwen3DecoderLayer(config, None, quant, prefix)
        if kind == "qwen3_next":
            full = (i + 1) % config.full_attention_interval == 0
            return models["qwen3_next"].Qwen3NextDecoderLayer(
                whole, f"{'full' if full else 'linear'}_attention", prefix
            )
        if kind == "glm4_moe":
            return models["glm4_moe"].Glm4MoeDecoderLayer(config, None, quant, prefix)
        if kind == "minimax_m2":
            return models["minimax_m2"].MiniMaxM2DecoderLayer(config, prefix, Open(), None, quant)
        if kind == "mixtral":
            return models["mixtral"].MixtralDecoderLayer(config, None, quant, prefix)
        return models["llama"].LlamaDecoderLayer(whole, prefix)

    def sizes(raw: dict[str, Any], tp: int, ep: int, at: int) -> dict[str, Any]:
        Ranks.tp, Ranks.ep = tp, ep
        config = SimpleNamespace(**{**raw, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
        quant = fp8.Fp8Config.from_config(raw["quantization_config"]) if raw.get("quantization_config") else None
        if quant is not None:
            quant.packed_modules_mapping = PACKED
        made.clear()
        try:
            with torch.device("meta"):
                built = decoder(config, quant, f"model.layers.{at}")
        except (ValueError, AssertionError) as e:
            return {"refused": f"{type(e).__name__}: {e}"}
        found = [
            tuple(m.weight.shape)
            for m in built.modules()
            if isinstance(m, linear.LinearBase) and isinstance(m.quant_method, fp8.Fp8LinearMethod)
        ]
        return {"linear": sorted(set(found)), "experts": list(made)}

    return sizes


PACKED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
    "in_proj_qkvz": ["in_proj_qkvz"],
    "in_proj_ba": ["in_proj_ba"],
}
"""Fused layers and their parts, from the models' classes."""


if __name__ == "__main__":
    of_layer = load(Path(sys.argv[1]))
    print(json.dumps([of_layer(**case) for case in json.load(sys.stdin)]))
