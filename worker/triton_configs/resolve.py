"""The config that a shape gets: `get_gemm_config` of a tree, without running it; and winners laid into its file.

The layout is a predicate on the tree's files. Where it looks was read from `utils/gemm_config_utils.py` (below
aiter/ops/triton) of 2025-12-20 (e6f3ee8511, when all GEMMs got one loader) to 2026-08-22 (e4048607a5), and `Loader`
tells these by the tree's own copy of that file:

- `flat` (2025-12-20): `configs/gemm/<arch>-NAME.json`; since 2026-07-06 `configs/gemm/<backend>/` before it
- `nested` (9312ef7c01, 2026-07-27): `configs/<arch>/<backend>/gemm/NAME.json` first, flat behind it
- `folders` (c4851f9c3b, 2026-08-10): `configs/<arch>/<backend>/gemm/<name>/DEFAULT.json` first, flat behind it

The fallback to flat files counts only while the loader names it. A trial with AITER's own function in a process of
its own (`orchestrator/configs/aiter.py`) covers what no such reading can.

AITER's 342 files of e4048607a5 are `json.dumps` with an indent of their own, with or without a newline at the end, but
for three that were laid out by hand; a changed file is written in the same form, and faults are told by their place.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from worker.text import Finding, clean
from worker.triton_configs.kinds import (
    BY_NAME,
    FILLED_IN,
    KINDS,
    STANDARD_BOUNDS,
    ConfigKind,
    loader_calls,
    numbers,
    parsed,
)

Bucket = dict[str, Any]
MAX_BYTES = 1 << 20  # the largest shipped file has 6 KB
_SHORT = {
    "GROUP_SIZE_M": "g", "NUM_KSPLIT": "k", "num_warps": "w", "num_stages": "s", "waves_per_eu": "eu",
    "matrix_instr_nonkdim": "mfma",
}  # fmt: skip
_NAMED = re.compile(r"(?:B=(\d+)-)?N=(\d+)-K=(\d+)\Z")
_BUCKET = re.compile(r"M_(LEQ|GEQ)_([1-9]\d{0,9})\Z")


class ConfigFileError(ValueError):
    """A config file that cannot be used; the message begins with `file:line:column`."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file as read. `document`: all of it in its order, keys that are no bucket (`_note`) too."""

    path: Path
    text: str
    document: dict[str, Any]

    @property
    def buckets(self) -> dict[str, Bucket]:
        """The buckets by name, in the file's order."""
        return {k: v for k, v in self.document.items() if is_bucket(k)}

    def line(self, key: str) -> int:
        """Line of a top-level key, counted from 1; 0 if the file does not have the key."""
        found = re.search(rf"{re.escape(json.dumps(key))}\s*:", self.text)
        return self.text.count("\n", 0, found.start()) + 1 if found else 0


def is_bucket(key: str) -> bool:
    """True for `any`, `M_LEQ_x` and `M_GEQ_x`."""
    return key == "any" or _BUCKET.match(key) is not None


def bound_of(bucket: str) -> tuple[str, int]:
    """(`LEQ` or `GEQ`, x) of a bucket's name, (`any`, 0) for `any`. Raises ValueError for other keys."""
    found = _BUCKET.match(bucket)
    if not found and bucket != "any":
        raise ValueError(f"{clean(bucket, 40)!r} is not the name of a bucket: write M_LEQ_x, M_GEQ_x or any")
    return (found[1], int(found[2])) if found else ("any", 0)


def read(path: Path) -> ConfigFile:
    """A config file. Raises ConfigFileError for its content, OSError where it cannot be read."""
    raw = path.read_bytes()
    if len(raw) > MAX_BYTES:
        raise ConfigFileError(f"{path}:1:1: has {len(raw)} bytes, more than a config can have")
    return parse(raw.decode(errors="replace"), path)


def parse(text: str, path: Path = Path("config")) -> ConfigFile:
    """A config file of its text. Raises ConfigFileError if the text or a bucket is not a JSON object, or a key is there
    twice."""
    try:
        document = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as e:
        raise ConfigFileError(f"{path}:{e.lineno}:{e.colno}: no JSON: {e.msg}") from e
    except _Twice as e:
        last = [m.start() for m in re.finditer(re.escape(json.dumps(str(e))), text)][-1:] or [0]
        line, column = text.count("\n", 0, last[0]) + 1, last[0] - text.rfind("\n", 0, last[0])
        raise ConfigFileError(
            f"{path}:{line}:{column}: {clean(str(e), 40)!r} is there twice: the last one counts"
        ) from e
    except (ValueError, RecursionError) as e:  # a number of more digits than Python reads
        raise ConfigFileError(f"{path}:1:1: no JSON: {e}") from e
    if not isinstance(document, dict):
        raise ConfigFileError(f"{path}:1:1: is no JSON object")
    file = ConfigFile(path, text, document)
    for key, value in file.buckets.items():
        if not isinstance(value, dict):
            raise ConfigFileError(f"{path}:{file.line(key)}:1: {key} is not a JSON object")
    return file


