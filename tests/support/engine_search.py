"""The search for a file of an engine over a stand-in for the GPU. Everything but device and compiler is real.

messages = search_file(tmp_path, SglangMoeSource(str(tree("sglang")), H200), serve, "fmoe", shapes)
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tests.support.search_standin import Kit
from worker.protocol import SpecShape
from worker.tuners.engines.engine_file import EngineFile
from worker.tuners.engines.engine_seeds import EngineSeeds
from worker.tuners.engines.specs import EngineOptions
from worker.tuners.search.compile_pool import CompilePool, CompileResult
from worker.tuners.search.forked_process import Serve
from worker.tuners.search.measuring_process import MeasuringProcess
from worker.tuners.search.source import CompileFacts
from worker.tuners.search.target import datasheet_target

if TYPE_CHECKING:
    from worker.tuners.engines.source import EngineSource


class PoolInThisProcess:
    """A pool for which each job is compiled at once, to nothing."""

    connections: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self._compiled: set[str] = set()
        self._jobs: list[tuple[str, Any]] = []

    def request(self, jobs: list[tuple[str, Any]]) -> None:
        self._jobs = [job for job in jobs if job[0] not in self._compiled]

    def collect(self) -> list[CompileResult]:
        results = [CompileResult(name, "ok", "", CompileFacts(1024, None, 0, name)) for name, _ in self._jobs]
        self._compiled |= {name for name, _ in self._jobs}
        self._jobs = []
        return results


def search_file(
    folder: Path, source: EngineSource, serve: Serve, family: str, shapes: list[SpecShape], *, search: str = "fast"
) -> list[dict[str, Any]]:
    """The messages of the search for the file of these shapes, with `serve` in the measuring process.

    A fast search measures other candidates each time: which come next depends on the answers that have come.
    """
    kit = Kit(folder, {}, search=search, family=family, max_candidates=40)
    kit.close()
    measurer = MeasuringProcess(serve, {}, hang_s=600)
    measurer.restart()
    context = replace(
        kit.context,
        source=source,
        target=datasheet_target(90),
        measurer=measurer,
        pool=cast("CompilePool", PoolInThisProcess()),
        options=EngineOptions(**asdict(kit.options)),
    )
    EngineFile(context, EngineSeeds(source), {"project": source.engine().project}).run(shapes)
    measurer.end()
    return kit.messages
