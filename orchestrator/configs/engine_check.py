"""Config files of vLLM and SGLang checked without a GPU, by the look-ups, launchers and kernels of the engine itself.

`check` gives the files in parts to `check_files`, each in a process of its own, because that runs code of the engine;
`check_file` checks one. A rule for the entries of a file is one more `yield` in `FileCheck._entry_faults`.
An error: the engine never reads the file, fails on it, or computes wrong results with it. A warning: it is read rarely,
spills, or serves M that are far from its keys. A note: worth a look. There is one finding a file and rule.
`engine_tree.py` merges winners into such files. Imports triton, and torch in those processes only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any

import triton

from orchestrator.configs.check import COMPILE_LIMITS, COMPILED_AT_ONCE, cache_of_triton, parts_of
from orchestrator.configs.lint import outliers
from worker.foreign.runner import Limits, call_each
from worker.text import LEVELS, Finding, and_more
from worker.triton_configs.config_file import ConfigFileError, read_config_file
from worker.triton_configs.engine_config_file import EngineConfigFile, config_files
from worker.triton_configs.engine_package import OVERRIDE, EnginePackage, ServingEngineError
from worker.triton_configs.m_ranges import USUAL_KEYS, ranges_served
from worker.triton_configs.pair import Values
from worker.triton_configs.serving_engine import LINEAR_LOOKUP, MOE_LOOKUP
from worker.tuners.engines.lookups import EngineLookups, FileFault, Table, lookups_of

FAR = 4
"""An M is far from the key of its entry if one is at least this many times the other."""
MOST_KEYS = 8
"""Keys that a finding names."""
LEAST_LOOKED_AT = 16
"""Fewer files are looked at by one process: a further one takes seconds to import torch and to load the engine."""
LOOK_LIMITS = Limits(seconds=600, memory=16 << 30)
"""For a core's share of the files: all files of vLLM are looked up in 22 s of CPU; the rest is for a busy machine."""
WITHOUT_LAUNCHER = "int4_w4a16"
"""The dtype whose kernel is another one, which cannot be asked here."""


CheckedFile = tuple[list[Finding], dict[str, Values]]
"""Findings on a file, and the outcome of each distinct entry (of which Triton makes different code), by Triton's key of
it: `{"...": {"status": "ok", "spills": 0}}`."""


