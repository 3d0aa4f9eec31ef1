"""einops.rearrange, as far as moving and joining axes goes."""

import re
from typing import Any


def rearrange(tensor: Any, pattern: str) -> Any:
    left, right = pattern.split("->")
    names = left.split()
    groups = [g.strip("()").split() for g in re.findall(r"\([^)]*\)|\w+", right)]
    sizes = dict(zip(names, tensor.shape, strict=True))
    moved = tensor.permute([names.index(n) for g in groups for n in g])
    shape = []
    for group in groups:
        size = 1
        for n in group:
            size *= sizes[n]
        shape.append(size)
    return moved.reshape(shape)
