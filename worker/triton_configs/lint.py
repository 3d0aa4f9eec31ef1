"""Faults of a tree's config files, by AITER's own rules.

Sources: aiter/ops/triton/configs/CLAUDE.md and .github/instructions/aiter-ops-triton.instructions.md at e4048607a5,
and assertions of the wrappers. An error: AITER never finds it, fails on it, or forbids it. A warning: the loader or
the compiler fills in what is missing. A note: worth a look.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Literal

from worker.text import clean
from worker.triton_configs.files import Bucket, ConfigFile, ConfigFileError, is_bucket
from worker.triton_configs.kinds import BY_CONFIG, GLUON_KEYS, KINDS, ConfigKind
from worker.triton_configs.resolve import CONFIGS, ResolveError, Resolver, folder_name, ranges

Level = Literal["error", "warning", "note"]
NO_KPACK = "gfx942"
"""The last chip whose configs may have `kpack`; from gfx950 on Triton warns and takes 1."""
ODD_STEPS = 2
_FILLED_IN = frozenset(
    {"NUM_KSPLIT", "cache_modifier", "num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim"}
)
_DERIVED = ("SPLITK_BLOCK_SIZE", "GROUP_K", "GROUP_N")
_NAMED = re.compile(r"(?:B=(\d+)-)?N=(\d+)-K=(\d+)\Z")
_PREFIX = re.compile(r"(gfx\w+?)-")


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault. `path` is below the tree's root; `line` 0 for the file itself; `bucket` "" for none in particular."""

    level: Level
    rule: str
    path: str
    line: int
    text: str
    bucket: str = ""


@dataclass(frozen=True, slots=True)
class Shipped:
    """A config file of a tree. `suffix`: "" for the default; `named`: (B, N, K) where the suffix spells them."""

    path: Path
    kind: ConfigKind
    suffix: str
    named: tuple[int | None, int, int] | None
    gluon: bool

    def matches(self, n: int | None, k: int | None) -> bool:
        """True for the default, and for a file of that N and K."""
        return self.named is None or (n in (None, self.named[1]) and k in (None, self.named[2]))


def shipped(resolver: Resolver) -> tuple[list[Shipped], list[Finding]]:
    """The config files of the resolver's chip whose reader is known, and findings on those that nobody reads."""
    files: list[Shipped] = []
    found: list[Finding] = []
    for path, stem, folder in _paths(resolver):
        at = str(path.relative_to(resolver.root))
        if folder and (prefixed := _PREFIX.match(stem)):
            found.append(
                Finding(
                    "error", "prefix", at, 0, f"the folder names the chip, so {prefixed[1]}- is looked for by nobody"
                )
            )
            continue
        kind = _kind_of_folder(folder) if stem == "DEFAULT" else _kind_of(stem)
        if kind is None:
            found.append(Finding("note", "unknown", at, 0, "no reader of this config is known (as of e4048607a5)"))
            continue
        suffix = "" if stem == "DEFAULT" else stem[len(kind.config) + 1 :]
        spelled = _NAMED.match(suffix)
        named = (int(spelled[1]) if spelled[1] else None, int(spelled[2]), int(spelled[3])) if spelled else None
        files.append(Shipped(path, kind, suffix, named, "gluon" in path.relative_to(resolver.root / CONFIGS).parts))
        if suffix and not kind.custom_suffix and (named is None or (named[0] is not None and not kind.batch_in_name)):
            found.append(Finding("error", "name", at, 0, f"{kind.function} never looks for the suffix {suffix}"))
    found += _places(resolver, files)
    found += _packed_names(resolver, files)
    return files, found


