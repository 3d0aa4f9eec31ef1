"""Asks an engine in a fresh process, so that nothing of an earlier load or look-up counts.

    python -m worker.triton_configs.ask < REQUEST

The request is JSON: {"root": PATH, "calls": [{"device": {"name", "arch"}, "do": "config", "layer": {..}, "m": 16}]}.
`do` names a method of `Engine`. The answer is a JSON list: {"value": ..} or {"error": TEXT} for each call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from worker.triton_configs.engine import Device, Engine, EngineError, Layer, load

LIMIT_S = 600
# what the child has to have on its path
_PARENT = Path(__file__).resolve().parents[2]


class Call(NamedTuple):
    """A question: `do` is file_name, folders, table, found, config (with `m`) or source_hash."""

    device: Device
    do: str
    layer: Layer
    m: int = 0


def ask(root: Path, calls: Sequence[Call], env: Mapping[str, str] | None = None) -> list[Any]:
    """Returns the answer of the engine at `root` to each call, an EngineError for one that it could not give.

    Paths are text. `env`: variables beside those of this process. Raises EngineError if nothing can be asked.
    """
    request = {"root": str(root.absolute()), "calls": [_plain(call) for call in calls]}
    ours = [str(_PARENT), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, ours)), **(env or {})}
    argv = [sys.executable, "-m", "worker.triton_configs.ask"]
    try:
        done = subprocess.run(
            argv, input=json.dumps(request), env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise EngineError(f"{root} could not be asked: {e}") from e
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise EngineError(f"{root} could not be asked: {last[0]}")
    answers = json.loads(done.stdout.splitlines()[-1])
    return [_read(call, answer) for call, answer in zip(calls, answers, strict=True)]


def _plain(call: Call) -> dict[str, Any]:
    return {"device": asdict(call.device), "do": call.do, "layer": asdict(call.layer), "m": call.m}


def _read(call: Call, answer: dict[str, Any]) -> Any:
    if "error" in answer:
        return EngineError(answer["error"])
    value = answer["value"]
    return {int(m): v for m, v in value.items()} if call.do == "table" and value is not None else value


def answers_to(root: Path, calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers, in this process: an engine is loaded once for each device."""
    answers: list[dict[str, Any]] = [{}] * len(calls)
    # repr, because an arch is a number or a text
    order = sorted(range(len(calls)), key=lambda i: repr(calls[i]["device"]))
    engine: Engine | None = None
    for i in order:
        device = Device(**calls[i]["device"])
        if engine is None or engine.device != device:
            engine = load(root, device)
        answers[i] = _answer(engine, calls[i])
    return answers


def _answer(engine: Engine, call: dict[str, Any]) -> dict[str, Any]:
    layer = Layer.of(call["layer"])
    more = {"config": (layer, call.get("m", 0)), "source_hash": (layer.op,)}.get(call["do"], (layer,))
    try:
        value = getattr(engine, call["do"])(*more)
    except Exception as e:  # noqa: BLE001  whatever the engine's own code raises is its answer
        return {"error": str(e) if isinstance(e, EngineError) else f"{type(e).__name__}: {e}"}
    return {"value": value}


if __name__ == "__main__":
    given = json.load(sys.stdin)
    try:
        print(json.dumps(answers_to(Path(given["root"]), given["calls"]), default=str))
    except EngineError as e:
        sys.exit(str(e))
