"""The 4-bit quantiser, a Triton kernel of the tree, on the CPU: scales padded to eight, cut only where the tree cuts.

Shuffled scales are laid out as plain ones are: only the kernels of kernels.py read them.
"""

from __future__ import annotations

import os
from typing import Any

import torch

STEPS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def after(module: Any) -> None:
    with open(os.path.join(os.environ["REAL_AITER_ROOT"], "aiter/utility/fp4_utils.py")) as f:
        trims = ":scaleN_valid]" in f.read()
    inner = module.get_triton_quant

    def get_triton_quant(kind: Any) -> Any:
        return _quantiser(trims) if kind == module.QuantType.per_1x32 else inner(kind)

    module.get_triton_quant = get_triton_quant


def _quantiser(trims: bool) -> Any:
    def quant(x: Any, shuffle: bool = False, **_: Any) -> tuple[Any, Any]:
        m, k = x.shape
        valid = -(-k // 32)
        padded = -(-valid // 8) * 8
        groups = torch.nn.functional.pad(x.float(), (0, padded * 32 - k)).view(m, padded, 32)
        exponent = torch.log2(groups.abs().amax(-1).clamp(min=2**-100)).floor().clamp(-120, 120)
        scales = (exponent + 127 - 2).clamp(1, 254)
        scaled = groups / torch.exp2(scales - 127).unsqueeze(-1)
        index = (scaled.abs().unsqueeze(-1) - torch.tensor(STEPS)).abs().argmin(-1).to(torch.uint8)
        index = (index | ((scaled < 0).to(torch.uint8) << 3)).view(m, padded * 32)[:, :k]
        packed = index[:, ::2] | (index[:, 1::2] << 4)
        columns = valid if trims and not shuffle else padded
        return packed.contiguous(), scales.to(torch.uint8)[:, :columns].contiguous()

    return quant