def changed(source: ConfigFile, buckets: Mapping[str, Bucket]) -> str:
    """The file's text with those buckets in place of its own, new ones at their place in the order; all other keys,
    their order and the text's form stay. A bucket's keys keep the order that they are given in."""
    document = {k: buckets.get(k, v) for k, v in source.document.items()}
    for name in sorted(buckets.keys() - document.keys(), key=_order):
        behind = [k for k in document if is_bucket(k) and _order(k) > _order(name)]
        document = {**{k: v for k, v in document.items() if k not in behind}, name: buckets[name]} | {
            k: document[k] for k in behind
        }
    return json.dumps(document, indent=indent_of(source.text)) + "\n" * source.text.endswith("\n")


def written(buckets: Mapping[str, Bucket], indent: str = " " * 4) -> str:
    """Text of a new file in the form of most of AITER's: M_LEQ_x ascending, M_GEQ_x, any; a newline at the end."""
    return json.dumps({name: buckets[name] for name in sorted(buckets, key=_order)}, indent=indent) + "\n"


def spelled(values: Mapping[str, Any]) -> str:
    """A bucket's values in a word: `16x64x256_g1_k4_w4_s2_eu2_mfma16_cg`, further keys behind it. ASCII, no commas."""
    values = dict(values)
    sizes = [str(values.pop(f"BLOCK_SIZE_{x}", "-")) for x in "MNK"]
    parts = [f"{short}{values.pop(key)}" for key, short in _SHORT.items() if key in values]
    if modifier := values.pop("cache_modifier", None):
        parts.append(str(modifier).strip("."))
    parts += [f"{key}={value}" for key, value in values.items()]
    return "_".join(["x".join(sizes), *parts]).replace(",", ";").replace(" ", "")


def indent_of(text: str) -> str:
    """One level's indent in a text; four spaces where it has none."""
    found = re.search(r'\n([ \t]+)"', text)
    return found[1] if found else " " * 4


def _order(bucket: str) -> tuple[int, int]:
    side, bound = bound_of(bucket)
    return ("LEQ", "GEQ", "any").index(side), bound


class _Twice(ValueError):
    """A key that an object has twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise _Twice(next(k for i, (k, _) in enumerate(pairs) if any(k == p[0] for p in pairs[:i])))
    return out


FACTOR = 1.005
SLACK_US = 0.5
IGNORED_US = 4.0
# LDS of a compute unit; source: `_LDS_CAP_BYTES` in aiter/ops/triton/utils/_triton/arch_info.py at e4048607a5.
LDS_BYTES = {"gfx942": 65536, "gfx950": 163840, "gfx1250": 327680}


def slower(old_us: float, new_us: float) -> bool:
    """True where an M counts as made slower: above 1.005 x old + 0.5 us. Below 4 us, timer noise decides, so nothing
    counts."""
    return max(old_us, new_us) >= IGNORED_US and new_us > FACTOR * old_us + SLACK_US


TRITON = Path("aiter", "ops", "triton")
LOADER = TRITON / "utils" / "gemm_config_utils.py"
CONFIGS = TRITON / "configs"
GEMMS = ("gemm", "*/*/gemm")  # folders below CONFIGS in which configs of GEMMs lie, in any layout


class ResolveError(ValueError):
    """No config can be told: the tree has no such loader, no default file, or no bucket for an M."""


@dataclass(frozen=True, slots=True)
class Loader:
    """Properties of a tree's `get_gemm_config`. `flat_left`: flat files count where no nested default is there;
    `batch`: it looks for files with B first; `backend`: it knows folders of a backend; `bounds`: its standard ones."""

    layout: Literal["flat", "nested", "folders"]
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
    """Properties of a tree's loader. Raises ResolveError if the tree has no loader that we know."""
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
    folders = "_dtype_dir" in text and "DEFAULT" in text
    layout: Literal["flat", "nested", "folders"] = (
        "folders" if folders else "nested" if "/triton/gemm" in text else "flat"
    )
    flat = layout == "flat" or "{AITER_TRITON_CONFIGS_PATH}/gemm" in text
    return Loader(layout, flat, "B" in names, "backend" in names, _bounds(module) or STANDARD_BOUNDS)


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
        self.read = cache(read)  # a config file, read once; raises ConfigFileError and OSError
        # the M bounds that a kind's caller searches: of the call in the tree's own module, else as at e4048607a5
        self.bounds = cache(partial(_called_with, root, self.loader.bounds))

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

    def config_for(self, kind: ConfigKind | str, m: int, n: int, k: int, b: int | None = None) -> Resolved:
        """The bucket of a shape, K the logical one. Raises ResolveError, ConfigFileError and OSError."""
        kind = BY_NAME[kind] if isinstance(kind, str) else kind
        path, own = self.file_for(kind.config, n, k, b if kind.batch_in_name else None, kind.backend)
        buckets = self.read(path).buckets
        bucket = bucket_for(buckets, m, self.bounds(kind))
        return Resolved(path, bucket, dict(buckets[bucket]), own)