def lint_content(file: ConfigFile, kind: ConfigKind, bounds: Sequence[int], arch: str, at: str = "") -> list[Finding]:
    """Findings on a file's content. `at`: the path to report."""
    at = at or str(file.path)

    def finding(level: Level, rule: str, key: str, text: str) -> Finding:
        return Finding(level, rule, at, file.line(key), text, key if is_bucket(key) else "")

    found: list[Finding] = []
    buckets = file.buckets
    served = ranges(buckets, bounds)
    for key, value in file.others.items():
        if isinstance(value, dict):
            found.append(finding("error", "unreachable", key, f"{clean(key, 40)} is no bucket: nobody looks for it"))
    for name in buckets:
        if name not in served and name != "any":
            why = (
                "an earlier bucket covers its M"
                if _bound_known(name, bounds)
                else "its M is none of the caller's bounds"
            )
            found.append(finding("error", "unreachable", name, f"{name} is never found: {why}"))
    if "" in served:
        found.append(Finding("error", "any", at, 0, f"no `any`, and nothing covers M = {_spell(served[''])}"))
    elif "any" not in buckets:
        found.append(Finding("warning", "any", at, 0, "no `any` (every M is covered)"))
    for name, bucket in buckets.items():
        for level, rule, text in _bucket_faults(bucket, kind, arch, served.get(name, [])):
            found.append(finding(level, rule, name, text))
    found += [finding("note", "outlier", name, text) for name, text in outliers(buckets)]
    return found


def lint(resolver: Resolver, kinds: Sequence[ConfigKind] = KINDS) -> list[Finding]:
    """All findings on the files of the resolver's chip."""
    files, found = shipped(resolver)
    wanted = {k.config for k in kinds}
    mine = {str(f.path.relative_to(resolver.root)) for f in files if f.kind.config in wanted}
    others = {str(f.path.relative_to(resolver.root)) for f in files} - mine
    found = [f for f in found if f.path not in others]
    for file in files:
        at = str(file.path.relative_to(resolver.root))
        if at not in mine:
            continue
        try:
            read = resolver.read(file.path)
        except (ConfigFileError, OSError) as e:
            found.append(Finding("error", "unreadable", at, 0, str(e)))
            continue
        found += lint_content(read, file.kind, resolver.bounds(file.kind), resolver.arch, at)
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda f: (order[f.level], f.rule, f.path, f.line))


def outliers(buckets: Mapping[str, Bucket]) -> Iterator[tuple[str, str]]:
    """Buckets that differ from both neighbours by over two steps (`distance`) more than these from each other, and in
    what. Of the 1,320 buckets of gfx950 these are 35 (e4048607a5)."""
    names = list(buckets)
    for before, name, after in zip(names, names[1:], names[2:], strict=False):
        between = distance(buckets[before], buckets[after])
        least = min(distance(buckets[name], buckets[before]), distance(buckets[name], buckets[after]))
        if least > between + ODD_STEPS:
            alike = [k for k, v in buckets[before].items() if buckets[after].get(k) == v != buckets[name].get(k)]
            values = ", ".join(f"{k} {buckets[name].get(k)} between {buckets[before][k]}" for k in alike[:3])
            yield name, f"{name} is {least:g} steps from its neighbours, which are {between:g} apart: {values}"


def distance(a: Bucket, b: Bucket) -> float:
    """Steps between two buckets: doublings of numbers, one for any other difference."""
    steps = 0.0
    for key in a.keys() | b.keys():
        x, y = a.get(key), b.get(key)
        if isinstance(x, int) and isinstance(y, int) and x > 0 and y > 0:
            steps += abs(log2(x / y))
        elif x != y:
            steps += 1
    return round(steps, 1)


