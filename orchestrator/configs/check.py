"""Config files of a tree of AITER checked without a GPU: linted (`lint.py`), and if asked each bucket compiled.

`configs check` calls `check` for each of `chips_of`. Compiling runs code of the tree, so it is done in processes of
their own: `_compile` gives each a part of the buckets (`compile_buckets`). `engine_check.py` checks the files of vLLM
and SGLang.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from orchestrator.configs.lint import lint
from orchestrator.errors import InputError
from worker.foreign.runner import ForeignCodeError, Limits, call_each
from worker.text import LEVELS, Finding, Level
from worker.triton_configs.config_file import Bucket, ConfigFileError
from worker.triton_configs.engine_package import INSTALL
from worker.triton_configs.kinds import KINDS, ConfigKind, kinds_of
from worker.triton_configs.resolve import CONFIGS, ResolveError, Resolver, bucket_ranges
from worker.triton_configs.tree_files import TreeFile, list_files
from worker.tuners.aiter_triton.spec import NotImportableError, tuned_kinds

T = TypeVar("T")
COMPILE_LIMITS = Limits(seconds=3600, memory=16 << 30, output=1 << 30)
"""For COMPILED_AT_ONCE buckets or files. Eight of gfx950's 1,320 buckets take six minutes of a core."""
COMPILED_AT_ONCE = 8
"""Buckets or files that one process compiles: importing what they need takes it seconds."""
ANY_SHAPE = (16, 8192, 8192)
"""B, N and K that a default file's buckets are compiled for where no shape is given: multiples of every tile."""
LDS_BYTES = {"gfx942": 65536, "gfx950": 163840, "gfx1250": 327680}
"""LDS of a compute unit; source: `_LDS_CAP_BYTES` in aiter/ops/triton/utils/_triton/arch_info.py at e4048607a5."""
WAY_OUT = f"{INSTALL}, or leave out --compile"


def kinds_named(family: str | None) -> Sequence[ConfigKind]:
    """The kinds of a family, or the kind of that name; without a name all kinds. Raises InputError if nothing fits."""
    kinds = kinds_of(family) if family else KINDS
    if not kinds:
        families_and_kinds = itertools.chain.from_iterable((kind.family, kind.name) for kind in KINDS)
        known = ", ".join(dict.fromkeys(filter(None, families_and_kinds)))
        raise InputError(f"--family {family}: has no Triton configs; choose one of {known}")
    return kinds


@dataclass(frozen=True, slots=True)
class CompiledBucket:
    """A bucket to be compiled, and afterwards the outcome."""

    kind: str
    path: str
    line: int
    bucket: str
    """Its name, `M_LEQ_16`."""
    shape: tuple[int, int, int, int | None]
    """(M, N, K, B) that it is compiled for; M is the last that it serves, or twice the last bound if there is no
    last."""
    values: Bucket
    lds: int = 0
    """Bytes of LDS that it needs."""
    vgprs: int | None = None
    """Registers used."""
    spills: int = 0
    """Registers spilled."""
    hash: str = ""
    """Triton's hash of the compiled kernel."""
    error: str = ""
    """The reason why it does not compile, "" if it does."""
    skipped: bool = False
    """A kind that cannot be compiled here."""

    def finding(self, level: Level, rule: str, text: str) -> Finding:
        """A finding on this bucket."""
        return Finding(level, rule, self.path, self.line, text, self.bucket)


@dataclass(slots=True)
class CheckedChip:
    """The check of one chip's files. The document of `--json` holds these fields."""

    gfx: str
    files: int
    findings: list[Finding] = field(default_factory=list)
    buckets: list[CompiledBucket] = field(default_factory=list)


def chips_of(root: Path) -> list[str]:
    """Chips that a tree has GEMM configs for."""
    configs = root / CONFIGS
    flat = {p.name.partition("-")[0] for p in (configs / "gemm").rglob("gfx*-*.json")}
    return sorted(flat | {p.name for p in configs.glob("gfx*") if any(p.glob("*/gemm/**/*.json"))})


