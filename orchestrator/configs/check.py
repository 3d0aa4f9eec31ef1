"""Config files of a tree checked without a GPU: linted by AITER's own rules, and if asked each bucket compiled.

Sources of the rules: aiter/ops/triton/configs/CLAUDE.md and .github/instructions/aiter-ops-triton.instructions.md at
e4048607a5, and assertions of the wrappers. An error: AITER never finds it, fails on it, or forbids it. A warning: a
default is taken for what is missing, or it looks misplaced. A note: worth a look.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from math import log2
from multiprocessing import get_context
from pathlib import Path

from orchestrator.errors import InputError
from worker.foreign.answer import report
from worker.foreign.runner import ForeignCodeError, Limits, call
from worker.text import LEVELS, Finding, Level, clean, plural
from worker.triton_configs.engine import INSTALL
from worker.triton_configs.kinds import GLUON_KEYS, KINDS, REQUIRED, ConfigKind, kinds_of
from worker.triton_configs.resolve import (
    CONFIGS,
    LDS_BYTES,
    Bucket,
    ConfigFile,
    ConfigFileError,
    ResolveError,
    Resolver,
    Shipped,
    is_bucket,
    ranges,
    shipped,
)
from worker.tuners.aiter_triton.spec import NotImportableError, tuned_kinds

COMPILE_LIMITS = Limits(seconds=4 * 3600, memory=16 << 30, output=1 << 30, processes=1024)
"""All buckets of a chip take an hour on 16 cores. A process a core compiles, and starts compilers of its own."""
ANY_SHAPE = (16, 8192, 8192)
"""B, N and K that a default file's buckets are compiled for where no shape is given: multiples of every tile."""
WAY_OUT = f"{INSTALL}, or leave out --compile"
Size = tuple[int | None, int | None]
"""N and K that are asked for, None for any."""


def kinds_named(family: str | None) -> Sequence[ConfigKind]:
    """The kinds of a family, or the kind of that name; without a name all kinds. Raises InputError if nothing fits."""
    kinds = kinds_of(family) if family else KINDS
    if not kinds:
        known = ", ".join(dict.fromkeys(name for k in KINDS for name in (k.family, k.name) if name))
        raise InputError(f"--family {family}: has no Triton configs; choose one of {known}")
    return kinds


@dataclass(frozen=True, slots=True)
class Compiled:
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


@dataclass(slots=True)
class Checked:
    """The check of one chip's files. The document of `--json` holds these fields."""

    gfx: str
    files: int
    findings: list[Finding] = field(default_factory=list)
    buckets: list[Compiled] = field(default_factory=list)


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
) -> Checked:
    """Lint a chip's files, and compile their buckets if asked. With a size, only files for this size and default files.

    Raises InputError where the tree has no known loader, or there is no compiler here.
    """
    try:
        resolver = Resolver(root, gfx)
    except ResolveError as e:
        raise InputError(str(e)) from e
    files = [f for f in shipped(resolver)[0] if f.kind in kinds and f.matches(*size)]
    out = Checked(gfx, len(files), lint(resolver, files))
    if compiling:
        out.buckets = _compile(root, gfx, list(_to_compile(resolver, files, size)), progress)
        out.findings += _faults(out.buckets, LDS_BYTES.get(gfx))
        out.findings.sort(key=lambda f: LEVELS.index(f.level))
    return out


def sizes_of(text: str | None, *forms: str) -> dict[str, int]:
    """The sizes in `N=1280,K=8192`. `forms`: the names that may stand together, such as "NK". Raises InputError."""
    parts = dict(p.strip().partition("=")[::2] for p in text.split(",")) if text else {}
    known = any(parts.keys() <= set(form) for form in forms)
    if not known or not all(v.isascii() and v.isdigit() and int(v) for v in parts.values()):
        shapes = " or ".join(f"{form[0]}=1280,{form[1]}=8192" for form in forms)
        raise InputError(f"--shape {text}: give {shapes} (K the logical one), or one of the two")
    return {name: int(value) for name, value in parts.items()}


