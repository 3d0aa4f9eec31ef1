"""AITER's own `get_gemm_config` run in a process of its own, to see what a tree really gives.

`aiter` is imported as it is with AITER_TRITON_ONLY=1, on a Triton without a GPU that is made to name the chip. Where
this import fails (no torch, an older AITER), the packages above the loader stay empty and its own three files run.
Without Triton there is no trial.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from worker.text import clean
from worker.triton_configs.resolve import Bucket

LIMIT_S = 300.0
_PROGRAM = """
import json, sys, types
root, request = sys.argv[1], json.load(sys.stdin)
arch = int(request["arch"]) if request["arch"].isdigit() else request["arch"]
import triton
from triton.backends.compiler import GPUTarget
class Driver:
    def get_current_target(self):
        return GPUTarget("cuda" if isinstance(arch, int) else "hip", arch, 64)
triton.runtime.driver.set_active(Driver())
sys.path.insert(0, root)
how = "imported as it is"
try:
    if request["alone"]:
        raise InterruptedError
    from aiter.ops.triton.utils import gemm_config_utils as loader
except Exception as e:
    how = f"the loader alone ({type(e).__name__} in `import aiter`)"
    for name in [n for n in sys.modules if n.split(".")[0] == "aiter"]:
        del sys.modules[name]
    for name in ("aiter", "aiter.ops", "aiter.ops.triton", "aiter.ops.triton.utils", "aiter.ops.triton.utils._triton"):
        sys.modules[name] = package = types.ModuleType(name)
        package.__path__ = [root + "/" + name.replace(".", "/")]
    from aiter.ops.triton.utils import gemm_config_utils as loader
answers = []
for call in request["calls"]:
    if "bounds" in call:
        call["bounds"] = tuple(call["bounds"])
    try:
        found = loader.get_gemm_config(**call)
        answers.append(found if isinstance(found, tuple) else (found, None))
    except Exception as e:
        answers.append((None, f"{type(e).__name__}: {e}"))
print("\\n" + json.dumps({"answers": answers, "how": how, "triton": triton.__version__}))
"""


class Call(NamedTuple):
    """Arguments of one call of `get_gemm_config`, None for those not given; K is the logical one."""

    config_name: str
    M: int
    N: int
    K: int
    bounds: tuple[int, ...]
    backend: str | None = None
    B: int | None = None


class Trial(NamedTuple):
    """The answers, one a call: the values, None where the call failed. `how`: the way of the import and Triton's
    version; `why_not`: why there are no answers."""

    answers: tuple[Bucket | None, ...] = ()
    how: str = ""
    why_not: str = ""


def run_trial(
    root: Path, arch: str, calls: Sequence[Call], *, alone: bool = False, python: str = sys.executable
) -> Trial:
    """Ask the real function; `alone` its three files without the rest of `aiter`, which takes seconds to import.

    No exception: what stands in the way is in `why_not`.
    """
    arguments = [{k: v for k, v in c._asdict().items() if v is not None} for c in calls]
    request = json.dumps({"arch": arch, "alone": alone, "calls": arguments})
    env = {**os.environ, "AITER_TRITON_ONLY": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": ""}
    try:
        done = subprocess.run(
            [python, "-c", _PROGRAM, str(root.resolve())],
            input=request, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as e:
        return Trial(why_not=f"the trial did not run: {e}")
    if done.returncode:
        last = clean(done.stderr, 300, keep="end").splitlines()[-1:] or ["no message"]
        missing = "; install gemmfleet[triton]" if re.search("No module named '(?!aiter)", last[0]) else ""
        return Trial(why_not=f"AITER's function cannot run here: {last[0]}{missing}")
    document = json.loads(done.stdout.strip().splitlines()[-1])
    answers = tuple(values for values, _ in document["answers"])
    return Trial(answers, f"get_gemm_config with Triton {document['triton']}, {document['how']}")
