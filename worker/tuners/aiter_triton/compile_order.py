"""Order of candidates made without a GPU: those of a tuner, compiled for a chip on this machine's cores.

Buckets, candidates and their order are those of a node that has the same tree (tasks.py); the processes that compile
are those of its pool. Imports torch, triton and AITER.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton

from worker.aiter_tree.locate import commit_of, version_of
from worker.protocol import SpecShape
from worker.triton_configs.resolve import TRITON
from worker.tuners.aiter_triton.compile import CompileFacts, CompileJob, compile_job
from worker.tuners.aiter_triton.order import FORMAT, LAST, LEVELS, shape_name
from worker.tuners.aiter_triton.seeds import Seeds
from worker.tuners.aiter_triton.spec import Options, kind_of, source_of
from worker.tuners.aiter_triton.tasks import TaskMaker
from worker.tuners.aiter_triton.wrapper import Wrapper, enter
from worker.tuners.common.problem import UnavailableError
from worker.tuners.search.processes import CompilePool, CompileResult
from worker.tuners.search.search import ShapeTask
from worker.tuners.search.store import KernelStore
from worker.tuners.search.target import copies_async, known

TICK_S = 0.5
PRUNED_EVERY = 1000


WAITING = CompileResult("", "waiting", "", 0.0, 0.0)


@dataclass(slots=True)
class _Point:
    """A shape and M with its candidates, and what is known of each by its name."""

    name: str
    bucket: str
    task: ShapeTask
    outcomes: dict[str, CompileResult]


class OrderMaker:
    """Compiles the candidates of shapes for a chip; `document` is right at any time."""

    def __init__(self, root: Path, gfx: str, options: Options) -> None:
        """A process makes orders for one tree and one chip. Raises ValueError, ResolveError, ConfigFileError,
        OSError."""
        self._root, self._options, self._kind = root, options, kind_of(options)
        try:
            target = known(int(gfx) if gfx.isdigit() else gfx)
        except KeyError:
            raise ValueError(f"no datasheet of {gfx} is known") from None
        self._target = replace(target, async_copy=target.backend == "hip" and copies_async(gfx))
        enter(root, self._target)
        try:
            self._wrapper = Wrapper(self._kind)
        except UnavailableError as e:
            raise ValueError(f"AITER's Triton wrapper of {self._kind.name} cannot be imported: {e}") from e
        self._seeds = Seeds(root, str(target.arch), self._kind)
        version = version_of(root, root / "aiter")
        self.about = {
            "format": FORMAT, "family": options.family, "kind": self._kind.name, "gfx": self._target.gfx,
            "triton": triton.__version__, "aiter": commit_of(root, version)[0] or version,
            "source": source_of(root / TRITON, self._kind.name),
        }  # fmt: skip
        self.refused: list[str] = []
        """Shapes that have no candidates, each with the reason."""
        self._points: list[_Point] = []

    def add(self, keys: Sequence[Mapping[str, int | str]], earlier: Mapping[str, Any]) -> None:
        """List the candidates of shapes. `earlier`: a document whose facts are taken over, if made for the same."""
        old = earlier.get("shapes", {}) if all(earlier.get(k) == v for k, v in self.about.items()) else {}
        groups: dict[object, list[SpecShape]] = {}
        for i, key in enumerate(keys):
            same = tuple((k, v) for k, v in key.items() if k != "M")
            groups.setdefault(same, []).append(SpecShape(i, dict(key)))
        # all that making tasks asks of a search's context
        context: Any = SimpleNamespace(target=self._target, emit=SimpleNamespace(alive=lambda: None))
        options = replace(self._options, hints=False)
        for shapes in groups.values():
            making = TaskMaker(context, options, self._kind, self._wrapper, self._seeds, str(self._root))
            for bucket in making.buckets(shapes, options.family, self._refuse):
                for t in making.tasks(bucket):
                    name = shape_name({**t.task.shape.key, "M": t.point.m})
                    self._points.append(_Point(name, bucket.name, t.task, _outcomes(old.get(name, {}))))

    def _refuse(self, shape: SpecShape, why: str) -> None:
        self.refused.append(f"{shape_name(shape.key)}: {why}")

    def compile(self, jobs: int, progress: Callable[[int, int], None]) -> None:
        """Compile what is not known yet, the first candidates of all shapes first. KeyboardInterrupt leaves what was
        compiled until then."""
        wanted: dict[str, CompileJob] = {}
        of: dict[str, list[tuple[_Point, str]]] = {}
        orders = ([(p, i) for i in p.task.ranker.order()] for p in self._points)
        for p, i in (e for rank in itertools.zip_longest(*orders) for e in rank if e is not None):
            name = p.task.candidates[i].name
            if name not in p.outcomes:
                wanted[p.task.keys[i]] = p.task.launches[i]  # type: ignore[assignment]
                of.setdefault(p.task.keys[i], []).append((p, name))
        if not wanted:
            return
        with tempfile.TemporaryDirectory(prefix="gemmfleet-order-") as scratch:
            store = KernelStore(Path(scratch), {})
            env = {"TRITON_CACHE_DIR": str(store.compiled), "TMPDIR": scratch, "TRITON_STORE_BINARY_ONLY": "1"}
            pool = CompilePool(min(jobs, len(wanted)), compile_job, env, self._options.compile_timeout_s)
            try:
                pool.want([(key, (job, self._target)) for key, job in wanted.items()])
                done = 0
                while done < len(wanted):
                    wait(pool.connections, TICK_S)
                    for r in pool.collect():
                        for p, name in of[r.name]:
                            p.outcomes[name] = r
                        done += 1
                        if done % PRUNED_EVERY == 0:
                            store.prune(self._options.cache_mb << 20)
                        progress(done, len(wanted))
            finally:
                pool.close()

    def document(self) -> dict[str, Any]:
        """The order file's document (docs/reference/files.md)."""
        shapes = {p.name: {"bucket": p.bucket, "candidates": _ranked(p)} for p in self._points}
        return {**self.about, "shapes": shapes}


def _ranked(p: _Point) -> list[dict[str, Any]]:
    """A point's candidates in the order to try them: as a search would, but those at a level behind those below it."""
    return sorted(_judged(p), key=lambda c: LEVELS.get(c["status"], LAST))


def _judged(p: _Point) -> Iterator[dict[str, Any]]:
    """Candidates as a search would try them, each with its status. Of equal machine code the first one counts."""
    first: dict[object, str] = {}
    for i in p.task.ranker.order():
        name = p.task.candidates[i].name
        found = p.outcomes.get(name, WAITING)
        status, why, facts = found.status, found.detail, found.facts
        if isinstance(facts, CompileFacts):
            same = first.setdefault(facts.same_as, name)
            if same != name:
                status, why = "double", same
            elif facts.spills:
                status = "spills"
        yield {"name": name, "status": status, "why": why, **(asdict(facts) if isinstance(facts, CompileFacts) else {})}


def _outcomes(earlier: Mapping[str, Any]) -> dict[str, CompileResult]:
    """Outcomes that an earlier document has of a point's candidates."""
    out: dict[str, CompileResult] = {}
    for c in earlier.get("candidates", ()):
        if "hash" in c:
            facts = CompileFacts(c["lds"], c["vgprs"], c["spills"], c["hash"], tuple(c["grid"]))
            out[c["name"]] = CompileResult("", "ok", "", 0.0, 0.0, facts)
        elif c["status"] != WAITING.status:
            out[c["name"]] = CompileResult("", c["status"], c["why"], 0.0, 0.0)
    return out
