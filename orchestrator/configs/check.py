"""Config files of a tree checked without a GPU: linted, and every bucket compiled for its chip on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

from orchestrator.configs.aiter import AiterTree
from orchestrator.errors import InputError
from worker.text import LEVELS, Finding
from worker.triton_configs.kinds import KINDS, ConfigKind
from worker.triton_configs.lint import Shipped, lint, shipped
from worker.triton_configs.resolve import CONFIGS, LDS_BYTES, Bucket, ConfigFileError, Resolver, ranges

ANY_SHAPE = (16, 8192, 8192)
"""B, N and K that a default file's buckets are compiled for where no shape is given: multiples of every tile."""
WAY_OUT = "install gemmfleet[triton,torch] into this Python, or give --lint-only"
Size = tuple[int | None, int | None]
"""N and K that are asked for, None for any."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A bucket compiled for the last M that it serves (twice the last bound, where there is no end): bytes of LDS,
    registers, spilled registers. `error`: why it does not compile; `skipped`: this kind cannot be compiled here."""

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
    compiling: bool = True,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Checked:
    """Lint a chip's files and compile their buckets; with a size those of its files and of the default.

    Raises InputError where the tree has no known loader, or there is no compiler here.
    """
    resolver = AiterTree(root, gfx).resolver
    every = [f for f in shipped(resolver)[0] if f.kind in kinds]
    files = [f for f in every if f.matches(*size)]
    left_out = {f.at for f in every} - {f.at for f in files}
    out = Checked(gfx, len(files), [f for f in lint(resolver, kinds) if f.path not in left_out])
    if compiling:
        out.buckets = _compile(root, gfx, list(_to_compile(resolver, files, size)), progress)
        out.findings += _faults(out.buckets, LDS_BYTES.get(gfx))
        out.findings.sort(key=lambda f: LEVELS.index(f.level))
    return out


def size_of(text: str | None) -> Size:
    """Return N and K of `N=..,K=..`, None for the one that is not given. Raises InputError."""
    parts = dict(p.strip().partition("=")[::2] for p in text.split(",")) if text else {}
    if not parts.keys() <= {"N", "K"} or not all(v.isascii() and v.isdigit() and int(v) for v in parts.values()):
        raise InputError(f"--shape {text}: give N=1280,K=8192 (K the logical one), or one of the two")
    return tuple(int(parts[name]) if name in parts else None for name in "NK")  # type: ignore[return-value]


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


def _compile(root: Path, gfx: str, buckets: Sequence[Compiled], progress: Callable[[int, int], None]) -> list[Compiled]:
    """Return the buckets in their order, compiled on all cores that this process may use.

    Raises InputError, once for all buckets, if this Python cannot import AITER's wrappers.
    """
    if not (find_spec("triton") and find_spec("torch")):
        raise InputError(f"no bucket can be compiled here: {WAY_OUT}")
    from worker.tuners.aiter_triton.source import NotImportableError

    workers = min(len(os.sched_getaffinity(0)), len(buckets)) or 1
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        results = [pool.submit(compiled, root, gfx, b) for b in buckets]
        try:
            for done, result in enumerate(as_completed(results), 1):
                result.result()
                progress(done, len(buckets))
        except NotImportableError as e:
            pool.shutdown(cancel_futures=True)
            way_out = WAY_OUT if str(e).startswith("no module") else "run this in AITER's image, or give --lint-only"
            raise InputError(f"AITER's Triton modules cannot be imported on this machine: {e}: {way_out}") from e
    return [r.result() for r in results]


def compiled(root: Path, gfx: str, bucket: Compiled) -> Compiled:
    """Compile one bucket in this process; a failure of the compiler is the answer.

    Raises NotImportableError if this Python cannot import the kind's wrapper: no other bucket would do better.
    """
    from worker.tuners.aiter_triton.source import NotImportableError, compile_config
    from worker.tuners.aiter_triton.spec import tuned_kinds

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
