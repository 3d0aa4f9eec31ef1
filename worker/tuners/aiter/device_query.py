"""Asks torch about the slot's GPU in a process of its own: a GPU context of the tuner would take memory that AITER
needs.

The tuner calls `query_device`, which runs `python -m worker.tuners.aiter.device_query facts|canary|times`. That prints
a line with a mark and one JSON object:

    facts    {"gfx": "gfx950", "cu_num": 256, "device": "...", "torch": "...", "hip": "..."}
    canary   {"ok": true, "us": 12.5, "detail": "..."}: a product with a known result, as the torch tuner computes it
    times    {"compute_us": 110.0, "memory_us": 250.0}: the timed canary, asked for only after the canary
    each     {"error": TEXT} for a fault; facts and canary {"absent": REASON} if the image's torch cannot answer
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from worker import PACKAGE_PARENT
from worker.process import ask_child

MARK = "GEMMFLEET-DEVICE "
TIMEOUT_S = 240.0
"""An answer may take this many seconds, because the process imports torch."""


def query_device(what: str, env: Mapping[str, str]) -> dict[str, Any]:
    """The answer of a fresh process; `{"error": text}` if it gives none. All else that it prints is printed here. A
    KeyboardInterrupt ends the process as well."""
    path = os.pathsep.join(filter(None, (str(PACKAGE_PARENT), env.get("PYTHONPATH", ""))))
    argv = [sys.executable, "-m", "worker.tuners.aiter.device_query", what]
    with tempfile.TemporaryFile() as out:
        status = ask_child(argv, out, env={**env, "PYTHONPATH": path}, limit_s=TIMEOUT_S)
        if status is None:
            return {"error": f"no answer within {TIMEOUT_S:g} s"}
        out.seek(0)
        lines = out.read().decode(errors="replace").splitlines()
    answer = ""
    for line in lines:
        if line.startswith(MARK):
            answer = line.removeprefix(MARK)
        else:
            print(line, flush=True)
    try:
        return dict(json.loads(answer))
    except (ValueError, TypeError):
        return {"error": f"ended with status {status} and without an answer"}


def facts() -> dict[str, Any]:
    """gfx, cu_num, device and versions by torch; `absent` if torch sees no GPU. Raises ImportError without torch."""
    import torch

    versions = {"torch": str(torch.__version__), "hip": getattr(torch.version, "hip", None)}
    if not torch.cuda.is_available():
        return {"absent": "torch sees no GPU", **versions}
    props = torch.cuda.get_device_properties(torch.cuda.current_device())
    gfx = str(getattr(props, "gcnArchName", "")).split(":")[0]
    return {"gfx": gfx, "cu_num": int(props.multi_processor_count), "device": str(props.name), **versions}


def canary() -> dict[str, Any]:
    """ok, us, detail; `absent` if torch is one without arithmetic, as some images have. Raises ImportError."""
    import torch

    if not hasattr(torch, "mm"):
        return {"absent": "this torch has no matrix product"}
    from worker.tuners.common.device import Device
    from worker.tuners.common.device import canary as torch_canary

    ok, us, detail = torch_canary(Device())
    return {"ok": ok, "us": us, "detail": detail}


def times() -> dict[str, Any]:
    """compute_us and memory_us of the timed canary. Exceptions of torch pass through."""
    from worker.tuners.common.device import Device, timed_canary

    compute, memory = timed_canary(Device())
    return {"compute_us": compute, "memory_us": memory}


if __name__ == "__main__":
    try:
        answered = {"facts": facts, "canary": canary, "times": times}[sys.argv[1]]()
    except ImportError as e:
        # a slot whose canary ran has torch, so that it cannot be absent when the canary is timed
        kind = "error" if sys.argv[1] == "times" else "absent"
        answered = {kind: f"no torch: {e}"}
    except Exception as e:  # noqa: BLE001 - whatever the GPU does is the answer
        answered = {"error": f"{type(e).__name__}: {e}"[:1000]}
    print(MARK + json.dumps(answered), flush=True)
    os._exit(0)  # exit handlers of libraries may hang
