"""Config files of vLLM and SGLang checked without a GPU, by the look-ups, launchers and kernels of the engine itself.

An error: the engine never reads the file, fails on it, or computes wrong results with it. A warning: it is read rarely,
spills, or serves M that are far from its keys. A note: worth a look. There is one finding a file and rule.
Imports torch and triton.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton

from orchestrator.configs.check import outliers
from worker.text import LEVELS, Finding, Level, and_more, plural
from worker.triton_configs.engine import FOLDERS, EngineError, locate
from worker.triton_configs.keys import USUAL_KEYS, served
from worker.triton_configs.resolve import ConfigFileError, read
from worker.tuners.vllm.lookups import GROUP, Answer, Entry, File, Lookups, compile_all, rocm_names

FAR = 4
"""An M is far from the key of its entry if one is at least this many times the other."""
MOST_KEYS = 8
Fault = tuple[Level, str, int | None, str]
"""Level, rule, the first key that it is about, text."""


@dataclass(slots=True)
class Checked:
    """The check of an engine's files. The document of `--json` holds these fields. `entries`: those of which Triton
    makes different code; `compiled`: by their keys."""

    project: str
    version: str
    files: int
    entries: int
    findings: list[Finding]
    compiled: dict[str, dict[str, Any]]
    triton: str = triton.__version__


def check(
    root: Path, device: str | None, sizes: Mapping[str, int], *, compiling: bool, say: Callable[[str], None]
) -> Checked:
    """Check the files of an engine that are of the device (None: any) and of the sizes (N, K, E). `compiling`: and
    compile their entries. Raises EngineError."""
    project, package, version = locate(root)
    paths = (p for folder in FOLDERS[project] for p in (package / folder / "configs").rglob("*.json"))
    named = [f for f in map(File.of, paths) if f and device in (None, f.device)]
    files = [f for f in named if all(getattr(f.layer, name.lower()) == size for name, size in sizes.items())]
    if not files:
        raise EngineError(f"{package} has no config file for {device or 'any device'} and that shape")
    files.sort(key=lambda f: (f.device, f.path))
    groups = [list(some) for _, some in groupby(files, key=lambda f: f.device)]
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        looked = list(pool.map(look, [package] * len(groups), groups))
    findings, entries = ([x for some in column for x in some] for column in zip(*looked, strict=True))
    if device is None and not sizes:
        findings += _unread_folders(package, files, findings)
    out = Checked(project, version, len(files), len({e.key for e in entries}), findings, {})
    if compiling:
        out.compiled = compile_all(package, entries, cores, say)
        for file, some in groupby(entries, key=lambda e: e.file):
            out.findings += _findings(package, file, _compile_faults(list(some), out.compiled))
    out.findings.sort(key=lambda f: (LEVELS.index(f.level), f.rule, f.path, f.line))
    return out


def look(package: Path, files: Sequence[File]) -> tuple[list[Finding], list[Entry]]:
    """Findings on the files of one device, and the entries that can be compiled. Call it in a process of its own."""
    findings: list[Finding] = []
    entries: list[Entry] = []
    lookups = Lookups(package, files[0].device, files[0].arch)
    for file in files:
        answer = lookups.ask(file)
        faults = [*_name_faults(package, file, answer), *_key_faults(answer.table)]
        if file.arch is not None:
            faults += _entry_faults(lookups, file, answer, entries)
        findings += _findings(package, file, faults)
    return findings, entries


def _findings(package: Path, file: File, faults: Iterable[Fault]) -> Iterator[Finding]:
    at = str(file.path.relative_to(package.parent))
    try:
        content = read(file.path)
    except (ConfigFileError, OSError) as e:
        yield Finding("error", "unreadable", at, 0, str(e))
    else:
        yield from (Finding(level, rule, at, content.line(str(key)), text) for level, rule, key, text in faults)


def _name_faults(package: Path, file: File, answer: Answer) -> Iterator[Fault]:
    names = rocm_names(package) if isinstance(file.arch, str) else ()
    if not answer.by:
        yield "error", "name", None, f"never read: no look-up of this version forms {answer.strange}"
    elif answer.error:
        yield "error", "look-up", None, f"{answer.by.__name__} fails: {answer.error}"
    elif answer.read != file.path:
        first, own = (p.parent.name for p in (answer.read or file.path, file.path))
        text = f"not read by Triton {triton.__version__}, for which the file in {first} counts; only by that of {own}"
        yield "warning", "shadowed", None, text
    elif not file.device:
        yield "warning", "name", None, "read only where the driver reports an empty name of the device"
    elif names and file.device not in names:
        words = re.findall(r"MI\d+|\d{4}[A-Z]", file.device)
        if same := [name for name in names if any(word in name for word in words)]:
            yield "error", "name", None, f"never read: the engine's map of device ids names this chip {same[0]}"
        else:
            yield "note", "name", None, "the engine's map of device ids lacks this chip: its driver's name counts"


def _key_faults(table: Mapping[int, Any]) -> Iterator[Fault]:
    lacking = {m: min(table, key=lambda key: abs(key - m)) for m in USUAL_KEYS if table and m not in table}
    if lacking:
        serve = {key: served(table)[key] for key in lacking.values()}
        gets = [f"the entry of {key} serves M = {first}..{last or ''}" for key, (first, last) in serve.items()]
        far = any(max(pair) >= FAR * min(pair) for pair in lacking.items())
        text = f"lacks {len(lacking)} of the {len(USUAL_KEYS)} usual keys: {', '.join(gets)}"
        yield "warning" if far else "note", "keys", None, text


def _entry_faults(lookups: Lookups, file: File, answer: Answer, entries: list[Entry]) -> Iterator[Fault]:
    table = {m: values for m, values in answer.table.items() if values}
    faults: dict[tuple[Level, str, str], list[int]] = defaultdict(list)
    grouped = file._replace(layer=replace(file.layer, block=(0, GROUP)))
    bn, bk = file.layer.block or (0, 0)
    k = file.layer.n if file.rest.endswith("_down") else file.layer.k
    for m, values in table.items():
        try:
            constants, key = lookups.bind(file, answer, m, values)
            like_default = key and key == lookups.bind(file, answer, m, None)[1]
        except Exception as e:  # noqa: BLE001 - the engine's and Triton's own errors are of any type
            faults["error", "refused", f"the launch fails: {type(e).__name__}: {e}"].append(m)
            continue
        entries += [Entry(key, file, m, values)] * bool(key)
        block_k = constants.get("BLOCK_SIZE_K", 1)
        if bn and bk % block_k and k > bk:
            text = f"wrong results: BLOCK_SIZE_K is {block_k}, and a step takes the scales of one group of {bk}"
            faults["error", "scale group", text].append(m)
        if like_default:
            faults["note", "default", "the same as without a file"].append(m)
        if file.layer.dtype == "int8_w8a16":
            try:
                lookups.bind(grouped, answer, m, values)
            except Exception as e:  # noqa: BLE001 - as above
                faults[
                    "warning", "refused", f"fails for weights with scales of groups: {type(e).__name__}: {e}"
                ].append(m)
    odd = list(outliers({str(m): values for m, values in table.items()}))
    if odd:
        faults["note", "outlier", odd[0][1]] = [int(m) for m, _ in odd]
    yield from _grouped(faults)


def _grouped(faults: Mapping[tuple[Level, str, str], list[int]]) -> Iterator[Fault]:
    for (level, rule, text), ms in faults.items():
        yield level, rule, ms[0], f"M = {and_more([str(m) for m in ms], MOST_KEYS)}: {text}"


def _unread_folders(package: Path, files: Sequence[File], findings: Sequence[Finding]) -> Iterator[Finding]:
    unread = {package.parent / f.path for f in findings if f.rule in ("name", "shadowed") and f.level != "note"}
    for folder, some in groupby(sorted(f.path for f in files), key=lambda path: path.parent):
        paths = list(some)
        if folder.name.startswith("triton_") and unread.issuperset(paths):
            at = str(folder.relative_to(package.parent))
            yield Finding("warning", "folder", at, 0, f"none of the files is read: {plural(len(paths), 'file')}")


def _compile_faults(entries: Sequence[Entry], compiled: Mapping[str, Mapping[str, Any]]) -> Iterator[Fault]:
    """Faults of the entries of one file."""
    faults: dict[tuple[Level, str, str], list[int]] = defaultdict(list)
    for e in entries:
        result = compiled[e.key]
        if result["status"] == "unsupported":
            faults["error", "shared memory", str(result["detail"])].append(e.m)
        elif result["status"] != "ok":
            faults["error", "compile", f"does not compile: {result['detail']}"].append(e.m)
        elif result["spills"]:
            faults["warning", "spills", "spills registers"].append(e.m)
    yield from _grouped(faults)
