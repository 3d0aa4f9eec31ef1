"""Measuring and comparing, on the CPU: the time of a candidate follows from its name, the comparison is real."""

import hashlib
import time
from typing import Any

import torch


def perftest(*_: Any, **__: Any) -> Any:
    return lambda f: f


def run_perftest(func: Any, *args: Any, num_warmup: int = 2, num_iters: int = 2, **kwargs: Any) -> tuple[Any, float]:
    kwargs = {k: v for k, v in kwargs.items() if k not in ("testGraph", "num_rotate_args", "needTrace")}
    out = func(*args, **kwargs)
    time.sleep(0.01)
    words = "|".join(str(a) for a in args if isinstance(a, (int, str, bool)))
    digest = hashlib.sha256(words.encode()).digest()
    return out, 10.0 + int.from_bytes(digest[:3], "big") / 2**24


def checkAllclose(a: Any, b: Any, rtol: float = 1e-2, atol: float = 1e-2, **_: Any) -> float:
    close = torch.isclose(a.float(), b.float(), rtol=rtol, atol=atol)
    return 1.0 - close.float().mean().item()