def check(
    root: Path,
    gfx: str,
    kinds: Sequence[ConfigKind] = KINDS,
    sizes: Mapping[str, int] = {},
    *,
    compiling: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> CheckedChip:
    """Lint a chip's files, and compile their buckets if asked. With `sizes` (N, K), only files for these and default
    files.

    Raises InputError where the tree has no known loader, or there is no compiler here.
    """
    try:
        resolver = Resolver(root, gfx)
    except ResolveError as e:
        raise InputError(str(e)) from e
    n = sizes.get("N")
    k = sizes.get("K")
    files = [file for file in list_files(resolver)[0] if file.kind in kinds and file.matches(n, k)]
    checked = CheckedChip(gfx, len(files), lint(resolver, files))
    if compiling:
        checked.buckets = _compile(root, gfx, list(_buckets_to_compile(resolver, files, sizes)), progress)
        checked.findings += _compile_faults(checked.buckets, LDS_BYTES.get(gfx))
        checked.findings.sort(key=lambda finding: LEVELS.index(finding.level))
    return checked


def sizes_of(text: str | None, *forms: str) -> dict[str, int]:
    """The sizes in `N=1280,K=8192`. `forms`: the names that may stand together, such as "NK". Raises InputError."""
    sizes: dict[str, str] = {}
    for part in text.split(",") if text else []:
        name, _, size = part.strip().partition("=")
        sizes[name] = size
    are_names_legal = any(sizes.keys() <= set(form) for form in forms)
    are_numbers = all(size.isascii() and size.isdigit() and int(size) for size in sizes.values())
    if not are_names_legal or not are_numbers:
        shapes = " or ".join(f"{form[0]}=1280,{form[1]}=8192" for form in forms)
        raise InputError(f"--shape {text}: give {shapes} (K the logical one), or one of the two")
    return {name: int(size) for name, size in sizes.items()}


def _buckets_to_compile(
    resolver: Resolver, files: Sequence[TreeFile], sizes: Mapping[str, int]
) -> Iterator[CompiledBucket]:
    """The buckets of files, each with the shape that it is compiled for."""
    for tree_file in files:
        kind = tree_file.kind
        if tree_file.is_gluon or kind.custom_suffix:
            continue
        try:
            file = resolver.read(tree_file.path)
        except (ConfigFileError, OSError):
            continue  # a finding already
        any_b, any_n, any_k = ANY_SHAPE
        b, n, k = tree_file.sizes or (None, sizes.get("N", any_n), sizes.get("K", any_k))
        if not b and kind.batched:
            b = any_b
        bounds = resolver.bounds(kind)
        for bucket, ranges in bucket_ranges(file.buckets, bounds).items():
            if bucket:
                _, last = ranges[-1]
                shape = (last or 2 * bounds[-1], n, k, b)
                line = file.line_of(bucket)
                values = file.buckets[bucket]
                yield CompiledBucket(kind.name, tree_file.path_in_tree, line, bucket, shape, values)


def _compile(
    root: Path, gfx: str, buckets: Sequence[CompiledBucket], progress: Callable[[str], None]
) -> list[CompiledBucket]:
    """Return the buckets in their order, compiled. Raises InputError."""
    if not (find_spec("triton") and find_spec("torch")):
        raise InputError(f"no bucket can be compiled here: {WAY_OUT}")
    calls = [(root, gfx, part) for part in parts_of(buckets, COMPILED_AT_ONCE)]
    try:
        parts = call_each(
            compile_buckets,
            calls,
            limits=COMPILE_LIMITS,
            packages=True,
            env=cache_of_triton(),
            raises=(InputError,),
            finished=lambda count: progress(f"{count} of {len(calls)} parts compiled"),
        )
    except (OSError, ForeignCodeError) as e:
        raise InputError(f"{root}: compiling its configs {e}") from e
    compiled = list(itertools.chain.from_iterable(parts))
    results = [(bucket.kind, bucket.path, bucket.bucket) for bucket in compiled]
    if results != [(bucket.kind, bucket.path, bucket.bucket) for bucket in buckets]:
        raise InputError(f"{root}: compiling its configs gave other buckets than were asked for")
    return compiled


def cache_of_triton() -> dict[str, str]:
    """The variable that keeps compiled code for the next check, although the home of the process is empty."""
    return {"TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR") or str(Path.home() / ".triton" / "cache")}


def parts_of(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """The items in parts of this size, the last one smaller."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def compile_buckets(root: Path, gfx: str, buckets: list[CompiledBucket]) -> list[CompiledBucket]:
    """Compile buckets. It runs code of the tree: call it in a process of its own.

    Raises InputError, once for all buckets, if this Python cannot import AITER's wrappers.
    """
    try:
        return [compile_bucket(root, gfx, bucket) for bucket in buckets]
    except NotImportableError as e:
        way_out = WAY_OUT if str(e).startswith("no module") else "run this in AITER's image, or leave out --compile"
        raise InputError(f"AITER's Triton modules cannot be imported on this machine: {e}: {way_out}") from e


def compile_bucket(root: Path, gfx: str, bucket: CompiledBucket) -> CompiledBucket:
    """Compile one bucket in this process; a failure of the compiler is the answer.

    Raises NotImportableError if this Python cannot import the kind's wrapper: no other bucket would do better.
    """
    from worker.tuners.aiter_triton.source import compile_config

    if bucket.kind not in tuned_kinds():
        return replace(bucket, skipped=True)
    m, n, k, b = bucket.shape
    try:
        facts = compile_config(bucket.kind, gfx, bucket.values, (b, m, n, k), root=root)
    except NotImportableError:
        raise
    except Exception as e:  # noqa: BLE001 - the compiler's and the kernel's own errors are of any type
        return replace(bucket, error=re.sub(r"\s+", " ", f"{type(e).__name__}: {e}")[:300])
    return replace(bucket, lds=facts.shared_bytes, vgprs=facts.vgprs, spills=facts.spills, hash=facts.hash)


def _compile_faults(buckets: Sequence[CompiledBucket], lds: int | None) -> Iterator[Finding]:
    """Findings on compiled buckets. `lds`: bytes that the chip has, None if unknown."""
    for bucket in buckets:
        if bucket.error:
            yield bucket.finding("error", "compile", f"does not compile: {bucket.error}")
        elif lds and bucket.lds > lds:
            text = f"needs {bucket.lds:,} B of LDS, the chip has {lds:,}: it cannot be launched"
            yield bucket.finding("error", "lds", text)
        elif bucket.spills:
            yield bucket.finding("warning", "spills", f"spills {bucket.spills} registers")