def _to_compile(resolver: Resolver, files: Sequence[Shipped], size: Size) -> Iterator[Compiled]:
    for file in files:
        if file.gluon or file.kind.custom_suffix:
            continue
        try:
            read = resolver.read(file.path)
        except (ConfigFileError, OSError):
            continue  # a finding already
        b, n, k = file.named or (None, size[0] or ANY_SHAPE[1], size[1] or ANY_SHAPE[2])
        b = b or (ANY_SHAPE[0] if file.kind.batched else None)
        bounds = resolver.bounds(file.kind)
        for bucket, served in ranges(read.buckets, bounds).items():
            if bucket:
                m = served[-1][1] or 2 * bounds[-1]
                yield Compiled(file.kind.name, file.at, read.line(bucket), bucket, (m, n, k, b), read.buckets[bucket])


def _compile(root: Path, gfx: str, buckets: Sequence[Compiled], progress: Callable[[str], None]) -> list[Compiled]:
    """Return the buckets in their order, compiled. Raises InputError."""
    if not (find_spec("triton") and find_spec("torch")):
        raise InputError(f"no bucket can be compiled here: {WAY_OUT}")
    try:
        compiled = call(
            compile_buckets, root, gfx, buckets,
            limits=COMPILE_LIMITS, packages=True, env=cache_of_triton(), raises=(InputError,), progress=progress,
        )  # fmt: skip
    except (OSError, ForeignCodeError) as e:
        raise InputError(f"{root}: compiling its configs {e}") from e
    results = [(c.kind, c.path, c.bucket) for c in compiled]
    if results != [(b.kind, b.path, b.bucket) for b in buckets]:
        raise InputError(f"{root}: compiling its configs gave other buckets than were asked for")
    return compiled


def cache_of_triton() -> dict[str, str]:
    """The variable that keeps compiled code for the next check, although the home of the process is empty."""
    return {"TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR") or str(Path.home() / ".triton" / "cache")}


def compile_buckets(root: Path, gfx: str, buckets: list[Compiled]) -> list[Compiled]:
    """Compile buckets on all cores that this process may use. It runs code of the tree: call it on its own.

    Raises InputError, once for all buckets, if this Python cannot import AITER's wrappers.
    """
    workers = min(len(os.sched_getaffinity(0)), len(buckets)) or 1
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        results = [pool.submit(compile_bucket, root, gfx, b) for b in buckets]
        try:
            for done, result in enumerate(as_completed(results), 1):
                result.result()
                report(f"{done} of {plural(len(buckets), 'bucket')} compiled")
        except NotImportableError as e:
            pool.shutdown(cancel_futures=True)
            way_out = WAY_OUT if str(e).startswith("no module") else "run this in AITER's image, or leave out --compile"
            raise InputError(f"AITER's Triton modules cannot be imported on this machine: {e}: {way_out}") from e
    return [r.result() for r in results]


def compile_bucket(root: Path, gfx: str, bucket: Compiled) -> Compiled:
    """Compile one bucket in this process; a failure of the compiler is the answer.

    Raises NotImportableError if this Python cannot import the kind's wrapper: no other bucket would do better.
    """
    from worker.tuners.aiter_triton.source import compile_config

    if bucket.kind not in tuned_kinds():
        return replace(bucket, skipped=True)
    m, n, k, b = bucket.shape
    try:
        facts = compile_config(bucket.kind, gfx, bucket.values, m, n, k, b, root=root)
    except NotImportableError:
        raise
    except Exception as e:  # noqa: BLE001 - the compiler's and the kernel's own errors are of any type
        return replace(bucket, error=re.sub(r"\s+", " ", f"{type(e).__name__}: {e}")[:300])
    return replace(bucket, lds=facts.shared_bytes, vgprs=facts.vgprs, spills=facts.spills, hash=facts.hash)


