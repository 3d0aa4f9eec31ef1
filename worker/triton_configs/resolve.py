"""The config that a shape gets: `get_gemm_config` of a tree, without running it.

The layout is a predicate on the tree's files. Where it looks was read from `utils/gemm_config_utils.py` (below
aiter/ops/triton) of 2025-12-20 (e6f3ee8511, when all GEMMs got one loader) to 2026-08-22 (e4048607a5), and `Loader`
tells these by the tree's own copy of that file:

- `flat` (2025-12-20): `configs/gemm/<arch>-NAME.json`; since 2026-07-06 `configs/gemm/<backend>/` before it
- `nested` (9312ef7c01, 2026-07-27): `configs/<arch>/<backend>/gemm/NAME.json` first, flat behind it
- `folders` (c4851f9c3b, 2026-08-10): `configs/<arch>/<backend>/gemm/<name>/DEFAULT.json` first, flat behind it

The fallback to flat files counts only while the loader names it. A trial with AITER's own function in a process of
its own (`orchestrator/configs/trial.py`) covers what no such reading can.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from worker.triton_configs.calls import loader_calls, numbers, parsed
from worker.triton_configs.files import Bucket, ConfigFile, read
from worker.triton_configs.kinds import BY_NAME, STANDARD_BOUNDS, ConfigKind

TRITON = Path("aiter", "ops", "triton")
LOADER = TRITON / "utils" / "gemm_config_utils.py"
CONFIGS = TRITON / "configs"
GEMMS = ("gemm", "*/*/gemm")
"""Folders below CONFIGS in which configs of GEMMs lie, in any layout."""
Layout = Literal["flat", "nested", "folders"]


class ResolveError(ValueError):
    """No config can be told: the tree has no such loader, no default file, or no bucket for an M."""


@dataclass(frozen=True, slots=True)
class Loader:
    """Properties of a tree's `get_gemm_config`. `flat_left`: flat files count where no nested default is there;
    `batch`: it looks for files with B first; `backend`: it knows folders of a backend; `bounds`: its standard ones."""

    layout: Layout
    flat_left: bool
    batch: bool
    backend: bool
    bounds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A folder of config files and how they are named in it. `default` is the path of the default file."""

    folder: Path
    prefix: str
    default: Path

    def specialised(self, config: str, suffix: str) -> Path:
        """Path of a specialised file, there or not."""
        return self.folder / f"{self.prefix}{config}-{suffix}.json"


@dataclass(frozen=True, slots=True)
class Resolved:
    """The bucket that a shape gets. `path`: the file that it is in; `specialised`: the file is not the default."""

    path: Path
    bucket: str
    values: Bucket
    specialised: bool


def read_loader(root: Path) -> Loader:
    """Properties of a tree's loader. Raises ResolveError where there is none that is known."""
    path = root / LOADER
    try:
        text = path.read_text(errors="replace")
        module = ast.parse(text)
    except (OSError, SyntaxError, ValueError) as e:
        raise ResolveError(f"{path}: cannot be read, so no config of this tree can be told: {e}") from e
    function = next((n for n in module.body if isinstance(n, ast.FunctionDef) and n.name == "get_gemm_config"), None)
    if function is None:
        raise ResolveError(f"{path} has no get_gemm_config; AITER has it since 2025-12-20 (e6f3ee8511)")
    names = {a.arg for a in function.args.args}
    layout: Layout = "flat"
    if "_dtype_dir" in text and "DEFAULT" in text:
        layout = "folders"
    elif "/triton/gemm" in text:
        layout = "nested"
    flat = layout == "flat" or "{AITER_TRITON_CONFIGS_PATH}/gemm" in text
    return Loader(layout, flat, "B" in names, "backend" in names, _bounds(module) or STANDARD_BOUNDS)


def bucket_for(config: Mapping[str, Any], m: int, bounds: Sequence[int]) -> str:
    """The bucket of M: the first M_LEQ_x of the bounds, else the last M_GEQ_x, else any.

    Buckets whose x is no bound are never found. Raises ResolveError where nothing covers M.
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


def ranges(config: Mapping[str, Any], bounds: Sequence[int]) -> dict[str, list[tuple[int, int | None]]]:
    """The M that each bucket gets, as (first, last) with None for no end; "" for those that nothing covers. A bucket
    that no M finds is missing."""
    parts: list[tuple[int, int | None]] = []
    for before, x in zip((0, *bounds), bounds, strict=False):
        parts += [(before + 1, x - 1)] if x - before > 1 else []
        parts.append((x, x))
    out: dict[str, list[tuple[int, int | None]]] = {}
    for first, last in (*parts, (bounds[-1] + 1, None)):
        try:
            bucket = bucket_for(config, first, bounds)
        except ResolveError:
            bucket = ""
        mine = out.setdefault(bucket, [])
        if mine and mine[-1][1] == first - 1:
            first = mine.pop()[0]
        mine.append((first, last))
    return out


def folder_name(config: str) -> str:
    """The folder of a config in the layout `folders`: `GEMM-A16W16` -> `gemm_a16w16`."""
    return config.lower().replace("-", "_")


class Resolver:
    """Configs of one tree for one chip. Files are read once; make a new one after a change.

    `root`: the folder that holds `aiter/`. `arch`: as Triton names it (`gfx950`; `90` on an H200).
    """

    def __init__(self, root: Path, arch: str) -> None:
        """Raises ResolveError where the tree has no loader that is known."""
        self.root, self.arch = root, arch
        self.loader = read_loader(root)
        self._read: dict[Path, ConfigFile] = {}
        self._bounds: dict[ConfigKind, tuple[int, ...]] = {}

    def places(self, config: str, backend: str | None = None) -> tuple[Place, ...]:
        """Places where a config's files may lie, in the order in which its default is looked for."""
        configs, loader = self.root / CONFIGS, self.loader
        backend = backend if loader.backend else None
        flat = [Path("gemm", backend), Path("gemm")] if backend else [Path("gemm")]
        out = []
        for name in (backend,) if backend else ("triton", "gluon"):
            folder = configs / self.arch / name / "gemm"
            if loader.layout == "folders":
                folder /= folder_name(config)
                out.append(Place(folder, "", folder / "DEFAULT.json"))
            elif loader.layout == "nested":
                out.append(Place(folder, "", folder / f"{config}.json"))
        if loader.flat_left:
            prefix = f"{self.arch}-"
            out += [Place(configs / f, prefix, configs / f / f"{prefix}{config}.json") for f in flat]
        return tuple(out)

    def place(self, config: str, backend: str | None = None) -> Place:
        """The one place that counts: the first whose default is there. Raises ResolveError."""
        places = self.places(config, backend)
        for place in places:
            if place.default.exists():
                return place
        raise ResolveError(
            f"{config} has no default file for {self.arch} (last looked for: {places[-1].default}); AITER fails there"
        )

    def suffixes(self, n: int, k: int, b: int | None = None) -> tuple[str, ...]:
        """Endings of a shape's specialised files, in the order in which they are looked for. K is the logical one."""
        plain = f"N={n}-K={k}"
        return (f"B={b}-{plain}", plain) if b is not None and self.loader.batch else (plain,)

    def file_for(
        self, config: str, n: int, k: int, b: int | None = None, backend: str | None = None
    ) -> tuple[Path, bool]:
        """(file of a shape, True where it is a specialised one, which replaces the default wholly). Raises
        ResolveError."""
        place = self.place(config, backend)
        for suffix in self.suffixes(n, k, b):
            path = place.specialised(config, suffix)
            if path.exists():
                return path, True
        return place.default, False

    def target(self, config: str, n: int, k: int, b: int | None = None, backend: str | None = None) -> Path:
        """The path at which a shape's own file would be found, there or not. Raises ResolveError."""
        return self.place(config, backend).specialised(config, self.suffixes(n, k, b)[0])

    def bounds(self, kind: ConfigKind) -> tuple[int, ...]:
        """The M bounds that the kind's caller searches: of the call in the tree's own module, else as at e4048607a5."""
        if kind not in self._bounds:
            self._bounds[kind] = _called_with(self.root, kind, self.loader.bounds)
        return self._bounds[kind]

    def config_for(self, kind: ConfigKind | str, m: int, n: int, k: int, b: int | None = None) -> Resolved:
        """The bucket of a shape, K the logical one. Raises ResolveError, ConfigFileError and OSError."""
        kind = BY_NAME[kind] if isinstance(kind, str) else kind
        path, own = self.file_for(kind.config, n, k, b if kind.batch_in_name else None, kind.backend)
        buckets = self.read(path).buckets
        bucket = bucket_for(buckets, m, self.bounds(kind))
        return Resolved(path, bucket, dict(buckets[bucket]), own)

    def read(self, path: Path) -> ConfigFile:
        """A config file, read once. Raises ConfigFileError and OSError."""
        found = self._read.get(path)
        if found is None:
            found = self._read[path] = read(path)
        return found


def _bounds(module: ast.Module) -> tuple[int, ...]:
    for node in module.body:
        if isinstance(node, ast.Assign) and any(getattr(to, "id", "") == "STANDARD_M_BOUNDS" for to in node.targets):
            return numbers(node.value)
    return ()


def _called_with(root: Path, kind: ConfigKind, standard: tuple[int, ...]) -> tuple[int, ...]:
    """Bounds of the call `get_gemm_config(NAME, ..., bounds=...)` in the module that mirrors the wrapper's."""
    parts = kind.module.split(".")
    path = root.joinpath(*parts[:3], "_triton_kernels", *parts[3:]).with_suffix(".py")
    for call in loader_calls(parsed(path)):
        if re.fullmatch(call.config, kind.config):
            return standard if call.bounds is None else call.bounds or kind.bounds or standard
    return kind.bounds or standard
