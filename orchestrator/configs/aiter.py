"""AITER as a project of config files: where its tree has them, what it reads of them, and what it must answer.

`AiterTree` is all that a merge has to know of the project: it lays winners out, checks a file, names the readers of a
bucket, and looks configs up as AITER does. AITER's own `get_gemm_config` runs in a process of its own. It imports
`aiter` as it is with AITER_TRITON_ONLY=1, on a Triton without a GPU that is made to name the chip. If this import
fails (no torch, an older AITER), the packages above the loader stay empty and its own three files run. Without Triton
there is no trial, and gemmfleet's own reading counts.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from orchestrator.configs.check import lint_content
from orchestrator.configs.journal import Journal
from orchestrator.configs.winners import WonFile
from orchestrator.errors import InputError
from orchestrator.files.read import csv_records
from orchestrator.files.write import write_csv
from orchestrator.tables.table_family import shipped_tables
from worker.families import FAMILIES
from worker.foreign.runner import ForeignCodeError, Limits
from worker.foreign.runner import call as run_alone
from worker.text import Finding, and_more, plural
from worker.triton_configs.kinds import BY_CONFIG, Caller, ConfigKind, readers
from worker.triton_configs.resolve import (
    CONFIGS,
    TRITON,
    Bucket,
    Layout,
    ResolveError,
    Resolver,
    bound_of,
    bucket_for,
    lay_out,
    parse,
    shipped,
)

LIST = "recheck.csv"
Shape = tuple[int | None, int, int, int]
"""(B, N, K, M), B None where the kind has none."""
LIMITS = Limits(seconds=300, memory=16 << 30)
Call = dict[str, Any]
"""Arguments of one call of `get_gemm_config`, None for those not given; K is the logical one."""


class Trial(NamedTuple):
    """The answers, one a call: the values, None where the call failed. `how`: the way of the import and Triton's
    version; `why_not`: why there are no answers; `notes`: for the user."""

    answers: tuple[Bucket | None, ...] = ()
    how: str = ""
    why_not: str = ""
    notes: tuple[str, ...] = ()


# a question to a project, and its answers before and after a merge
Lookup = tuple[Any, Bucket, Bucket]


def journal_of(root: Path) -> Journal:
    """The journal of a tree's merges. Raises InputError where the tree has no configs."""
    folder = root / CONFIGS
    if not folder.is_dir():
        raise InputError(f"{root}: has no Triton configs of AITER ({CONFIGS}); name the folder that holds `aiter/`")
    return Journal(folder / "gemmfleet-merges.jsonl", root)


