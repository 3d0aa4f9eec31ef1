"""Asks an engine in a fresh process, so that nothing of an earlier load or look-up counts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from worker.triton_configs.engine import Device, Engine, EngineError, Layer, load


class Call(NamedTuple):
    """A question: `do` is file_name, folders, table, found, config (with `m`) or source_hash."""

    device: Device
    do: str
    layer: Layer
    m: int = 0


def ask(root: Path, calls: Sequence[Call], env: Mapping[str, str] | None = None) -> list[Any]:
    """Returns the answer of the engine at `root` to each call, an EngineError for one that it could not give.

    `env`: variables of the engine; those of this process do not count. Raises EngineError if nothing can be asked.
    """
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            return fresh.submit(_answers, root, calls, env or {}).result()
    except BrokenProcessPool as e:
        raise EngineError(f"{root} could not be asked: {e}") from e


def _answers(root: Path, calls: Sequence[Call], env: Mapping[str, str]) -> list[Any]:
    for name in [n for n in os.environ if n.startswith(("VLLM_", "SGLANG_"))]:
        del os.environ[name]
    os.environ.update(env)
    answers: dict[int, Any] = {}
    engine: Engine | None = None
    # by device, since an engine is loaded for one
    for i in sorted(range(len(calls)), key=lambda i: repr(calls[i].device)):
        if engine is None or engine.device != calls[i].device:
            engine = load(root, calls[i].device)
        answers[i] = _answer(engine, calls[i])
    return [answers[i] for i in range(len(calls))]


def _answer(engine: Engine, call: Call) -> Any:
    asked: dict[str, tuple[Any, ...]] = {"config": (call.layer, call.m), "source_hash": (call.layer.op,)}
    try:
        return getattr(engine, call.do)(*asked.get(call.do, (call.layer,)))
    except Exception as e:  # noqa: BLE001  whatever the engine's own code raises is its answer
        return e if isinstance(e, EngineError) else EngineError(f"{type(e).__name__}: {e}")
