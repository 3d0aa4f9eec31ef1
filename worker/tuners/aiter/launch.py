"""Makes the command line and environment of an AITER process.

The command line only has flags that the script has. Inherited variables that would change the result are cleared and
recorded. Precedence for GPU_ARCHS, CU_NUM and the switches of single tuners: the inventory's `aiter:` section, its
`env:`, the slot's own chip, the image.

A separate process queries the chip and runs its canary, because its context must not stay on the GPU:
`python -m worker.tuners.aiter.launch facts|canary|times` prints one JSON object. `facts`: gfx, cu_num, device and
versions as torch has them. `canary`: as the torch tuner's, or `absent` with the reason if the image's torch cannot
multiply. `times`: compute_us and memory_us of the timed canary.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker import PACKAGE_PARENT
from worker.families import Family
from worker.process import Child
from worker.protocol.paths import AITER_CLEARED, AITER_SWITCHES, CLEARED_ENV, INVENTORY_ENV
from worker.tuners.aiter.findings import SHIM, TunerScript
from worker.tuners.aiter.spec import Options, tuner_arg_flags

UNTUNED, TUNED, PROFILE, LOG = "untuned.csv", "tuned.csv", "profile.csv", "tuner.log"
"""Files in the folder of a process: what AITER reads and writes, and what it prints."""
JOURNAL, LEFT_OUT = "candidates.jsonl", "blocked.jsonl"
"""Files of the shim in that folder: its records, and the candidates that it leaves out (shim/sitecustomize.py)."""
WATCH_ENV = "GEMMFLEET_AITER_WATCH"
"""Tells the shim the folder."""
DEFAULT_BATCH = 4
"""Shapes a batch if the version loses nothing by it: a pool of processes starts for each, 10 to 25 s."""
LONGEST_TIMEOUT_S = 7 * 24 * 3600
KNOWN_TO_AITER = ("gfx942", "gfx950")
"""Chips whose name AITER's build takes in GPU_ARCHS at every date; others it queries from the driver (`native`)."""


def batch_size(family: Family, script: TunerScript, options: Options) -> int:
    """Shapes that AITER takes at once.

    A shape without a valid candidate spoils the later shapes of its batch before `daa8e94a49` (2026-04-15), the day
    after `--run_config` came. We take winners from the profile there, and still give such a version one shape a batch.
    """
    several = family.aiter.always_has_candidates and script.has("--run_config")
    return options.batch or (DEFAULT_BATCH if several else 1)


def ignored_options(script: TunerScript, options: Options) -> list[str]:
    """Notes on the options that the user asked for and that this version of the script does not have."""
    asked = (
        ("--warmup", options.warmup, "--warmup"), ("--iters", options.iters, "--iters"),
        ("--batch", options.batch, "--batch"), ("--split-k", options.split_k, "--splitK"),
        *((f"--tuner-arg {name}", True, name) for name, _ in tuner_arg_flags(options.tuner_args)),
    )  # fmt: skip
    here = f"{script.path.name} of this image has no"
    notes = [f"{name} is ignored: {here} {flag}" for name, value, flag in asked if value and not script.has(flag)]
    if options.tuner_timeout and not script.has("--timeout"):
        notes.append(f"--tuner-timeout is kept by gemmfleet alone: {here} --timeout")
    return notes


def argv(
    family: Family, script: TunerScript, options: Options, folder: Path, *, batch: int, err_ratio: float
) -> list[str]:
    """The arguments after the interpreter. Raises ValueError if the script lacks a flag that nothing replaces.

    Never `--verbose`: since 2026-05-26 (9a41912018) AITER's comparison raises with it instead of returning the error,
    and a wrong candidate reads as one that cannot run.
    """
    out = [str(script.path)]
    # always both: with --preshuffle the defaults are those of the family without it
    for names, file in ((("--untune_file", "--input_file"), UNTUNED), (("--tune_file", "--tuned_file"), TUNED)):
        known = [n for n in names if script.has(n)]
        if not known:
            raise ValueError(f"{script.path.name} of this image has none of {' and '.join(names)}")
        out += [known[0], str(folder / file)]
    wanted: tuple[tuple[str, object], ...] = (
        *((flag, True) for flag in family.aiter.flags),
        ("--profile_file", folder / PROFILE), ("--mp", 1), ("--errRatio", f"{err_ratio:g}"), ("--batch", batch),
        ("--timeout", aiter_timeout(options, batch)), ("--warmup", options.warmup), ("--iters", options.iters),
        ("--splitK", options.split_k),
    )  # fmt: skip
    for flag, value in wanted:
        if value and script.has(flag):
            out += [flag] if value is True else [flag, str(value)]
    return out + [w for name, mine in tuner_arg_flags(options.tuner_args) if script.has(name) for w in mine]


def aiter_timeout(options: Options, batch: int) -> int:
    """AITER's own limit of a task in seconds. It is beyond ours, because a shape that AITER gives up is lost silently
    with all candidates. Until 2026-08 it counts from the start of the batch."""
    return int(options.tuner_timeout * 1.5 + 60) * batch if options.tuner_timeout else LONGEST_TIMEOUT_S


def chip_variables(device: Mapping[str, Any]) -> dict[str, str]:
    """GPU_ARCHS and CU_NUM of a device as probe and torch name it: of a list, with which images are built, `get_gfx()`
    takes the last entry."""
    gfx = str(device.get("gfx") or "")
    if not gfx.startswith("gfx"):
        return {}
    return {"GPU_ARCHS": gfx if gfx in KNOWN_TO_AITER else "native", "CU_NUM": str(device.get("cu_num") or 0)}