def _bounds(module: ast.Module) -> tuple[int, ...]:
    for node in module.body:
        if isinstance(node, ast.Assign) and any(getattr(to, "id", "") == "STANDARD_M_BOUNDS" for to in node.targets):
            return numbers(node.value)
    return ()


def _called_with(root: Path, standard: tuple[int, ...], kind: ConfigKind) -> tuple[int, ...]:
    """Bounds of the call `get_gemm_config(NAME, ..., bounds=...)` in the module that mirrors the wrapper's."""
    parts = kind.module.split(".")
    path = root.joinpath(*parts[:3], "_triton_kernels", *parts[3:]).with_suffix(".py")
    for call in loader_calls(parsed(path)):
        if re.fullmatch(call.config, kind.config):
            return standard if call.bounds is None else call.bounds or kind.bounds or standard
    return kind.bounds or standard


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
    """The config files of the resolver's chip whose reader is known, and findings on the names of others."""
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
    return files, found


def _begins(stem: str, name: str) -> bool:
    return stem == name or stem.startswith(f"{name}-")


class Layout(NamedTuple):
    """Buckets of `source`, the file that the shape reads now, and those that `target` is to hold, with its text."""

    source: Path
    target: Path
    old: dict[str, Bucket]
    new: dict[str, Bucket]
    text: str


def lay_out(
    resolver: Resolver, kind: ConfigKind, shape: tuple[int | None, int, int] | None, won: Mapping[str, Bucket]
) -> Layout:
    """The file of a shape (B, N, K), None for the default file, with the winners by bucket.

    Raises ResolveError, ConfigFileError, OSError, and ValueError where no bucket can hold what must not move.
    """
    source = target = resolver.place(kind.config, kind.backend).default
    if shape is not None:
        b, n, k = shape
        b = b if kind.batch_in_name else None
        source, _ = resolver.file_for(kind.config, n, k, b, kind.backend)
        target = resolver.target(kind.config, n, k, b, kind.backend)
    base = resolver.read(source)
    old = base.buckets
    filled = {key: v for key, v in FILLED_IN.items() if key in kind.required}
    whole = {name: _ordered(old.get(name, {}), values | filled | values) for name, values in won.items()}
    new = laid_out(old, whole, resolver.bounds(kind))
    text = changed(base, new) if target == source else written(new, indent_of(base.text))
    return Layout(source, target, old, new, text)


def laid_out(old: Mapping[str, Bucket], won: Mapping[str, Bucket], bounds: Sequence[int]) -> dict[str, Bucket]:
    """The buckets of a file with winners, where every M that none of them proves keeps its config.

    M_LEQ_x proves the M above the bound before x, any other bucket those above the last bound. Where a winner would
    move further M, their old config gets a bucket of its own. Raises ValueError where no bucket can hold them: an old
    M_GEQ_x begins within what one M_LEQ_y covers.
    """
    new = {**old, **won}

    def wanted(m: int) -> Bucket:
        mine = next((f"M_LEQ_{x}" for x in bounds if m <= x), "") or bucket_for(new, m, bounds)
        return won[mine] if mine in won else old[bucket_for(old, m, bounds)]

    for x in reversed(bounds):
        if new[bucket_for(new, x, bounds)] != wanted(x):
            new[f"M_LEQ_{x}"] = wanted(x)
    moved = [m for x in bounds for m in (x - 1, x, x + 1) if m and new[bucket_for(new, m, bounds)] != wanted(m)]
    if moved:
        raise ValueError(f"M={moved[0]} would get another config, unmeasured: tune the buckets around it as well")
    return new


def _ordered(old: Bucket, values: Bucket) -> Bucket:
    """The winner's values in the order of the old bucket's keys."""
    return {k: values[k] for k in old if k in values} | values
