"""Config files of a tree checked without a GPU: linted by AITER's own rules, and if asked each bucket compiled.

Sources of the rules: aiter/ops/triton/configs/CLAUDE.md and .github/instructions/aiter-ops-triton.instructions.md at
e4048607a5, and assertions of the wrappers. An error: AITER never finds it, fails on it, or forbids it. A warning: a
default is taken for what is missing, or it looks misplaced. A note: worth a look.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from math import log2
from pathlib import Path
from typing import NamedTuple, TypeVar

from orchestrator.errors import InputError
from worker.foreign.runner import ForeignCodeError, Limits, call_each
from worker.text import LEVELS, Finding, Level, clean
from worker.triton_configs.config_file import Bucket, ConfigFile, ConfigFileError, is_bucket
from worker.triton_configs.engine_package import INSTALL
from worker.triton_configs.kinds import GLUON_KEYS, KINDS, REQUIRED, ConfigKind, kinds_of
from worker.triton_configs.resolve import CONFIGS, MRange, ResolveError, Resolver, bucket_ranges
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
Size = tuple[int | None, int | None]
"""N and K that are asked for, None for any."""


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
    """A bucket, and what compiling it gave. `shape`: (M, N, K, B); M is the last that it serves, or twice the last
    bound if there is no last. `lds`: bytes of LDS; `vgprs`, `spills`: registers used and spilled. `error`: why it does
    not compile; `skipped`: this kind cannot be compiled here."""

    kind: str
    path: str
    line: int
    bucket: str
    shape: tuple[int, int, int, int | None]
    values: Bucket
    lds: int = 0
    vgprs: int | None = None
    spills: int = 0
    hash: str = ""
    error: str = ""
    skipped: bool = False

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
    size: Size = (None, None),
    *,
    compiling: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> CheckedChip:
    """Lint a chip's files, and compile their buckets if asked. With a size, only files for this size and default files.

    Raises InputError where the tree has no known loader, or there is no compiler here.
    """
    try:
        resolver = Resolver(root, gfx)
    except ResolveError as e:
        raise InputError(str(e)) from e
    files = [file for file in list_files(resolver)[0] if file.kind in kinds and file.matches(*size)]
    checked = CheckedChip(gfx, len(files), lint(resolver, files))
    if compiling:
        checked.buckets = _compile(root, gfx, list(_buckets_to_compile(resolver, files, size)), progress)
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


def _buckets_to_compile(resolver: Resolver, files: Sequence[TreeFile], size: Size) -> Iterator[CompiledBucket]:
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
        b, n, k = tree_file.sizes or (None, size[0] or any_n, size[1] or any_k)
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


KPACK_CHIP = "gfx942"
"""The one chip whose configs may have `kpack`; from gfx950 on Triton warns and takes 1."""
ODD_STEPS = 2
"""See `outliers`."""
WITHOUT_DEFAULT = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
"""Required keys without a default in loader or compiler."""
WRAPPER_RULES = ("required", "refused", "block_k", "block_m")
"""Rules of a kind's Triton wrapper. They do not hold for files of its Gluon kernel."""


class ContentFault(NamedTuple):
    """A fault of a file's content. `key`: the top-level key, "" for the whole file."""

    level: Level
    rule: str
    key: str
    text: str


def lint(resolver: Resolver, wanted: Sequence[TreeFile] | None = None) -> list[Finding]:
    """All findings on the files of the resolver's chip, errors first; `wanted`: only on these of them."""
    files, name_findings = list_files(resolver)
    unwanted: set[str] = set()
    if wanted is not None:
        unwanted = {file.path_in_tree for file in files if file not in wanted}
    findings = [*name_findings, *_misplaced_files(resolver, files), *_packed_names(files)]
    findings = [finding for finding in findings if finding.path not in unwanted]
    for tree_file in files:
        if tree_file.path_in_tree not in unwanted:
            findings += _lint_file(resolver, tree_file)
    return sorted(findings, key=lambda f: (LEVELS.index(f.level), f.rule, f.path, f.line))


def _lint_file(resolver: Resolver, tree_file: TreeFile) -> list[Finding]:
    try:
        file = resolver.read(tree_file.path)
    except (ConfigFileError, OSError) as e:
        return [Finding("error", "unreadable", tree_file.path_in_tree, 0, str(e))]
    bounds = resolver.bounds(tree_file.kind)
    findings = lint_content(file, tree_file.kind, bounds, resolver.arch, tree_file.path_in_tree)
    if tree_file.is_gluon:
        findings = [finding for finding in findings if finding.rule not in WRAPPER_RULES]
    return findings


def lint_content(file: ConfigFile, kind: ConfigKind, bounds: Sequence[int], arch: str, path: str = "") -> list[Finding]:
    """Findings on a file's content. `path`: the one to report."""
    findings: list[Finding] = []
    for level, rule, key, text in _content_faults(file, kind, bounds, arch):
        line = file.line_of(key) if key else 0
        bucket = key if is_bucket(key) else ""
        findings.append(Finding(level, rule, path or str(file.path), line, text, bucket))
    return findings


def outliers(buckets: Mapping[str, Bucket]) -> Iterator[tuple[str, str]]:
    """(bucket, difference) of each bucket that is unlike its two neighbours, while they are alike: from each it is over
    ODD_STEPS steps farther away than they are from each other. 35 of the 1,320 buckets of gfx950 are (e4048607a5)."""
    names = list(buckets)
    for before, name, after in zip(names, names[1:], names[2:], strict=False):
        above = buckets[before]
        odd = buckets[name]
        below = buckets[after]
        between = distance(above, below)
        nearest = min(distance(odd, above), distance(odd, below))
        if nearest > between + ODD_STEPS:
            common = {key: value for key, value in above.items() if below.get(key) == value}
            differences = [
                f"{key} {odd.get(key)} between {value}" for key, value in common.items() if odd.get(key) != value
            ]
            text = f"{nearest:g} steps from its neighbours, which are {between:g} apart: {', '.join(differences)}"
            yield name, text