def environment(
    base: Mapping[str, str], root: Path, slot: Path | None, device: Mapping[str, Any], watched: Path | None = None
) -> dict[str, str]:
    """The environment of a process that imports `aiter` from `root`. Nothing of ours is AITER's to import.

    `device`: gfx and cu_num as far as they are known. `slot`: the slot's folder with `jit` (where AITER builds) and
    `tmp`. `watched`: the folder of a process whose candidates the shim reports.
    """
    env = {k: v for k, v in base.items() if not _is_taken(k, base)}
    env = {**chip_variables(device), **env}
    inherited = base.get("PYTHONPATH", "").split(os.pathsep)
    ours = os.path.realpath(PACKAGE_PARENT)
    path = [*([SHIM] if watched else []), root, *(p for p in inherited if p and os.path.realpath(p) != ours)]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(map(str, path)))
    env |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}  # unbuffered: prints would come in blocks
    env |= {"AITER_JIT_DIR": str(slot / "jit"), "TMPDIR": str(slot / "tmp")} if slot else {}
    return env | ({WATCH_ENV: str(watched)} if watched else {})


def inventory_switches(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Switches that the inventory sets, with their values; AITER gets them."""
    named = base.get(INVENTORY_ENV, "").split()
    return {n: base[n] for n in named if n in base and is_switch(n) and not _is_taken(n, base)}


def cleared_names(base: Mapping[str, str] = os.environ) -> list[str]:
    """Names of inherited variables that AITER does not get, those that tune.sh cleared among them."""
    earlier = [word.partition("=")[0] for word in base.get(CLEARED_ENV, "").split()]
    return sorted({*earlier, *(name for name in base if is_switch(name) and _is_taken(name, base))})


def is_switch(name: str) -> bool:
    """True for a variable that changes AITER's candidates, tables or build."""
    return bool(AITER_CLEARED.fullmatch(name) or AITER_SWITCHES.fullmatch(name))


def _is_taken(name: str, base: Mapping[str, str]) -> bool:
    """True if AITER does not get an inherited variable."""
    named = name in base.get(INVENTORY_ENV, "").split()
    return name == WATCH_ENV or bool(AITER_CLEARED.fullmatch(name)) or (is_switch(name) and not named)


def switch_record(device: Mapping[str, Any], base: Mapping[str, str] = os.environ) -> dict[str, dict[str, str]]:
    """Switches for provenance: `set` (ours), `overridden` (what the image had of those), `kept` (the inventory's)."""
    kept = inventory_switches(base)
    ours = {n: v for n, v in chip_variables(device).items() if n not in kept}
    had = dict(word.split("=", 1) for word in base.get(CLEARED_ENV, "").split() if "=" in word)
    had |= {n: v for n, v in base.items() if n not in kept}
    return {"set": ours, "overridden": {n: had[n] for n, v in ours.items() if had.get(n, v) != v}, "kept": kept}


def switch_warnings(device: Mapping[str, Any], base: Mapping[str, str] = os.environ) -> list[str]:
    """Warnings about switches of the inventory that change the candidates."""
    gfx, cu_num = device.get("gfx"), device.get("cu_num")
    harmless = {"GPU_ARCHS": ("native", gfx), "CU_NUM": ("0", str(cu_num))}
    here = f"this slot has {gfx or 'no chip that is known'} with {cu_num} compute units"
    return [
        f"{name}={value} of the inventory is kept, which changes AITER's candidates or their verdicts: {here}"
        for name, value in inventory_switches(base).items()
        if value.split(";")[-1].strip() not in harmless.get(name, ())
    ]


MARK = "GEMMFLEET-ONCHIP "
TIMEOUT_S = 240.0
"""An answer may take this many seconds, because the process imports torch."""


def query_device(what: str, env: Mapping[str, str]) -> dict[str, Any]:
    """The answer of a fresh process; `{"error": text}` if it gives none. KeyboardInterrupt ends it."""
    path = os.pathsep.join(p for p in (str(PACKAGE_PARENT), env.get("PYTHONPATH", "")) if p)
    with tempfile.TemporaryFile() as out:
        words = [sys.executable, "-m", "worker.tuners.aiter.launch", what]
        process = Child(words, env={**env, "PYTHONPATH": path}, out=out.fileno())
        try:
            if not process.wait(TIMEOUT_S):
                return {"error": f"no answer within {TIMEOUT_S:g} s"}
        finally:
            process.kill()
        out.seek(0)
        lines = out.read().decode(errors="replace").splitlines()
    answer = next((line.removeprefix(MARK) for line in lines if line.startswith(MARK)), "")
    print("".join(f"{line}\n" for line in lines if not line.startswith(MARK)), end="", flush=True)
    try:
        return dict(json.loads(answer))
    except (ValueError, TypeError):
        return {"error": f"ended with status {process.returncode} and without an answer"}


def facts() -> dict[str, Any]:
    """gfx, cu_num, device and versions by torch; `absent` if there is no torch or no GPU for it."""
    import torch

    out: dict[str, Any] = {"torch": str(torch.__version__), "hip": getattr(torch.version, "hip", None)}
    if not torch.cuda.is_available():
        return {"absent": "torch sees no GPU", **out}
    props = torch.cuda.get_device_properties(torch.cuda.current_device())
    gfx = str(getattr(props, "gcnArchName", "")).split(":")[0]
    return {"gfx": gfx, "cu_num": int(props.multi_processor_count), "device": str(props.name), **out}


def canary() -> dict[str, Any]:
    """ok, us, detail; `absent` if torch is of no use."""
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
        answered = {"error" if sys.argv[1] == "times" else "absent": f"no torch: {e}"}
    except Exception as e:  # noqa: BLE001 - whatever the GPU does is the answer
        answered = {"error": f"{type(e).__name__}: {e}"[:1000]}
    print(MARK + json.dumps(answered), flush=True)
    os._exit(0)  # exit handlers of libraries may hang