def _faults(buckets: Sequence[Compiled], lds: int | None) -> Iterator[Finding]:
    for c in buckets:
        if c.error:
            yield Finding("error", "compile", c.path, c.line, f"does not compile: {c.error}", c.bucket)
        elif lds and c.lds > lds:
            text = f"needs {c.lds:,} B of LDS, the chip has {lds:,}: it cannot be launched"
            yield Finding("error", "lds", c.path, c.line, text, c.bucket)
        elif c.spills:
            yield Finding("warning", "spills", c.path, c.line, f"spills {c.spills} registers", c.bucket)


KPACK_CHIP = "gfx942"  # the one chip whose configs may have `kpack`; from gfx950 on Triton warns and takes 1
ODD_STEPS = 2  # see `outliers`
# Required keys without a default in loader or compiler.
_HARD = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
# Rules of a kind's Triton wrapper. They do not hold for files of its Gluon kernel.
_OF_WRAPPER = ("required", "refused", "block_k", "block_m")
Served = Sequence[tuple[int, int | None]]


def lint(resolver: Resolver, some: Sequence[Shipped] | None = None) -> list[Finding]:
    """All findings on the files of the resolver's chip, errors first; `some`: only on these of them."""
    files, found = shipped(resolver)
    found += [*_places(resolver, files), *_packed_names(files)]
    left_out = {f.at for f in files if some is not None and f not in some}
    found = [f for f in found if f.path not in left_out]
    for file in (f for f in files if f.at not in left_out):
        try:
            read = resolver.read(file.path)
        except (ConfigFileError, OSError) as e:
            found.append(Finding("error", "unreadable", file.at, 0, str(e)))
        else:
            content = lint_content(read, file.kind, resolver.bounds(file.kind), resolver.arch, file.at)
            found += [f for f in content if not (file.gluon and f.rule in _OF_WRAPPER)]
    return sorted(found, key=lambda f: (LEVELS.index(f.level), f.rule, f.path, f.line))


def lint_content(file: ConfigFile, kind: ConfigKind, bounds: Sequence[int], arch: str, at: str = "") -> list[Finding]:
    """Findings on a file's content. `at`: the path to report."""
    return [
        Finding(level, rule, at or str(file.path), file.line(key) if key else 0, text, key if is_bucket(key) else "")
        for level, rule, key, text in _content_faults(file, kind, bounds, arch)
    ]


def outliers(buckets: Mapping[str, Bucket]) -> Iterator[tuple[str, str]]:
    """(bucket, difference) of each bucket that is unlike its two neighbours, while they are alike: from each it is over
    ODD_STEPS steps farther away than they are from each other. 35 of the 1,320 buckets of gfx950 are (e4048607a5)."""
    names = list(buckets)
    for before, name, after in zip(names, names[1:], names[2:], strict=False):
        a, b, c = buckets[before], buckets[name], buckets[after]
        between, least = distance(a, c), min(distance(b, a), distance(b, c))
        if least > between + ODD_STEPS:
            values = ", ".join(f"{k} {b.get(k)} between {v}" for k, v in a.items() if c.get(k) == v != b.get(k))
            yield name, f"{least:g} steps from its neighbours, which are {between:g} apart: {values}"


def distance(a: Bucket, b: Bucket) -> float:
    """Steps between two buckets: for each key the doublings between two numbers, or 1 for any other difference."""
    steps = 0.0
    for key in a.keys() | b.keys():
        x, y = a.get(key), b.get(key)
        numbers = isinstance(x, int) and isinstance(y, int) and x > 0 and y > 0
        steps += abs(log2(x / y)) if numbers else x != y  # type: ignore[operator]
    return round(steps, 1)


