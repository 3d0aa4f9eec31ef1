"""Faults of a tree's config files, by AITER's own rules.

Sources: aiter/ops/triton/configs/CLAUDE.md and .github/instructions/aiter-ops-triton.instructions.md at e4048607a5,
and assertions of the wrappers. An error: AITER never finds it, fails on it, or forbids it. A warning: a default is
taken for what is missing, or it looks misplaced. A note: worth a look.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path

from worker.text import LEVELS, Finding, Level, clean
from worker.triton_configs.kinds import GLUON_KEYS, KINDS, REQUIRED, ConfigKind
from worker.triton_configs.resolve import (
    CONFIGS,
    Bucket,
    ConfigFile,
    ConfigFileError,
    ResolveError,
    Resolver,
    folder_name,
    is_bucket,
    ranges,
)

KPACK_CHIP = "gfx942"  # the one chip whose configs may have `kpack`; from gfx950 on Triton warns and takes 1
ODD_STEPS = 2
# Required keys without a default in loader or compiler.
_HARD = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
# Rules of a kind's Triton wrapper, which say nothing of Gluon's.
_OF_WRAPPER = ("required", "refused", "block_k", "block_m")
_NAMED = re.compile(r"(?:B=(\d+)-)?N=(\d+)-K=(\d+)\Z")
Served = Sequence[tuple[int, int | None]]


@dataclass(frozen=True, slots=True)
class Shipped:
    """A config file of a tree, `at` its path below the root. `suffix`: "" for the default; `named`: (B, N, K) where
    the suffix spells them."""

    path: Path
    at: str
    kind: ConfigKind
    suffix: str
    named: tuple[int | None, int, int] | None

    @property
    def gluon(self) -> bool:
        """True for a file of a Gluon folder."""
        return "gluon" in Path(self.at).parent.parts

    def matches(self, n: int | None, k: int | None) -> bool:
        """True for the default, and for a file of that N and K."""
        return self.named is None or (n in (None, self.named[1]) and k in (None, self.named[2]))


def shipped(resolver: Resolver) -> tuple[list[Shipped], list[Finding]]:
    """The config files of the resolver's chip whose reader is known, and findings on files that nobody reads."""
    configs, arch = resolver.root / CONFIGS, resolver.arch
    flat = [(p, p.stem.removeprefix(f"{arch}-")) for p in sorted((configs / "gemm").rglob(f"{arch}-*.json"))]
    nested = [(p, p.stem) for p in sorted((configs / arch).glob("*/gemm/**/*.json"))]
    files: list[Shipped] = []
    found: list[Finding] = []
    for path, stem in (*flat, *nested):
        at = str(path.relative_to(resolver.root))
        default = stem == "DEFAULT"
        fits = [k for k in KINDS if (path.parent.name == folder_name(k.config) if default else _begins(stem, k.config))]
        if not fits:
            what = "the folder names the chip already" if _begins(stem, arch) else "no reader of it is known"
            found.append(Finding("error" if _begins(stem, arch) else "note", "name", at, 0, what))
            continue
        kind = max(fits, key=lambda k: len(k.config))
        suffix = "" if default else stem[len(kind.config) + 1 :]
        spelled = _NAMED.match(suffix)
        named = (int(spelled[1]) if spelled[1] else None, int(spelled[2]), int(spelled[3])) if spelled else None
        files.append(Shipped(path, at, kind, suffix, named))
        if suffix and not kind.custom_suffix and (named is None or (named[0] is not None and not kind.batch_in_name)):
            found.append(Finding("error", "name", at, 0, f"{kind.function} never looks for the suffix {suffix}"))
    return files, [*found, *_places(resolver, files), *_packed_names(files)]


def lint(resolver: Resolver, kinds: Sequence[ConfigKind] = KINDS) -> list[Finding]:
    """All findings on the files of the resolver's chip, errors first."""
    files, found = shipped(resolver)
    others = {f.at for f in files if f.kind not in kinds}
    found = [f for f in found if f.path not in others]
    for file in (f for f in files if f.kind in kinds):
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
        for level, rule, key, text in _faults(file, kind, bounds, arch)
    ]


def outliers(buckets: Mapping[str, Bucket]) -> Iterator[tuple[str, str]]:
    """Buckets that differ from both neighbours by over two steps (`distance`) more than these from each other, and in
    what. Of the 1,320 buckets of gfx950 these are 35 (e4048607a5)."""
    names = list(buckets)
    for before, name, after in zip(names, names[1:], names[2:], strict=False):
        a, b, c = buckets[before], buckets[name], buckets[after]
        between, least = distance(a, c), min(distance(b, a), distance(b, c))
        if least > between + ODD_STEPS:
            values = ", ".join(f"{k} {b.get(k)} between {v}" for k, v in a.items() if c.get(k) == v != b.get(k))
            yield name, f"{least:g} steps from its neighbours, which are {between:g} apart: {values}"


def distance(a: Bucket, b: Bucket) -> float:
    """Steps between two buckets: doublings of numbers, one for any other difference."""
    steps = 0.0
    for key in a.keys() | b.keys():
        x, y = a.get(key), b.get(key)
        numbers = isinstance(x, int) and isinstance(y, int) and x > 0 and y > 0
        steps += abs(log2(x / y)) if numbers else x != y  # type: ignore[operator]
    return round(steps, 1)


def _faults(
    file: ConfigFile, kind: ConfigKind, bounds: Sequence[int], arch: str
) -> Iterator[tuple[Level, str, str, str]]:
    """(level, rule, top-level key or "", text) of each fault of a content."""
    buckets = file.buckets
    served = ranges(buckets, bounds)
    for key, value in file.document.items():
        if key not in buckets and isinstance(value, dict):
            yield "error", "unreachable", key, f"{clean(key, 40)} is no bucket, so nobody looks for it"
    for name in buckets.keys() - served.keys() - {"any"}:
        known = name.rpartition("_")[2] in map(str, bounds)
        why = "an earlier bucket covers its M" if known else "its M is none of the caller's bounds"
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
    """Files in folders that no lookup of their config ends in."""
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
    """FP4 files that look named by the packed width: the same N and content as one of twice the K."""
    packed = {(f.path.parent, f.kind.config, f.named): f for f in files if f.named and f.kind.packed_k}
    for (folder, config, (b, n, k)), file in packed.items():
        twin = packed.get((folder, config, (b, n, 2 * k)))
        if twin and file.path.read_bytes() == twin.path.read_bytes():
            yield Finding("warning", "packed k", file.at, 0, f"same as {twin.path.name}: K in names is the logical one")


def _begins(stem: str, name: str) -> bool:
    return stem == name or stem.startswith(f"{name}-")


def _spell(served: Served) -> str:
    return ", ".join(str(a) if a == z else f"{a}.." if z is None else f"{a}..{z}" for a, z in served)
