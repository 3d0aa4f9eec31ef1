"""Config files of a tree of AITER: those that it has (`list_files`), and a file with winners (`plan_file`).

A merge writes what `plan_file` gives; a benchmark puts it into a scratch copy of a tree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from worker.text import Finding
from worker.triton_configs.config_file import Bucket, indent_of, text_of_buckets, text_with_buckets
from worker.triton_configs.kinds import FILLED_IN, KINDS, ConfigKind
from worker.triton_configs.resolve import CONFIGS, Resolver, bucket_for, folder_name

_SIZES = re.compile(r"(?:B=(\d+)-)?N=(\d+)-K=(\d+)\Z")


@dataclass(frozen=True, slots=True)
class TreeFile:
    """A config file of a tree."""

    path: Path
    path_in_tree: str
    """Its path below the root."""
    kind: ConfigKind
    suffix: str
    """The end of its name that says for which shapes it is, `N=1280-K=8192`; "" for a default file."""
    sizes: tuple[int | None, int, int] | None
    """(B, N, K) if the suffix spells them; B is None without one."""

    @property
    def is_gluon(self) -> bool:
        """True for a file of a Gluon folder."""
        return "gluon" in Path(self.path_in_tree).parent.parts

    def matches(self, n: int | None, k: int | None) -> bool:
        """True for the default, and for a file of that N and K."""
        return self.sizes is None or (n in (None, self.sizes[1]) and k in (None, self.sizes[2]))

    @property
    def is_never_read(self) -> bool:
        """True for a suffix that the kind's reader never looks for."""
        if not self.suffix or self.kind.custom_suffix:
            return False
        if self.sizes is None:
            return True
        return self.sizes[0] is not None and not self.kind.batch_in_name


def list_files(resolver: Resolver) -> tuple[list[TreeFile], list[Finding]]:
    """The config files of the resolver's chip whose reader is known, and findings on the names of others."""
    configs = resolver.root / CONFIGS
    arch = resolver.arch
    stems = {path: path.stem.removeprefix(f"{arch}-") for path in sorted((configs / "gemm").rglob(f"{arch}-*.json"))}
    stems |= {path: path.stem for path in sorted((configs / arch).glob("*/gemm/**/*.json"))}
    files: list[TreeFile] = []
    findings: list[Finding] = []
    for path, stem in stems.items():
        path_in_tree = str(path.relative_to(resolver.root))
        kind = _kind_of(path, stem)
        if kind is None:
            if _begins(stem, arch):
                findings.append(Finding("error", "name", path_in_tree, 0, "the folder names the chip already"))
            else:
                findings.append(Finding("note", "name", path_in_tree, 0, "no reader of it is known"))
            continue
        suffix = "" if stem == "DEFAULT" else stem[len(kind.config) + 1 :]
        file = TreeFile(path, path_in_tree, kind, suffix, _sizes_in(suffix))
        files.append(file)
        if file.is_never_read:
            text = f"{kind.function} never looks for the suffix {suffix}"
            findings.append(Finding("error", "name", path_in_tree, 0, text))
    return files, findings


def _kind_of(path: Path, stem: str) -> ConfigKind | None:
    """The kind of a file: by its folder if it is a DEFAULT.json, else the longest name that its own begins with."""
    if stem == "DEFAULT":
        kinds = [kind for kind in KINDS if path.parent.name == folder_name(kind.config)]
    else:
        kinds = [kind for kind in KINDS if _begins(stem, kind.config)]
    return max(kinds, key=lambda kind: len(kind.config), default=None)


def _sizes_in(suffix: str) -> tuple[int | None, int, int] | None:
    match = _SIZES.match(suffix)
    if match is None:
        return None
    b, n, k = match.groups()
    return int(b) if b else None, int(n), int(k)


def _begins(stem: str, name: str) -> bool:
    return stem == name or stem.startswith(f"{name}-")


class FileText(NamedTuple):
    """A text to be written."""

    source: Path
    """The file that the shape reads now, of which the text is made."""
    target: Path
    """The file to be written: the shape's own, or the default."""
    text: str


class FilePlan(NamedTuple):
    """A file as a merge is to write it."""

    file: FileText
    old: dict[str, Bucket]
    """The buckets of its source."""
    new: dict[str, Bucket]
    """The buckets of its target."""
    beside: FileText | None = None
    """A second file that must be written with it: that of the second product, in SGLang."""


def plan_file(
    resolver: Resolver, kind: ConfigKind, shape: tuple[int | None, int, int] | None, winners: Mapping[str, Bucket]
) -> FilePlan:
    """Plan the file of a shape (B, N, K), None for the default file, with `winners`, the winners' configs by bucket.

    Raises ResolveError, ConfigFileError, OSError, and ValueError where no bucket can hold what must not move.
    """
    source = target = resolver.folder_of(kind).default
    if shape is not None:
        b, n, k = shape
        source, _ = resolver.file_for(kind, n, k, b)
        target = resolver.own_file(kind, n, k, b)
    source_file = resolver.read(source)
    old = source_file.buckets
    # values that the loader takes for missing keys are written out
    filled_in = {key: value for key, value in FILLED_IN.items() if key in kind.required}
    complete: dict[str, Bucket] = {}
    for name, values in winners.items():
        complete[name] = _in_order_of(old.get(name, {}), values | filled_in | values)
    new = place_winners(old, complete, resolver.bounds(kind))
    if target == source:
        text = text_with_buckets(source_file, new)
    else:
        text = text_of_buckets(new, indent_of(source_file.text))
    return FilePlan(FileText(source, target, text), old, new)


def place_winners(old: Mapping[str, Bucket], winners: Mapping[str, Bucket], bounds: Sequence[int]) -> dict[str, Bucket]:
    """The buckets of a file with winners, where every M that none of them was measured for keeps its config.

    A winner in M_LEQ_x was measured for the M above the bound before x, up to x; a winner in any other bucket for the M
    above the last bound. All other M must keep the config that they have, so where a winner would serve them as well,
    their old config gets a bucket of its own. Raises ValueError if an M without a winner would get another config all
    the same: an old M_GEQ_x begins within what one M_LEQ_y covers.
    """
    new = {**old, **winners}

    def wanted_at(m: int) -> Bucket:
        measured_bucket = next((f"M_LEQ_{x}" for x in bounds if m <= x), "") or bucket_for(new, m, bounds)
        return winners[measured_bucket] if measured_bucket in winners else old[bucket_for(old, m, bounds)]

    for x in reversed(bounds):
        if new[bucket_for(new, x, bounds)] != wanted_at(x):
            new[f"M_LEQ_{x}"] = wanted_at(x)
    for x in bounds:
        for m in (x - 1, x, x + 1):
            if m and new[bucket_for(new, m, bounds)] != wanted_at(m):
                raise ValueError(f"M={m} would get another config, unmeasured: tune the buckets around it as well")
    return new


def _in_order_of(old: Bucket, values: Bucket) -> Bucket:
    """The winner's values in the order of the old bucket's keys."""
    return {key: values[key] for key in old if key in values} | values
