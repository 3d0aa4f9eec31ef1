"""Config files of vLLM and SGLang checked without a GPU, by the look-ups, launchers and kernels of the engine itself.

An error: the engine never reads the file, fails on it, or computes wrong results with it. A warning: it is read rarely,
spills, or serves M that are far from its keys. A note: worth a look. There is one finding a file and rule.
Imports torch and triton.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton

from orchestrator.configs.check import COMPILE_LIMITS, cache_of_triton, outliers
from worker.foreign.answer import report
from worker.foreign.runner import call
from worker.text import LEVELS, Finding, and_more
from worker.triton_configs.engine import FOLDERS, OVERRIDE, EngineError, Values, locate
from worker.triton_configs.keys import USUAL_KEYS, served
from worker.triton_configs.resolve import ConfigFileError, read
from worker.tuners.vllm.lookups import LINEAR, MOE, Fault, File, Lookups, Table, lookups_of

FAR = 4
"""An M is far from the key of its entry if one is at least this many times the other."""
MOST_KEYS = 8
CHUNK = 16
"""Files that a process looks at in a row if it does not compile: it loads the engine anew for each device."""
LOOK_LIMITS = replace(COMPILE_LIMITS, seconds=3600)
"""All files of an engine are looked up in minutes; the rest is for a busy machine."""
Faults = dict[Fault, list[int]]
"""Keys of a file by what is wrong with them; none if it is wrong with the whole file."""


@dataclass(frozen=True, slots=True)
class CheckedEngine:
    """The result of a check. `compiled` has an item for each entry of which Triton makes different code."""

    project: str
    version: str
    triton: str
    files: int
    findings: list[Finding]
    compiled: dict[str, Values]


def check(
    root: Path,
    device: str | None,
    sizes: Mapping[str, int],
    *,
    override: Path | None = None,
    compiling: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Check the files of an engine that are of the device (None: any) and of the sizes (N, K, E). `override`: those of
    this override folder of vLLM instead. `compiling`: and compile their entries. Returns the document of `--json`.
    Raises EngineError, ForeignCodeError."""
    env = cache_of_triton()
    if override:
        env[OVERRIDE] = str(override.absolute())
    done = call(
        check_files, root, override, device, sizes, compiling,
        limits=COMPILE_LIMITS if compiling else LOOK_LIMITS,
        packages=True, env=env, raises=(EngineError,), progress=say,
    )  # fmt: skip
    return {
        "project": done.project, "version": done.version, "triton": done.triton, "files": done.files,
        "entries": len(done.compiled), "findings": done.findings, "compiled": done.compiled if compiling else {},
        **{f"{level}s": sum(f.level == level for f in done.findings) for level in LEVELS},
    }  # fmt: skip


def check_files(
    root: Path, override: Path | None, device: str | None, sizes: dict[str, int], compiling: bool
) -> CheckedEngine:
    """`check` itself. It runs code of the engine: call it in a process of its own."""
    project, package, version = locate(root)
    if override and project != "vllm":
        raise EngineError(f"{OVERRIDE} is vLLM's, and {package} is of {project}: name a vLLM with --engine")
    folders = [override] if override else [package / folder / "configs" for folder in FOLDERS[project]]
    paths = (path for folder in folders for path in folder.rglob("*.json"))
    named = [f for f in map(File.of, paths) if f and device in (None, f.device)]
    files = [f for f in named if all(getattr(f.layer, name.lower()) == size for name, size in sizes.items())]
    if not files:
        raise EngineError(f"{override or package} has no config file for {device or 'any device'} and that shape")
    files.sort(key=lambda f: (f.device, f.path))
    findings, compiled, begin = list[Finding](), dict[str, Values](), time.monotonic()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        look_at = partial(look, package, override or package.parent, compiling)
        looked = pool.map(look_at, files, chunksize=1 if compiling else CHUNK)
        for n, (some, results) in enumerate(looked, 1):
            findings += some
            compiled |= results
            if compiling:
                rate = len(compiled) / (time.monotonic() - begin)
                report(f"{n} of {len(files)} files: {len(compiled)} distinct entries compiled, {rate:.1f} a second")
    if device is None and not sizes and override is None:
        findings += _unread_folders(package, files, findings)
    findings.sort(key=lambda f: (LEVELS.index(f.level), f.rule, f.path, f.line))
    return CheckedEngine(project, version, triton.__version__, len(files), findings, compiled)