class AiterTree:
    """The config files of a tree of AITER for a chip."""

    def __init__(self, root: Path, gfx: str) -> None:
        """Raises InputError where the tree has no loader that is known."""
        self.root, self.gfx = root, gfx
        try:
            self.resolver = Resolver(root, gfx)
        except ResolveError as e:
            raise InputError(str(e)) from e

    def lay_out(self, won: WonFile) -> Layout:
        """The file that holds winners, with its text. Raises ValueError and OSError."""
        return lay_out(self.resolver, won.place.kind, None if won.place.default else won.shape, won.values)

    def check(self, won: WonFile, layout: Layout) -> Iterator[Finding]:
        """Findings that forbid a merge: on the winners' buckets, and on the file as a whole."""
        for name, winner in won.winners.items():
            side, bound = bound_of(name)
            if side != "any" and not any(r.m == bound for r in winner.measured):
                text = f"was not measured at M={bound}, its bound"
                yield Finding("error", "bound", str(layout.target), 0, text, name)
        bounds = self.resolver.bounds(won.place.kind)
        for finding in lint_content(parse(layout.text, layout.target), won.place.kind, bounds, won.place.device.name):
            must = finding.level == "error" or finding.rule == "required"
            if must and (finding.bucket in won.winners or not finding.bucket):
                yield finding

    def bucket_for(self, won: WonFile, buckets: Mapping[str, Bucket], m: int) -> str:
        """The bucket that AITER takes for an M."""
        return bucket_for(buckets, m, self.resolver.bounds(won.place.kind))

    def readers(self, won: WonFile) -> tuple[str, ...]:
        """Other operators that read its files."""
        return tuple(self.operators(won.place.kind))

    def lookups(self, changes: Sequence[tuple[WonFile, Path, str]]) -> list[Lookup]:
        """Answers that AITER must give, at every bound and just above: the changed files (path and text after) as
        planned, and the shapes of their neighbours, and one without a file, as now."""
        resolver, out = self.resolver, list[Lookup]()
        texts = {path: parse(after).buckets for _, path, after in changes}
        files = shipped(resolver)[0]
        for kind in {won.place.kind for won, _, _ in changes}:
            shapes = {f.named for f in files if f.kind is kind and f.named}
            shapes |= {won.shape for won, _, _ in changes if won.place.kind is kind}
            bounds, backend = resolver.bounds(kind), {"backend": kind.backend if resolver.loader.backend else None}
            for b, n, k in sorted({*shapes, (None, max(n for _, n, _ in shapes) + 1, 64)}, key=str):
                b = b if kind.batch_in_name and resolver.loader.batch else None
                path, _ = resolver.file_for(kind.config, n, k, b, kind.backend)
                now = resolver.read(path).buckets
                then = texts.get(resolver.target(kind.config, n, k, b, kind.backend)) or texts.get(path) or now
                for m in sorted({m for x in bounds for m in (x, x + 1)}):
                    call = {"config_name": kind.config, "M": m, "N": n, "K": k, "bounds": bounds, "B": b, **backend}
                    out.append((call, now[bucket_for(now, m, bounds)], then[bucket_for(then, m, bounds)]))
        self.prove(out, after=False)
        return out

    def prove(self, some: Sequence[Lookup], *, after: bool = True) -> Trial:
        """AITER's function, else a fresh resolver, gives what it must. Raises InputError where it does not."""
        trial = run_trial(self.root, self.gfx, [call for call, _, _ in some], alone=not after)
        given: Iterable[Bucket | None] = trial.answers
        if trial.why_not:
            fresh = Resolver(self.root, self.gfx)
            calls = [[call[name] for name in ("config_name", "M", "N", "K", "B")] for call, _, _ in some]
            given = (fresh.config_for(BY_CONFIG[config], *sizes).values for config, *sizes in calls)
        for (call, now, then), values in zip(some, given, strict=True):
            if values != (then if after else now):
                shape = "{config_name} M={M} N={N} K={K}".format(**call)
                raise otherwise(self.root, "AITER's get_gemm_config", after, shape, values)
        return trial

    def readers_of(self, kind: ConfigKind, buckets: Sequence[str], lists: Sequence[Path]) -> list[Shape]:
        """The shapes of AITER's lists of the family and of the user's lists that read these buckets of the default.

        Raises InputError for a list without columns M, N and K (and B for a batched kind).
        """
        resolver = self.resolver
        default = resolver.place(kind.config, kind.backend).default
        there = resolver.read(default).buckets
        would = there | {b: {} for b in buckets}
        shapes = {s for path in (*_of_aiter(self.root, kind), *lists) for s in _shapes(path, kind)}
        return sorted(
            (b, n, k, m)
            for b, n, k, m in shapes
            if not resolver.file_for(kind.config, n, k, b if kind.batch_in_name else None, kind.backend)[1]
            and bucket_for(would, m, resolver.bounds(kind)) in buckets
        )

    def operators(self, kind: ConfigKind) -> dict[str, bool]:
        """Other operators of the tree that read the kind's files on its chip, found by their calls of the
        loader; True for one that the tuner can call."""
        resolver = self.resolver
        place = resolver.place(kind.config, kind.backend)
        known: dict[str, list[Caller]] = {_below_gemm(kind.module): []}
        for c in kind.callers:
            known.setdefault(_below_gemm(c.module), []).append(c)
        out: dict[str, bool] = {}
        for module, backends in readers(self.root / TRITON, kind.config).items():
            name = _below_gemm(f"aiter.ops.triton.{module}")
            with suppress(ResolveError):  # the tree has no file for it
                if any(resolver.place(kind.config, backend) == place for backend in backends):
                    here = [c for c in known.get(name, ()) if c.reads_on(resolver.arch)]
                    out |= {c.function: c.given is not None for c in here} if name in known else {name: False}
        return out

    def unmeasured(self, won: WonFile, lists: Sequence[Path], folder: Path, checked: Sequence[str] = ()) -> list[str]:
        """Measurements that are missing before the default may change: a sentence an operator.

        `checked`: operators that the user vouches for. The shapes to measure are written into `recheck.csv` of
        `folder`, which `tune` reads.
        """
        needed = self.readers_of(won.place.kind, list(won.winners), lists)
        done = {(r.caller, (r.b if won.place.kind.batched else None, r.n, r.k, r.m)) for r in won.rows}
        through = {"": True} | {
            name: can for name, can in self.operators(won.place.kind).items() if name not in checked
        }
        missing = {name: some for name in through if (some := [s for s in needed if (name, s) not in done])}
        if not missing:
            return []
        columns = ("B", "M", "N", "K") if won.place.kind.batched else ("M", "N", "K")
        every = sorted({s for name, some in missing.items() if through[name] for s in some})
        rows = ([*([b] if won.place.kind.batched else []), m, n, k] for b, n, k, m in every)
        write_csv(folder / LIST, columns, rows)
        out = []
        for name, some in missing.items():
            cost = plural(2 * len(some), "measurement")
            todo = f"tune {folder / LIST} with the same -O default ({cost}, old and new), then merge that run"
            todo += f" (where it cannot run, a slot's log says why; --checked {name} vouches for it)" if name else ""
            by_hand = f"the tuner cannot call it: compare its {cost} yourself, then give --checked {name}"
            out.append(
                f"{won.path.name}: {plural(len(some), 'shape')} of {len(needed)} that read"
                f" {and_more(list(won.winners), 3)} through {name or won.place.kind.function} not measured again:"
                f" {and_more([f'{m}x{n}x{k}' for _, n, k, m in some], 4)}; {todo if through[name] else by_hand}"
            )
        return out