def _content_faults(
    file: ConfigFile, kind: ConfigKind, bounds: Sequence[int], arch: str
) -> Iterator[tuple[Level, str, str, str]]:
    """(level, rule, top-level key or "", text) of each fault of a content."""
    buckets = file.buckets
    served = ranges(buckets, bounds)
    for key, value in file.document.items():
        if key not in buckets and isinstance(value, dict):
            yield "error", "unreachable", key, f"{clean(key, 40)} is not a bucket's name, so AITER ignores it"
    for name in buckets.keys() - served.keys() - {"any"}:
        known = name.rpartition("_")[2] in map(str, bounds)
        why = "an earlier bucket covers its M" if known else "its M is not one of the caller's bounds"
        yield "error", "unreachable", name, f"never found: {why}"
    if "" in served:
        yield "error", "any", "", f"no `any`, and nothing covers M = {_spell(served[''])}"
    elif "any" not in buckets:
        yield "warning", "any", "", "no `any` (every M is covered)"
    for name, bucket in buckets.items():
        for level, rule, text in _bucket_faults(bucket, kind, arch, served.get(name, [])):
            yield level, rule, name, text
    for name, text in outliers(buckets):
        yield "note", "outlier", name, text


def _bucket_faults(bucket: Bucket, kind: ConfigKind, arch: str, served: Served) -> Iterator[tuple[Level, str, str]]:
    if "kpack" in bucket and arch.startswith("gfx") and arch != KPACK_CHIP:
        yield "error", "kpack", f"kpack is not allowed on {arch}: Triton takes 1 and warns"
    if GLUON_KEYS & bucket.keys():
        return
    required = kind.required_on(arch)
    if missing := [k for k in required if k not in bucket]:
        yield "error" if set(missing) & set(_HARD) else "warning", "required", f"lacks {', '.join(missing)}"
    # a wrapper that does not require BLOCK_SIZE_K sets it itself
    if refused := [k for k in REQUIRED if k in bucket and k not in required and k != "BLOCK_SIZE_K"]:
        yield "error", "refused", f"has {', '.join(refused)}, which {kind.function} or Triton for {arch} refuses"
    block_k, block_m = bucket.get("BLOCK_SIZE_K"), bucket.get("BLOCK_SIZE_M")
    if kind.block_k and block_k not in (None, kind.block_k):
        yield "error", "block_k", f"BLOCK_SIZE_K is {block_k}: the wrapper accepts {kind.block_k} only"
    if kind.scales_by_32 and isinstance(block_m, int):
        low, high = any(a < 32 for a, _ in served), any(z is None or z >= 32 for _, z in served)
        if (low and block_m > 16) or (high and block_m < 32):
            allowed = "the wrapper accepts at most 16 below M = 32, and at least 32 from there"
            yield "error", "block_m", f"BLOCK_SIZE_M is {block_m} for M = {_spell(served)}: {allowed}"


def _places(resolver: Resolver, files: Sequence[Shipped]) -> Iterator[Finding]:
    """Files in folders where AITER does not look for their config."""
    for file in files:
        name = file.kind.config
        counts = set()
        for backend in (file.kind.backend, None, "triton", "gluon"):
            try:
                counts.add(resolver.place(name, backend).folder)
            except ResolveError:
                continue
        if not counts:
            yield Finding("error", "default", file.at, 0, f"nobody reads it: {name} has no default for this chip")
        elif file.path.parent not in counts:
            there = ", ".join(str(p.relative_to(resolver.root)) for p in sorted(counts))
            yield Finding(
                "error", "split", file.at, 0, f"nobody reads it: the files of {name} that count are in {there}"
            )


def _packed_names(files: Sequence[Shipped]) -> Iterator[Finding]:
    """FP4 files whose name seems to have the packed K: another file has the same N and content, and twice the K."""
    packed = {(f.path.parent, f.kind.config, f.named): f for f in files if f.named and f.kind.packed_k}
    for (folder, config, (b, n, k)), file in packed.items():
        twin = packed.get((folder, config, (b, n, 2 * k)))
        if twin and file.path.read_bytes() == twin.path.read_bytes():
            yield Finding("warning", "packed k", file.at, 0, f"same as {twin.path.name}: K in names is the logical one")


def _spell(served: Served) -> str:
    return ", ".join(str(a) if a == z else f"{a}.." if z is None else f"{a}..{z}" for a, z in served)
