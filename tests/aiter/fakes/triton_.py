"""A triton whose kernels are never run."""

from typing import Any

__version__ = "0.0.0"


def jit(f: Any = None, **_: Any) -> Any:
    return f if callable(f) else jit


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def autotune(*_: Any, **__: Any) -> Any:
    return jit


heuristics = autotune


class Config:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass
