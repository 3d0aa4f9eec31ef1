"""The config that a shape gets in a tree of AITER: what `get_gemm_config` of the tree would answer, without running it.

A `Resolver` of a tree and a chip finds the folder of a config, in it the file of a shape (its own, which is called
specialised, or the default), and in that the bucket of M: `config_for` does all of it, `file_for` the first two steps,
`folder` the first. `bucket_for` is AITER's rule for the last step: the first `M_LEQ_x` with M <= x counts. A shape with
M = 12, N = 1280 and K = 8192 on a gfx950 gets:

    configs/gemm/gfx950-GEMM-A16W16-N=1280-K=8192.json, or without that configs/gemm/gfx950-GEMM-A16W16.json
    {"M_LEQ_8": {...}, "M_LEQ_16": {"BLOCK_SIZE_M": 16, ...}, "any": {...}}          of which M_LEQ_16

Where AITER looks was read from `utils/gemm_config_utils.py` (below aiter/ops/triton) of 2025-12-20 (e6f3ee8511, when
all GEMMs got one loader) to 2026-08-22 (e4048607a5), and `ConfigLoader` tells these by the tree's own copy of the file:

- `flat` (2025-12-20): `configs/gemm/<arch>-NAME.json`; since 2026-07-06 `configs/gemm/<backend>/` before it
- `nested` (9312ef7c01, 2026-07-27): `configs/<arch>/<backend>/gemm/NAME.json` first, flat behind it
- `folders` (c4851f9c3b, 2026-08-10): `configs/<arch>/<backend>/gemm/<name>/DEFAULT.json` first, flat behind it

A new layout is one more of these in `read_loader` and `Resolver.folders`.
The fallback to flat files counts only while the loader names it. A trial with AITER's own function in a process of
its own (`orchestrator/configs/aiter_trial.py`) covers what no such reading can.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from worker.triton_configs.config_file import Bucket, read_config_file
from worker.triton_configs.kinds import STANDARD_BOUNDS, ConfigKind
from worker.triton_configs.loader_calls import find_loader_calls, literal_numbers
from worker.triton_configs.m_ranges import MRange

TRITON = Path("aiter", "ops", "triton")
LOADER = TRITON / "utils" / "gemm_config_utils.py"
CONFIGS = TRITON / "configs"
GEMMS = ("gemm", "*/*/gemm")
"""Folders below CONFIGS in which configs of GEMMs lie, in any layout."""


class ResolveError(ValueError):
    """No config can be told: the tree has no such loader, no default file, or no bucket for an M."""


@dataclass(frozen=True, slots=True)
class ConfigLoader:
    """Properties of a tree's `get_gemm_config`, by which its files are looked for."""

    layout: Literal["flat", "nested", "folders"]
    """See the module."""
    reads_flat: bool
    """Flat files count where no nested default exists."""
    knows_batch: bool
    """For a batched GEMM it looks for a file with B in its name first."""
    knows_backend: bool
    """It looks in the folder of the backend that its caller names."""
    bounds: tuple[int, ...]
    """The bounds of M that it searches if its caller names none."""


@dataclass(frozen=True, slots=True)
class ConfigFolder:
    """A folder of config files and how they are named in it."""

    folder: Path
    prefix: str
    """The beginning of the names of specialised files: `gfx950-` in flat folders, else ""."""
    default: Path
    """The path of the default file."""

    def specialised(self, config: str, suffix: str) -> Path:
        """Path of a specialised file, there or not."""
        return self.folder / f"{self.prefix}{config}-{suffix}.json"


@dataclass(frozen=True, slots=True)
class Resolved:
    """The bucket that a shape gets."""

    path: Path
    """The file that it is in."""
    bucket: str
    """Its name, `M_LEQ_16`."""
    values: Bucket
    specialised: bool
    """True if the file is not the default."""


def read_loader(root: Path) -> ConfigLoader:
    """Properties of a tree's loader. Raises ResolveError if the tree has no loader that we know."""
    path = root / LOADER
    try:
        text = path.read_text(errors="replace")
        module = ast.parse(text)
    except (OSError, SyntaxError, ValueError) as e:
        raise ResolveError(f"{path}: cannot be read, so no config of this tree can be told: {e}") from e
    parameters = _loader_parameters(module)
    if parameters is None:
        raise ResolveError(f"{path} has no get_gemm_config; AITER has it since 2025-12-20 (e6f3ee8511)")
    layout: Literal["flat", "nested", "folders"] = "flat"
    if "_dtype_dir" in text and "DEFAULT" in text:
        layout = "folders"
    elif "/triton/gemm" in text:
        layout = "nested"
    return ConfigLoader(
        layout,
        reads_flat=layout == "flat" or "{AITER_TRITON_CONFIGS_PATH}/gemm" in text,
        knows_batch="B" in parameters,
        knows_backend="backend" in parameters,
        bounds=_standard_bounds(module) or STANDARD_BOUNDS,
    )


def _loader_parameters(module: ast.Module) -> set[str] | None:
    """The names of the parameters of `get_gemm_config`, None if the module has no such function."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name == "get_gemm_config":
            return {argument.arg for argument in node.args.args}
    return None


def _standard_bounds(module: ast.Module) -> tuple[int, ...]:
    """STANDARD_M_BOUNDS of a loader, () if it has none."""
    for node in module.body:
        if not isinstance(node, ast.Assign):
            continue
        names = [getattr(target, "id", "") for target in node.targets]
        if "STANDARD_M_BOUNDS" in names:
            return literal_numbers(node.value)
    return ()


def bucket_for(config: Mapping[str, Any], m: int, bounds: Sequence[int]) -> str:
    """The bucket of M: the first M_LEQ_x of the bounds, else the last M_GEQ_x, else any.

    A bucket whose x is not one of the bounds is never found. Raises ResolveError if no bucket covers M.
    """
    for x in bounds:
        if m <= x and f"M_LEQ_{x}" in config:
            return f"M_LEQ_{x}"
    for x in reversed(bounds):
        if m >= x and f"M_GEQ_{x}" in config:
            return f"M_GEQ_{x}"
    if "any" in config:
        return "any"
    raise ResolveError(f"no bucket covers M={m}, and there is no `any`")


def bucket_ranges(config: Mapping[str, Any], bounds: Sequence[int]) -> dict[str, list[MRange]]:
    """The M that each bucket gets; "" for those that nothing covers. A bucket that no M finds is missing.

    With bounds 4, 8, 16 and the buckets M_LEQ_8 and any: `{"M_LEQ_8": [(1, 8)], "any": [(9, None)]}`.
    """
    ranges: dict[str, list[MRange]] = {}
    for part in _parts_between(bounds):
        try:
            bucket = bucket_for(config, part.first, bounds)
        except ResolveError:
            bucket = ""
        bucket_parts = ranges.setdefault(bucket, [])
        if bucket_parts and bucket_parts[-1].last == part.first - 1:  # it goes on
            part = MRange(bucket_parts.pop().first, part.last)
        bucket_parts.append(part)
    return ranges


def _parts_between(bounds: Sequence[int]) -> list[MRange]:
    """Ranges of M all of whose M find the same bucket: each bound, those between two bounds, those above the last."""
    parts: list[MRange] = []
    before = 0
    for x in bounds:
        if x - before > 1:
            parts.append(MRange(before + 1, x - 1))
        parts.append(MRange(x, x))
        before = x
    return [*parts, MRange(before + 1, None)]


def folder_name(config: str) -> str:
    """The folder of a config in the layout `folders`: `GEMM-A16W16` -> `gemm_a16w16`."""
    return config.lower().replace("-", "_")


class Resolver:
    """Configs of one tree for one chip. Files are read once; make a new one after a change.

    `root`: the folder that holds `aiter/`. `arch`: as Triton names it (`gfx950`; `90` on an H200).
    """

    def __init__(self, root: Path, arch: str) -> None:
        """Raises ResolveError where the tree has no loader that is known."""
        self.root = root
        self.arch = arch
        self.loader = read_loader(root)
        self.read = cache(read_config_file)
        """The content of a file. Raises ConfigFileError, OSError."""
        self.bounds = cache(partial(_bounds_of_kind, root, self.loader.bounds))
        """The bounds of M that the caller of a `ConfigKind` searches."""

    def folders(self, config: str, backend: str | None = None) -> tuple[ConfigFolder, ...]:
        """Folders where a config's files may lie, in the order in which its default is looked for. `config`: the
        name as files have it, `GEMM-A16W16`."""
        configs = self.root / CONFIGS
        if not self.loader.knows_backend:
            backend = None
        folders: list[ConfigFolder] = []
        for name in [backend] if backend else ["triton", "gluon"]:
            folder = configs / self.arch / name / "gemm"
            if self.loader.layout == "folders":
                folder /= folder_name(config)
                folders.append(ConfigFolder(folder, "", folder / "DEFAULT.json"))
            elif self.loader.layout == "nested":
                folders.append(ConfigFolder(folder, "", folder / f"{config}.json"))
        if self.loader.reads_flat:
            flat = [configs / "gemm" / backend, configs / "gemm"] if backend else [configs / "gemm"]
            prefix = f"{self.arch}-"
            folders += [ConfigFolder(folder, prefix, folder / f"{prefix}{config}.json") for folder in flat]
        return tuple(folders)

    def folder(self, config: str, backend: str | None = None) -> ConfigFolder:
        """The one folder that counts: the first whose default is there. Raises ResolveError."""
        folders = self.folders(config, backend)
        for folder in folders:
            if folder.default.exists():
                return folder
        last = folders[-1].default
        raise ResolveError(
            f"{config} has no default file for {self.arch} (last looked for: {last}); AITER fails there: name a tree"
            " that has one, or write it first"
        )

    def folder_of(self, kind: ConfigKind) -> ConfigFolder:
        """The folder that counts for a kind. Raises ResolveError."""
        return self.folder(kind.config, kind.backend)

    def suffixes(self, kind: ConfigKind, n: int, k: int, b: int | None = None) -> tuple[str, ...]:
        """Endings of a shape's specialised files, in the order in which they are looked for. K is the logical one."""
        plain = f"N={n}-K={k}"
        if b is not None and kind.batch_in_name and self.loader.knows_batch:
            return f"B={b}-{plain}", plain
        return (plain,)

    def file_for(self, kind: ConfigKind, n: int, k: int, b: int | None = None) -> tuple[Path, bool]:
        """(file of a shape, True where it is a specialised one). The default then counts at no M. Raises
        ResolveError."""
        folder = self.folder_of(kind)
        for suffix in self.suffixes(kind, n, k, b):
            path = folder.specialised(kind.config, suffix)
            if path.exists():
                return path, True
        return folder.default, False

    def own_file(self, kind: ConfigKind, n: int, k: int, b: int | None = None) -> Path:
        """The path at which a shape's specialised file is looked for first, there or not. Raises ResolveError."""
        return self.folder_of(kind).specialised(kind.config, self.suffixes(kind, n, k, b)[0])

    def config_for(self, kind: ConfigKind, m: int, n: int, k: int, b: int | None = None) -> Resolved:
        """The bucket of a shape, K the logical one. Raises ResolveError, ConfigFileError and OSError."""
        path, is_specialised = self.file_for(kind, n, k, b)
        buckets = self.read(path).buckets
        bucket = bucket_for(buckets, m, self.bounds(kind))
        return Resolved(path, bucket, dict(buckets[bucket]), is_specialised)


def _bounds_of_kind(root: Path, standard: tuple[int, ...], kind: ConfigKind) -> tuple[int, ...]:
    """Bounds of the call `get_gemm_config(NAME, ..., bounds=...)` in the module that mirrors the wrapper's; without
    such a call those of e4048607a5, as `kinds.py` has them."""
    parts = kind.module.split(".")
    path = root.joinpath(*parts[:3], "_triton_kernels", *parts[3:]).with_suffix(".py")
    for call in find_loader_calls(path):
        if re.fullmatch(call.config, kind.config):
            return standard if call.bounds is None else call.bounds or kind.bounds or standard
    return kind.bounds or standard
