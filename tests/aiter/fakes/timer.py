"""AITER's timer: a kernel runs once, and its time follows from its name and numbers."""

from __future__ import annotations

import hashlib
from typing import Any


def after(module: Any) -> None:
    module.run_perftest = run_perftest
    module.perftest = perftest


def perftest(*_: Any, **__: Any) -> Any:
    return lambda func: lambda *args, **kwargs: (func(*args, **kwargs), _us(func, args))


OWN = ("num_warmup", "num_iters", "testGraph", "num_rotate_args", "needTrace", "use_cuda_event")


def run_perftest(func: Any, *args: Any, **kwargs: Any) -> tuple[Any, float]:
    out = func(*args, **{k: v for k, v in kwargs.items() if k not in OWN})
    return out, _us(func, args)


def _us(func: Any, args: Any) -> float:
    words = "|".join([getattr(func, "__name__", "")] + [str(a) for a in args if isinstance(a, (int, str, bool))])
    digest = hashlib.sha256(words.encode()).digest()
    return 10.0 + int.from_bytes(digest[:3], "big") / 2**24