def _bucket_faults(
    bucket: Bucket, kind: ConfigKind, arch: str, served: Sequence[tuple[int, int | None]]
) -> Iterator[tuple[Level, str, str]]:
    if "kpack" in bucket and arch.startswith("gfx") and arch != NO_KPACK:
        yield "error", "kpack", f"kpack is not allowed on {arch}: Triton takes 1 and warns"
    if GLUON_KEYS & bucket.keys():
        return
    missing = [k for k in kind.required if k not in bucket]
    if hard := [k for k in missing if k not in _FILLED_IN]:
        yield "error", "required", f"lacks {', '.join(hard)}"
    if soft := [k for k in missing if k in _FILLED_IN]:
        yield "warning", "required", f"lacks {', '.join(soft)}; a default is filled in"
    if derived := [k for k in _DERIVED if k in bucket]:
        yield (
            "warning",
            "derived",
            f"{', '.join(derived)}: the wrapper computes this, so that the file's value is ignored",
        )
    block_k, block_m = bucket.get("BLOCK_SIZE_K"), bucket.get("BLOCK_SIZE_M")
    if kind.block_k and block_k is not None and block_k != kind.block_k:
        yield "error", "block_k", f"BLOCK_SIZE_K is {block_k}: the wrapper accepts {kind.block_k} only"
    if kind.scales_by_32 and isinstance(block_m, int):
        low, high = any(a < 32 for a, _ in served), any(z is None or z >= 32 for _, z in served)
        if (low and block_m > 16) or (high and block_m < 32):
            yield (
                "error",
                "block_m",
                f"BLOCK_SIZE_M is {block_m} for M = {_spell(served)}: the wrapper accepts at most 16 below M = 32, and"
                " at least 32 from there",
            )


def _paths(resolver: Resolver) -> Iterator[tuple[Path, str, str]]:
    """(path, stem without the chip, name of the nested folder or "" for a flat one) of every file of the chip."""
    configs, arch = resolver.root / CONFIGS, resolver.arch
    for folder in (configs / "gemm", *(p for p in sorted((configs / "gemm").glob("*")) if p.is_dir())):
        for path in sorted(folder.glob(f"{arch}-*.json")):
            yield path, path.stem.removeprefix(f"{arch}-"), ""
    for path in sorted((configs / arch).glob("*/gemm/**/*.json")):
        yield path, path.stem, path.parent.name


def _kind_of(stem: str) -> ConfigKind | None:
    """The kind with the longest name that the stem begins with."""
    fits = [k for k in KINDS if stem == k.config or stem.startswith(f"{k.config}-")]
    return max(fits, key=lambda k: len(k.config), default=None)


def _kind_of_folder(folder: str) -> ConfigKind | None:
    return next((k for name, k in BY_CONFIG.items() if folder_name(name) == folder), None)


def _places(resolver: Resolver, files: Sequence[Shipped]) -> Iterator[Finding]:
    """Files in folders that no lookup of their config ends in."""
    counts: dict[str, set[Path]] = {}
    for file in files:
        name = file.kind.config
        if name not in counts:
            counts[name] = set()
            for backend in (file.kind.backend, None, "triton", "gluon"):
                try:
                    counts[name].add(resolver.place(name, backend).folder)
                except ResolveError:
                    continue
        if file.path.parent in counts[name]:
            continue
        at = str(file.path.relative_to(resolver.root))
        if counts[name]:
            there = ", ".join(str(p.relative_to(resolver.root)) for p in sorted(counts[name]))
            yield Finding("error", "split", at, 0, f"nobody reads it: the files of {name} that count are in {there}")
        else:
            yield Finding("error", "no default", at, 0, f"nobody reads it: {name} has no default file for this chip")


def _packed_names(resolver: Resolver, files: Sequence[Shipped]) -> Iterator[Finding]:
    """FP4 files that look named by the packed width: the same N and content as one of twice the K."""
    by_name = {(f.kind.config, f.path.parent, f.named): f for f in files if f.named and f.kind.packed_k}
    for (config, folder, named), file in by_name.items():
        if named is None:
            continue
        twin = by_name.get((config, folder, (named[0], named[1], 2 * named[2])))
        if twin and file.path.read_bytes() == twin.path.read_bytes():
            at = str(file.path.relative_to(resolver.root))
            yield Finding(
                "warning", "packed k", at, 0, f"is the same as {twin.path.name}: K in names is the logical one"
            )


def _bound_known(name: str, bounds: Sequence[int]) -> bool:
    return name.rpartition("_")[2] in map(str, bounds)


def _spell(served: Sequence[tuple[int, int | None]]) -> str:
    return ", ".join(str(a) if a == z else f"{a}.." if z is None else f"{a}..{z}" for a, z in served)