def distance(a: Bucket, b: Bucket) -> float:
    """Steps between two buckets: for each key the doublings between two numbers, or 1 for any other difference."""
    steps = 0.0
    for key in a.keys() | b.keys():
        x = a.get(key)
        y = b.get(key)
        if isinstance(x, int) and isinstance(y, int) and x > 0 and y > 0:
            steps += abs(log2(x / y))
        elif x != y:
            steps += 1
    return round(steps, 1)


def _content_faults(file: ConfigFile, kind: ConfigKind, bounds: Sequence[int], arch: str) -> Iterator[ContentFault]:
    buckets = file.buckets
    ranges = bucket_ranges(buckets, bounds)
    for key, value in file.document.items():
        if key not in buckets and isinstance(value, dict):
            text = f"{clean(key, 40)} is not a bucket's name, so AITER ignores it"
            yield ContentFault("error", "unreachable", key, text)
    for name in buckets.keys() - ranges.keys() - {"any"}:
        why = "its M is not one of the caller's bounds"
        if name.rpartition("_")[2] in map(str, bounds):
            why = "an earlier bucket covers its M"
        yield ContentFault("error", "unreachable", name, f"never found: {why}")
    if "" in ranges:
        uncovered = _spell_ranges(ranges[""])
        yield ContentFault("error", "any", "", f"no `any`, and nothing covers M = {uncovered}")
    elif "any" not in buckets:
        yield ContentFault("warning", "any", "", "no `any` (every M is covered)")
    for name, bucket in buckets.items():
        for level, rule, text in _bucket_faults(bucket, kind, arch, ranges.get(name, [])):
            yield ContentFault(level, rule, name, text)
    for name, text in outliers(buckets):
        yield ContentFault("note", "outlier", name, text)


def _bucket_faults(
    bucket: Bucket, kind: ConfigKind, arch: str, ranges: Sequence[MRange]
) -> Iterator[tuple[Level, str, str]]:
    """(level, rule, text) of each fault of a bucket. `ranges`: the M that it serves."""
    if "kpack" in bucket and arch.startswith("gfx") and arch != KPACK_CHIP:
        yield "error", "kpack", f"kpack is not allowed on {arch}: Triton takes 1 and warns"
    if GLUON_KEYS & bucket.keys():
        return
    required = kind.required_on(arch)
    missing = [key for key in required if key not in bucket]
    if missing:
        fails = not set(missing).isdisjoint(WITHOUT_DEFAULT)
        yield "error" if fails else "warning", "required", f"lacks {', '.join(missing)}"
    # a wrapper that does not require BLOCK_SIZE_K sets it itself
    refused = [key for key in REQUIRED if key in bucket and key not in required and key != "BLOCK_SIZE_K"]
    if refused:
        yield "error", "refused", f"has {', '.join(refused)}, which {kind.function} or Triton for {arch} refuses"
    block_k = bucket.get("BLOCK_SIZE_K")
    if kind.block_k and block_k not in (None, kind.block_k):
        yield "error", "block_k", f"BLOCK_SIZE_K is {block_k}: the wrapper accepts {kind.block_k} only"
    block_m = bucket.get("BLOCK_SIZE_M")
    if kind.scales_by_32 and isinstance(block_m, int):
        serves_below_32 = any(first < 32 for first, _ in ranges)
        serves_from_32 = any(last is None or last >= 32 for _, last in ranges)
        if (serves_below_32 and block_m > 16) or (serves_from_32 and block_m < 32):
            allowed = "the wrapper accepts at most 16 below M = 32, and at least 32 from there"
            yield "error", "block_m", f"BLOCK_SIZE_M is {block_m} for M = {_spell_ranges(ranges)}: {allowed}"


def _misplaced_files(resolver: Resolver, files: Sequence[TreeFile]) -> Iterator[Finding]:
    """Files in folders where AITER does not look for their config."""
    for file in files:
        name = file.kind.config
        folders_read: set[Path] = set()
        for backend in (file.kind.backend, None, "triton", "gluon"):
            with suppress(ResolveError):
                folders_read.add(resolver.folder(name, backend).folder)
        if not folders_read:
            text = f"nobody reads it: {name} has no default for this chip"
            yield Finding("error", "default", file.path_in_tree, 0, text)
        elif file.path.parent not in folders_read:
            folders = ", ".join(str(folder.relative_to(resolver.root)) for folder in sorted(folders_read))
            text = f"nobody reads it: the files of {name} that count are in {folders}"
            yield Finding("error", "split", file.path_in_tree, 0, text)


def _packed_names(files: Sequence[TreeFile]) -> Iterator[Finding]:
    """FP4 files whose name seems to have the packed K: another file has the same N and content, and twice the K."""
    packed = {(file.path.parent, file.kind.config, file.sizes): file for file in files if file.kind.packed_k}
    for (folder, config, sizes), file in packed.items():
        if sizes is None:
            continue
        b, n, k = sizes
        twin = packed.get((folder, config, (b, n, 2 * k)))
        if twin and file.path.read_bytes() == twin.path.read_bytes():
            text = f"same as {twin.path.name}: K in names is the logical one"
            yield Finding("warning", "packed k", file.path_in_tree, 0, text)


def _spell_ranges(ranges: Sequence[MRange]) -> str:
    """`1..15, 64, 4096..`"""
    words: list[str] = []
    for first, last in ranges:
        if last == first:
            words.append(str(first))
        else:
            words.append(f"{first}..{'' if last is None else last}")
    return ", ".join(words)
