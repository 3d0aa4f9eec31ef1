"""The environment of AITER's processes: what is inherited and would change the result is cleared and told."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

CLEARED = re.compile(
    r"AITER_CONFIG_\w+|AITER_REBUILD|AITER_(?:TUNE_GEMM|ONLINE_TUNE|BYPASS_TUNE_CONFIG|LOG_MORE|LOG_TUNED_CONFIG)"
    r"|AITER_JIT_DIR|AITER_META_DIR|AITER_ASM_DIR|HIP_ONLINE_TUNING|PYTORCH_TUNABLEOP_\w+|GTUNE_\w+|TUNE_ONLY|OPUS_ONLY"
    r"|OPUS_SKIP_CKTILE|TUNE_MOE_KERNEL_REGEX\Z"
)
"""Switches that choose other tables, other kernels or another build than the image's own."""
SHELL_CLEARED = "GEMMFLEET_CLEARED_ENV"
"""Names that tune.sh cleared before the worker began."""


def cleared(base: Mapping[str, str] = os.environ) -> list[str]:
    """Names of inherited variables that AITER is not to see, those that tune.sh took away among them."""
    earlier = base.get(SHELL_CLEARED, "").split()
    return sorted({*earlier, *(name for name in base if CLEARED.fullmatch(name))})


def environment(
    base: Mapping[str, str],
    *,
    paths: list[Path],
    jit: Path,
    tmp: Path,
    shim: Path | None = None,
    journal: Path | None = None,
    blocked: Path | None = None,
    worker_code: Path | None = None,
) -> dict[str, str]:
    """The environment of one process. `paths`: where `aiter` is imported from, first; `jit`, `tmp`: the slot's own.

    `worker_code` (our own package's folder) is taken off the path: nothing of ours is AITER's to import.
    """
    env = {k: v for k, v in base.items() if not CLEARED.fullmatch(k)}
    inherited = [
        p for p in base.get("PYTHONPATH", "").split(os.pathsep)
        if p and not (worker_code and os.path.realpath(p) == os.path.realpath(worker_code))
    ]  # fmt: skip
    ours = [str(shim)] if shim else []
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*ours, *map(str, paths), *inherited]))
    env["PYTHONUNBUFFERED"] = "1"  # prints would come in blocks else
    env["PYTHONFAULTHANDLER"] = "1"
    env["AITER_JIT_DIR"] = str(jit)
    env["TMPDIR"] = str(tmp)
    for name, path in (("GEMMFLEET_AITER_JOURNAL", journal), ("GEMMFLEET_AITER_BLOCKED", blocked)):
        env.pop(name, None)
        if shim and path:
            env[name] = str(path)
    return env
