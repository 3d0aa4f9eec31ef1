"""Query of the chip and its canary, in a process of their own: their context must not stay on the GPU.

`python -m worker.tuners.aiter.device_query facts|canary|times` prints one JSON object. `facts`: gfx,
cu_num, device and versions as torch has them. `canary`: as the torch tuner's, or `absent` with the reason
where the image's torch cannot multiply. `times`: compute_us and memory_us of the timed canary.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from worker import PACKAGE_PARENT

CANARY_SIZE = 256
MARK = "GEMMFLEET-ONCHIP "
POLL_S = 0.1


def query_device(what: str, env: Mapping[str, str], timeout_s: float, alive: Callable[[], None]) -> dict[str, Any]:
    """The answer of a fresh process; `{"error": text}` where there is none. KeyboardInterrupt ends it."""
    path = os.pathsep.join(p for p in (str(PACKAGE_PARENT), env.get("PYTHONPATH", "")) if p)
    try:
        proc = subprocess.Popen(
            [sys.executable, "-m", "worker.tuners.aiter.device_query", what],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None,
            env={**env, "PYTHONPATH": path},
        )
    except OSError as e:
        return {"error": f"cannot be started: {e}"}
    until = time.monotonic() + timeout_s
    try:
        while proc.poll() is None:
            if time.monotonic() > until:
                return {"error": f"no answer within {timeout_s:g} s"}
            alive()
            time.sleep(POLL_S)
        assert proc.stdout is not None
        for line in proc.stdout.read().decode(errors="replace").splitlines():
            if line.startswith(MARK):
                answer = json.loads(line[len(MARK) :])
                return answer if isinstance(answer, dict) else {"error": "it answered no object"}
        return {"error": f"ended with status {proc.returncode} and without an answer"}
    except ValueError as e:
        return {"error": f"its answer cannot be read: {e}"}
    finally:
        if proc.poll() is None:
            proc.kill()
        proc.wait()
        if proc.stdout is not None:
            proc.stdout.close()


def facts() -> dict[str, Any]:
    """gfx, cu_num, device and versions by torch; `absent` where there is no torch or no GPU for it."""
    try:
        import torch
    except ImportError as e:
        return {"absent": f"no torch: {e}"}
    out: dict[str, Any] = {"torch": str(torch.__version__), "hip": getattr(torch.version, "hip", None)}
    if not torch.cuda.is_available():
        return {"absent": "torch sees no GPU", **out}
    props = torch.cuda.get_device_properties(torch.cuda.current_device())
    gfx = str(getattr(props, "gcnArchName", "")).split(":")[0]
    return {"gfx": gfx, "cu_num": int(props.multi_processor_count), "device": str(props.name), **out}


def canary() -> dict[str, Any]:
    """ok, us, detail; `absent` where torch is of no use."""
    try:
        import torch
    except ImportError as e:
        return {"absent": f"no torch: {e}"}
    if not hasattr(torch, "mm"):
        return {"absent": "this torch has no matrix product"}
    from worker.tuners.common.device import Device
    from worker.tuners.common.device import canary as torch_canary

    ok, us, detail = torch_canary(Device(), CANARY_SIZE)
    return {"ok": ok, "us": us, "detail": detail}


def times() -> dict[str, Any]:
    """compute_us and memory_us of the timed canary. Raises what torch raises."""
    from worker.tuners.common.device import Device
    from worker.tuners.common.timed_canary import timed_canary

    compute, memory = timed_canary(Device())
    return {"compute_us": compute, "memory_us": memory}


if __name__ == "__main__":
    try:
        answered = {"facts": facts, "canary": canary, "times": times}[sys.argv[1]]()
    except Exception as e:  # noqa: BLE001 - whatever the GPU does is the answer
        answered = {"error": f"{type(e).__name__}: {e}"[:1000]}
    print(MARK + json.dumps(answered), flush=True)
    os._exit(0)  # what libraries do at exit may hang
