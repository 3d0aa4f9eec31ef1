"""The rules for AITER's Triton config files, applied to a chip's files without a GPU and without running the tree.

`check.py` lints whole trees (`lint`), a merge the files that it plans (`lint_content`). To add a rule for the values of
a bucket, yield one more `ContentFault` in `_bucket_faults`; for a file's content in `_content_faults`; for the place or
the name of files in `lint`.
Sources of the rules: aiter/ops/triton/configs/CLAUDE.md and .github/instructions/aiter-ops-triton.instructions.md at
e4048607a5, and assertions of the wrappers. An error: AITER never finds it, fails on it, or forbids it. A warning: a
default is taken for what is missing, or it looks misplaced. A note: worth a look.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import log2
from pathlib import Path
from typing import NamedTuple

from worker.text import Finding, Level, clean
from worker.triton_configs.config_file import Bucket, ConfigFile, ConfigFileError, is_bucket
from worker.triton_configs.kinds import GLUON_KEYS, REQUIRED, ConfigKind
from worker.triton_configs.m_ranges import MRange
from worker.triton_configs.resolve import ResolveError, Resolver, bucket_ranges
from worker.triton_configs.tree_files import TreeFile, list_files

KPACK_CHIP = "gfx942"
"""The one chip whose configs may have `kpack`; from gfx950 on Triton warns and takes 1."""
ODD_STEPS = 2
"""A bucket is an outlier if it is this many steps farther from its neighbours than these are from each other."""
WITHOUT_DEFAULT = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
"""Required keys without a default in loader or compiler."""
WRAPPER_RULES = ("required", "refused", "block_k", "block_m")
"""Rules of a kind's Triton wrapper. They do not hold for files of its Gluon kernel."""


class ContentFault(NamedTuple):
    """A fault of a file's content: `("error", "kpack", "M_LEQ_16", "kpack is not allowed on gfx950: ...")`."""

    level: Level
    rule: str
    key: str
    """The top-level key, mostly a bucket; "" for the whole file."""
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
    return sorted(findings, key=lambda finding: finding.order)


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
        yield from _bucket_faults(name, bucket, kind, arch, ranges.get(name, []))
    for name, text in outliers(buckets):
        yield ContentFault("note", "outlier", name, text)


def _bucket_faults(
    name: str, bucket: Bucket, kind: ConfigKind, arch: str, ranges: Sequence[MRange]
) -> Iterator[ContentFault]:
    """The faults of a bucket's values. `ranges`: the M that it serves."""
    if "kpack" in bucket and arch.startswith("gfx") and arch != KPACK_CHIP:
        yield ContentFault("error", "kpack", name, f"kpack is not allowed on {arch}: Triton takes 1 and warns")
    if GLUON_KEYS & bucket.keys():
        return
    required = kind.required_on(arch)
    missing = [key for key in required if key not in bucket]
    if missing:
        fails = not set(missing).isdisjoint(WITHOUT_DEFAULT)
        yield ContentFault("error" if fails else "warning", "required", name, f"lacks {', '.join(missing)}")
    # a wrapper that does not require BLOCK_SIZE_K sets it itself
    refused = [key for key in REQUIRED if key in bucket and key not in required and key != "BLOCK_SIZE_K"]
    if refused:
        text = f"has {', '.join(refused)}, which {kind.function} or Triton for {arch} refuses"
        yield ContentFault("error", "refused", name, text)
    block_k = bucket.get("BLOCK_SIZE_K")
    if kind.block_k and block_k not in (None, kind.block_k):
        text = f"BLOCK_SIZE_K is {block_k}: the wrapper accepts {kind.block_k} only"
        yield ContentFault("error", "block_k", name, text)
    block_m = bucket.get("BLOCK_SIZE_M")
    if kind.scales_by_32 and isinstance(block_m, int):
        serves_below_32 = any(first < 32 for first, _ in ranges)
        serves_from_32 = any(last is None or last >= 32 for _, last in ranges)
        if (serves_below_32 and block_m > 16) or (serves_from_32 and block_m < 32):
            allowed = "the wrapper accepts at most 16 below M = 32, and at least 32 from there"
            text = f"BLOCK_SIZE_M is {block_m} for M = {_spell_ranges(ranges)}: {allowed}"
            yield ContentFault("error", "block_m", name, text)


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