def look(package: Path, top: Path, compiling: bool, file: File) -> tuple[list[Finding], dict[str, Values]]:
    """Findings on a file, by its path below `top`, and its distinct entries with what became of them. Call it in a
    process of its own."""
    at = str(file.path.relative_to(top))
    try:
        content = read(file.path)
    except (ConfigFileError, OSError) as e:
        return [Finding("error", "unreadable", at, 0, str(e))], {}
    lookups, results = lookups_of(package, file.device), dict[str, Values]()
    by, table, fault = lookups.ask(file)
    faults: Faults = {f: [] for f in (fault, _lacking_keys(table)) if f}
    if lookups.target and by in (LINEAR, MOE) and file.layer.dtype != "int4_w4a16":
        for m, values in table.items():
            for fault in _entry_faults(lookups, file, m, values, results, compiling):
                faults.setdefault(fault, []).append(m)
    if odd := list(outliers({str(m): values for m, values in table.items() if values})):
        faults["note", "outlier", odd[0][1]] = [int(m) for m, _ in odd]
    findings = []
    for (level, rule, text), ms in faults.items():
        names = [str(m) for m in ms]
        where = f"M = {and_more(names, MOST_KEYS)}: " if names else ""
        findings.append(Finding(level, rule, at, content.line(names[0]) if names else 0, where + text))
    return findings, results


def _lacking_keys(table: Table) -> Fault | None:
    lacking = {m: min(table, key=lambda key: abs(key - m)) for m in USUAL_KEYS if table and m not in table}
    if not lacking:
        return None
    serve = {key: served(table)[key] for key in lacking.values()}
    gets = [f"the entry of {key} serves M = {first}..{last or ''}" for key, (first, last) in serve.items()]
    far = any(max(pair) >= FAR * min(pair) for pair in lacking.items())
    text = f"lacks {len(lacking)} of the {len(USUAL_KEYS)} usual keys: {', '.join(gets)}"
    return "warning" if far else "note", "keys", text


def _entry_faults(
    lookups: Lookups, file: File, m: int, values: Values, results: dict[str, Values], compiling: bool
) -> Iterator[Fault]:
    try:
        key, constants = lookups.bind(file, m, values)
        without_file, _ = lookups.bind(file, m, None)
    except Exception as e:  # noqa: BLE001 - the engine's and Triton's own errors are of any type
        yield "error", "refused", f"the launch fails: {type(e).__name__}: {e}"
        return
    if key == without_file:
        yield "note", "default", "the same as without a file"
    block_k, (bn, bk) = constants["BLOCK_SIZE_K"], file.layer.block or (0, 0)
    if bn and bk % block_k and bk < (file.layer.n if file.rest.endswith("_down") else file.layer.k):
        text = f"wrong results: BLOCK_SIZE_K is {block_k}, and a step takes the scales of one group of {bk}"
        yield "error", "scale group", text
    results[key] = result = lookups.compiled(key, file, m, values) if compiling else {"status": "ok", "spills": 0}
    if result["status"] != "ok":
        rule = "shared memory" if result["status"] == "unsupported" else "compile"
        yield "error", rule, str(result["detail"])
    elif result["spills"]:
        yield "warning", "spills", "spills registers"


def _unread_folders(package: Path, files: Sequence[File], findings: Sequence[Finding]) -> Iterator[Finding]:
    unread = {package.parent / f.path for f in findings if f.rule in ("name", "shadowed")}
    folders = {f.path.parent for f in files if f.path.parent.name.startswith("triton_")}
    for folder in sorted(folders - {f.path.parent for f in files if f.path not in unread}):
        yield Finding("warning", "folder", str(folder.relative_to(package.parent)), 0, "none of its files is read")