def otherwise(root: Path, function: str, after: bool, shape: str, values: Bucket | None) -> InputError:
    """The error of a lookup that gives other values than a merge planned."""
    what = "gives other values than planned, so the files were put back as they were" if after else (
        "reads this tree in another way than gemmfleet, and nothing was written"
    )  # fmt: skip
    return InputError(f"{root}: {function} {what}: {shape} gives {json.dumps(values)}")


class Answers(NamedTuple):
    """Answers of `look_up`: values, None where a call failed; how the loader was imported; Triton's version."""

    values: list[Bucket | None]
    how: str
    triton: str


def run_trial(root: Path, arch: str, calls: Sequence[Call], *, alone: bool = False) -> Trial:
    """Ask the real function; `alone` its three files without the rest of `aiter`, which takes seconds to import.

    No exception: what stands in the way is in `why_not`.
    """
    arguments = [{k: v for k, v in call.items() if v is not None} for call in calls]
    env = {"AITER_TRITON_ONLY": "1"}
    try:
        answers = run_alone(look_up, root, arch, alone, arguments, limits=LIMITS, env=env, packages=True)
    except (OSError, ForeignCodeError) as e:
        extra = ""
        if re.search("No module named '(?!aiter)", str(e)):
            extra = "; pip install '.[triton]' in a checkout of gemmfleet"
        return Trial(why_not=f"AITER's function cannot run here: it {e}{extra}")
    if len(answers.values) != len(calls):
        return Trial(why_not=f"AITER's function gave {len(answers.values)} answers to {len(calls)} calls")
    return Trial(tuple(answers.values), f"get_gemm_config with Triton {answers.triton}, {answers.how}")


def look_up(root: Path, arch: str, alone: bool, calls: list[Call]) -> Answers:
    """Call the `get_gemm_config` of a tree. It runs code of the tree: call it in a process of its own."""
    import triton

    _name_chip(triton, int(arch) if arch.isdigit() else arch)
    sys.path.insert(0, str(root))
    how = "imported as it is"
    try:
        if alone:
            raise InterruptedError
        importlib.import_module("aiter.ops.triton.utils.gemm_config_utils")
    except Exception as e:  # noqa: BLE001 - whatever the tree raises
        how = f"the loader alone ({type(e).__name__} in `import aiter`)"
        _leave_packages_empty(root)
    loader = importlib.import_module("aiter.ops.triton.utils.gemm_config_utils")
    values: list[Bucket | None] = []
    for call in calls:
        if "bounds" in call:
            call["bounds"] = tuple(call["bounds"])
        try:
            found = loader.get_gemm_config(**call)
            values.append(found[0] if isinstance(found, tuple) else found)
        except Exception:  # noqa: BLE001 - whatever the tree raises
            values.append(None)
    return Answers(values, how, triton.__version__)


def _name_chip(triton: Any, arch: int | str) -> None:
    """Make a Triton without a GPU name the chip."""
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda" if isinstance(arch, int) else "hip", arch, 64)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))


def _leave_packages_empty(root: Path) -> None:
    """Let the loader's packages be folders whose `__init__` does not run."""
    for name in [n for n in sys.modules if n.split(".")[0] == "aiter"]:
        del sys.modules[name]
    for name in ("aiter", "aiter.ops", "aiter.ops.triton", "aiter.ops.triton.utils", "aiter.ops.triton.utils._triton"):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]


def _below_gemm(module: str) -> str:
    """A module's name whether or not its tree has the folders of `gemm` (since 2026-01-07)."""
    return re.sub(r"^aiter\.ops\.triton\.(?:gemm\.\w+\.)?", "", module)


def _of_aiter(root: Path, kind: ConfigKind) -> Iterator[Path]:
    """AITER's shipped lists of the kind's family, tuned and untuned, those of models too."""
    family, configs = FAMILIES.get(kind.family), root / "aiter" / "configs"
    if family is None:
        return
    for folder in (configs, configs / "model_configs"):
        yield from shipped_tables(folder, family)
        yield from sorted(folder.glob(f"*{Path(family.untuned_csv).stem}*.csv"))


def _shapes(path: Path, kind: ConfigKind) -> Iterator[Shape]:
    names = ("B", "N", "K", "M") if kind.batched else ("N", "K", "M")
    at: list[int] = []
    for line, _, cells in csv_records(path):
        if not at:
            if lacking := [c for c in names if c not in cells]:
                raise InputError(f"{path}:{line}: lacks {', '.join(lacking)}: no list of shapes of {kind.name}")
            at = [list(cells).index(c) for c in names]
        elif any(cells):
            try:
                numbers = [int(cells[i]) for i in at]
            except (ValueError, IndexError):
                raise InputError(f"{path}:{line}: {', '.join(names)} are not whole numbers") from None
            yield (numbers[0], *numbers[1:]) if kind.batched else (None, *numbers)  # type: ignore[misc]