def check(
    package: EnginePackage,
    device: str | None,
    sizes: Mapping[str, int],
    *,
    override: Path | None = None,
    compiling: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Check the files of an engine that are of the device (None: any) and of the sizes (N, K, E). `override`: those of
    this override folder of vLLM instead. `compiling`: and compile their entries. Returns the document of `--json`.
    Raises ServingEngineError, ForeignCodeError."""
    if override and package.project != "vllm":
        engine = f"{package.folder} is of {package.project}"
        raise ServingEngineError(f"only override folders of vLLM ({OVERRIDE}) can be checked, and {engine}")
    files = [file for file in config_files(package, override) if _is_asked_for(file, device, sizes)]
    if not files:
        asked = [device or "any device", *(f"{name}={size}" for name, size in sizes.items())]
        fault = f"{override or package.folder} has no config file for {', '.join(asked)}"
        spelling = f"; the names of files spell it {device.replace(' ', '_')}" if device and " " in device else ""
        raise ServingEngineError(fault + spelling)
    findings: list[Finding] = []
    compiled: dict[str, Values] = {}
    for file_findings, entries in _check_in_parts(package, override, files, compiling, say):
        findings += file_findings
        compiled |= entries
    if device is None and not sizes and override is None:
        findings += _unread_folders(package.folder, files, findings)
    findings.sort(key=lambda finding: finding.order)
    document = {
        "project": package.project,
        "version": package.version,
        "triton": triton.__version__,
        "files": len(files),
        "entries": len(compiled),
        "findings": findings,
        "compiled": compiled if compiling else {},
    }
    levels = [finding.level for finding in findings]
    return document | {f"{level}s": levels.count(level) for level in LEVELS}


def _check_in_parts(
    package: EnginePackage,
    override: Path | None,
    files: Sequence[EngineConfigFile],
    compiling: bool,
    say: Callable[[str], None],
) -> Iterator[CheckedFile]:
    """The check of each file. Raises ServingEngineError, ForeignCodeError."""
    env = cache_of_triton()
    if override:
        env[OVERRIDE] = str(override.absolute())
    size = COMPILED_AT_ONCE
    if not compiling:
        size = max(LEAST_LOOKED_AT, ceil(len(files) / len(os.sched_getaffinity(0))))
    top = override or package.folder.parent
    calls = [(package.folder, top, compiling, part) for part in parts_of(files, size)]

    def tell(count: int) -> None:
        if compiling:
            say(f"{min(count * size, len(files))} of {len(files)} files compiled")

    parts = call_each(
        check_files,
        calls,
        limits=COMPILE_LIMITS if compiling else LOOK_LIMITS,
        packages=True,
        env=env,
        raises=(ServingEngineError,),
        finished=tell,
    )
    return chain.from_iterable(parts)


def check_files(package: Path, top: Path, compiling: bool, files: list[EngineConfigFile]) -> list[CheckedFile]:
    """Check files. It runs code of the engine: call it in a process of its own."""
    return [check_file(package, top, compiling, file) for file in files]


def _is_asked_for(file: EngineConfigFile, device: str | None, sizes: Mapping[str, int]) -> bool:
    """True for a file of the device (None: any) and of the sizes."""
    has_sizes = all(getattr(file.layer, name.lower()) == size for name, size in sizes.items())
    return has_sizes and device in (None, file.device)


def check_file(package: Path, top: Path, compiling: bool, file: EngineConfigFile) -> CheckedFile:
    """Findings on a file, by its path below `top`, and its distinct entries with what became of them."""
    shown_path = str(file.path.relative_to(top))
    try:
        content = read_config_file(file.path)
    except (ConfigFileError, OSError) as e:
        return [Finding("error", "unreadable", shown_path, 0, str(e))], {}
    file_check = FileCheck(lookups_of(package, file.device), file, compiling=compiling)
    findings: list[Finding] = []
    for fault, ms in file_check.faults().items():
        names = [str(m) for m in ms]
        text = f"M = {and_more(names, MOST_KEYS)}: {fault.text}" if names else fault.text
        line = content.line_of(names[0]) if names else 0
        findings.append(Finding(fault.level, fault.rule, shown_path, line, text))
    return findings, file_check.entries


class FileCheck:
    """The faults of one file, and its distinct entries."""

    def __init__(self, lookups: EngineLookups, file: EngineConfigFile, *, compiling: bool) -> None:
        self.lookups = lookups
        self.file = file
        self.compiling = compiling
        self.entries: dict[str, Values] = {}
        """See `CheckedFile`; since `faults`."""

    def faults(self) -> dict[FileFault, list[int]]:
        """Each fault with the keys that have it; no keys if the whole file has it."""
        answer = self.lookups.find_lookup(self.file)
        table = answer.table
        faults: dict[FileFault, list[int]] = {}
        for fault in (answer.fault, _lacking_keys(table)):
            if fault:
                faults[fault] = []
        can_launch = answer.lookup in (LINEAR_LOOKUP, MOE_LOOKUP) and self.file.layer.dtype != WITHOUT_LAUNCHER
        if self.lookups.target and can_launch:
            for m, values in table.items():
                for fault in self._entry_faults(m, values):
                    faults.setdefault(fault, []).append(m)
        odd = list(outliers({str(m): values for m, values in table.items() if values}))
        if odd:
            _, text = odd[0]
            faults[FileFault("note", "outlier", text)] = [int(m) for m, _ in odd]
        return faults

    def _entry_faults(self, m: int, values: Values) -> Iterator[FileFault]:
        try:
            key, constants = self.lookups.kernels.bind(self.file, m, values)
            key_without_file, _ = self.lookups.kernels.bind(self.file, m, None)
        except Exception as e:  # noqa: BLE001 - the engine's and Triton's own errors are of any type
            yield FileFault("error", "refused", f"the launch fails: {type(e).__name__}: {e}")
            return
        if key == key_without_file:
            yield FileFault("note", "default", "the same as without a file")
        step = constants["BLOCK_SIZE_K"]
        layer = self.file.layer
        _, group = layer.block or (0, 0)
        k = layer.n if self.file.is_second_product else layer.k
        if group and group % step and group < k:
            text = f"wrong results: BLOCK_SIZE_K is {step}, and a step takes the scales of one group of {group}"
            yield FileFault("error", "scale group", text)
        result: Values = {"status": "ok", "spills": 0}
        if self.compiling:
            result = self.lookups.kernels.compiled(key, self.file, m, values)
        self.entries[key] = result
        if result["status"] != "ok":
            rule = "shared memory" if result["status"] == "unsupported" else "compile"
            yield FileFault("error", rule, str(result["detail"]))
        elif result["spills"]:
            yield FileFault("warning", "spills", "spills registers")


def _lacking_keys(table: Table) -> FileFault | None:
    """The usual keys that a file lacks, by the entries that serve them. Far ones are a warning."""
    if not table:
        return None
    serving = {m: min(table, key=lambda key: abs(key - m)) for m in USUAL_KEYS if m not in table}
    if not serving:
        return None
    ranges = ranges_served(table)
    texts: list[str] = []
    for key in dict.fromkeys(serving.values()):
        first, last = ranges[key]
        texts.append(f"the entry of {key} serves M = {first}..{last or ''}")
    is_far = any(max(m, key) >= FAR * min(m, key) for m, key in serving.items())
    text = f"lacks {len(serving)} of the {len(USUAL_KEYS)} usual keys: {', '.join(texts)}"
    return FileFault("warning" if is_far else "note", "keys", text)


def _unread_folders(package: Path, files: Sequence[EngineConfigFile], findings: Sequence[Finding]) -> Iterator[Finding]:
    """Folders of one version of Triton of which no file is read."""
    unread = {package.parent / finding.path for finding in findings if finding.rule in ("name", "shadowed")}
    folders = {file.path.parent for file in files if file.path.parent.name.startswith("triton_")}
    read_folders = {file.path.parent for file in files if file.path not in unread}
    for folder in sorted(folders - read_folders):
        yield Finding("warning", "folder", str(folder.relative_to(package.parent)), 0, "none of its files is read")
