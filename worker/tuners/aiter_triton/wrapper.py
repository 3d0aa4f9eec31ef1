"""AITER's public wrapper of a kind, imported from a tree: its operands, its configs made to fit, its calls.

AITER asks Triton's driver for the chip when it is imported, and keeps the answer; where no kernel is to run, a driver
that only names the target stands there (`enter_tree`). Imports torch and triton.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from worker.triton_configs.engine_modules import replaced
from worker.triton_configs.kinds import Caller, ConfigKind
from worker.tuners.common.calls import arguments_of, find_function
from worker.tuners.common.case import BLOCK8, MX4, Case
from worker.tuners.common.inputs import Inputs, plain_operands
from worker.tuners.common.problem import MX_GROUP, UnsupportedError
from worker.tuners.search.compiling import compile_for
from worker.tuners.search.target import Target

ENV = {"AITER_TRITON_ONLY": "1", "AITER_LOG_LEVEL": "ERROR"}
"""Only the Triton ops are imported, without ROCm and JIT builds; and wrappers log every call otherwise."""
SHUFFLE = (("aiter.ops.triton.utils.shuffle", "shuffle_weight"), ("aiter.ops.shuffle", "shuffle_weight"))
SHUFFLE_SCALE = (("aiter.ops.triton.utils.shuffle", "shuffle_scale_gemm"),)
FIRST_SHUFFLED_M = 32
"""With this many rows or more, the scales of X are shuffled as well (gemm_afp4wfp4_preshuffle)."""
SHUFFLED_ROWS = 16
"""AITER shuffles W in tiles of this many rows."""


def enter_tree(root: str | Path, target: Target | None) -> None:
    """Have `import aiter` mean this tree. With a target nothing can run in this process from now on, only be compiled
    for it; None: the GPU's own driver answers."""
    os.environ.update(ENV)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if target is not None:
        compile_for(target)


class Wrapper:
    """The wrapper of a kind, or another operator that reads the same files, in the tree that was entered."""

    def __init__(self, kind: ConfigKind, caller: str = "") -> None:
        """Import it; `caller`: the operator's name. Raises UnavailableError."""
        operator: ConfigKind | Caller = kind
        more_arguments: tuple[tuple[str, Any], ...] = ()
        for other in kind.callers:
            if other.function == caller:
                operator = other
                more_arguments = other.arguments or ()
                break
        old_module = re.sub(r"\.gemm\.\w+\.", ".", operator.module)  # before 2026-01-07
        self.kind = kind
        self._more_arguments = dict(more_arguments)
        self._function, _ = find_function([(operator.module, operator.function), (old_module, operator.function)])
        names = vars(sys.modules[self._function.__module__])
        self._get_config: Callable[..., Any] | None = names.get("_get_triton_config") or names.get("_get_config")

    def complete_config(self, values: Mapping[str, Any], case: Case) -> dict[str, Any]:
        """A bucket's values as the wrapper's callers hand them on: with SPLITK_BLOCK_SIZE and split-K made to fit, by
        AITER's own code (compute_splitk_params and its like)."""
        get_config = self._get_config
        if get_config is None:
            return dict(values)
        module = sys.modules.get(get_config.__module__)
        if module is None or not hasattr(module, "get_gemm_config"):
            return dict(values)
        k = case.k // 2 if self.kind.packed_k else case.k  # two values a byte where both operands are packed, or W is
        sizes = {"M": case.m, "N": case.n, "K": k, "B": case.b, "shuffle": self.kind.shuffled_w}
        parameters = inspect.signature(get_config).parameters
        arguments = {name: size for name, size in sizes.items() if name in parameters}
        with replaced(module, {"get_gemm_config": lambda *_, **__: (dict(values), True)}):
            config, *_ = get_config(**arguments)
        completed: dict[str, Any] = config
        return completed

    def operands(self, inputs: Inputs, *, drawn: bool = True) -> dict[str, Any]:
        """Operands in the order that the wrapper wants; shuffled ones by the tree's own functions. `drawn` False: they
        hold nothing, so that only their form is made. Raises UnsupportedError, UnavailableError."""
        operands = plain_operands(inputs)
        case = inputs.case
        if not self.kind.shuffled_w:
            return operands
        n, width = inputs.w.shape
        if n % SHUFFLED_ROWS:
            raise UnsupportedError(f"N is {n}; AITER shuffles W in tiles of 16 rows")
        w = find_function(SHUFFLE)[0](inputs.w, layout=(16, 16)) if drawn else inputs.w
        operands["w"] = w.reshape(n // SHUFFLED_ROWS, width * SHUFFLED_ROWS)
        if case.format == BLOCK8 and inputs.xs is not None:
            operands["xs"] = inputs.xs.t().contiguous().view(*inputs.xs.shape)
        if case.format == MX4:
            if case.m >= FIRST_SHUFFLED_M:
                operands["xs"] = _shuffled_scales(inputs.xs, drawn=drawn)
            operands["ws"] = _shuffled_scales(inputs.ws, drawn=drawn)
        return operands

    def make_call(self, operands: Mapping[str, Any], out: torch.Tensor, config: dict[str, Any]) -> Callable[[], None]:
        """One call with a completed config, which writes `out`. Raises UnsupportedError."""
        available = {**operands, "dtype": out.dtype, "out": out, "config": config, "backend": "triton"}
        arguments = arguments_of(self._function, available) | self._more_arguments
        function = self._function
        for name, value in arguments.items():
            if value is config:
                config_parameter = name
                break
        else:
            raise UnsupportedError(f"{function.__name__} takes no config in this tree")

        def run() -> None:
            function(**{**arguments, config_parameter: dict(config)})  # some wrappers change it

        return run


def _shuffled_scales(scales: torch.Tensor | None, *, drawn: bool) -> torch.Tensor:
    """e8m0 scales [R, K/32] in the order of the preshuffled kernel, rows padded to 32. Raises UnsupportedError."""
    assert scales is not None
    rows, columns = scales.shape
    if columns % 8:
        raise UnsupportedError(f"K is {columns * MX_GROUP}; shuffled scales need a multiple of 256")
    if not drawn:
        return scales.new_empty(-(-rows // 32), 32 * columns)
    padded = torch.nn.functional.pad(scales, (0, 0, 0, -rows % 32))
    shuffle = find_function(SHUFFLE_SCALE)[0]
    shuffled: torch.Tensor = shuffle(padded, arch="gfx950", preshuffle_factor=32, scale_kwidth=8)
    return shuffled
