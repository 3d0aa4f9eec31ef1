"""The tuners `vllm` and `sglang` as the worker sees them: the search for an engine's config files, file by file.

`EngineTuner` finds the engine and its device; `engine_file.py` searches a file. Rows carry what a config file needs
(`triton_config`).
"""

from __future__ import annotations

import importlib.util
import os
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from worker.families import FAMILIES
from worker.protocol import Spec
from worker.protocol.paths import SGLANG_ROOT_ENV, VLLM_ROOT_ENV
from worker.triton_configs.engine_package import (
    PROJECTS,
    EngineDevice,
    ServingEngineError,
    detect_device,
    unpack_wheel,
)
from worker.tuners.engines.engine_file import EngineFile
from worker.tuners.engines.engine_seeds import EngineSeeds
from worker.tuners.engines.specs import EngineOptions, parse_engine_options
from worker.tuners.search.bucket import group_by_file
from worker.tuners.search.measuring_process import NoDeviceError
from worker.tuners.search.options import SearchOptions
from worker.tuners.search.problem_search import SearchContext
from worker.tuners.search.target import datasheet_target
from worker.tuners.search.tuner import SearchTuner

if TYPE_CHECKING:
    from worker.tuners.engines.source import EngineSource

INTERPRETED_DEVICE = EngineDevice(datasheet_target(90).name, 90)
"""The device of Triton's interpreter."""


class EngineTuner(SearchTuner):
    """Measures configs of an engine's Triton kernels on the first GPU."""

    engine: ClassVar[str]
    """The engine's package, and the tuner's name."""
    root_variable: ClassVar[str]
    """The environment variable that names the package, if it is not the installed one."""
    _facts: dict[str, Any]  # of all documents; since `open`, as the next
    _seeds: EngineSeeds

    def read_options(self, raw: Mapping[str, Any]) -> EngineOptions:
        return parse_engine_options(self.engine, raw)

    def source(self) -> tuple[EngineSource, str]:
        options = self.read_options(self._raw)
        try:
            root = self._find_root(options)
            if os.environ.get("TRITON_INTERPRET") == "1":
                device = INTERPRETED_DEVICE
                named_by = ""
            else:
                device, named_by = detect_device(root)
            source = self._source_of_family(options.family, root, device)
            engine = source.engine()
            device = source.device
        except ServingEngineError as e:
            raise NoDeviceError(f"the tuner {self.engine}: {e}") from e
        if engine.project != self.engine:
            raise NoDeviceError(f"the tuner {self.engine}: {root} is {engine.project}, whose kernels are others")
        self._seeds = EngineSeeds(source)
        digest = engine.source_hash(source.op)
        engine_facts = {"project": engine.project, "version": engine.version, "source": digest}
        self.about = {"engine": engine_facts}
        self._facts = {**engine_facts, "device": device.to_document(), "named_by": named_by}
        return source, digest

    def search(self, spec: Spec, context: SearchContext) -> None:
        """Search the files of a group's shapes, and settle every shape."""
        self._seeds.source.enter(context.target)
        for shapes in group_by_file(spec.shapes, FAMILIES[spec.family].m_column):
            EngineFile(context, self._seeds, self._facts).run(shapes)

    def _find_root(self, options: SearchOptions) -> Path:
        """The package, or a folder that holds it. Raises ServingEngineError."""
        configured = options.root or os.environ.get(self.root_variable, "")
        if not configured:
            spec = importlib.util.find_spec(self.engine)
            if spec is None or not spec.submodule_search_locations:
                raise ServingEngineError(
                    f"{PROJECTS[self.engine].title} is not installed for this Python: name its folder or wheel,"
                    f" {self.engine}: {{root: ...}}"
                )
            return Path(spec.submodule_search_locations[0])
        root = Path(configured)
        if root.suffix != ".whl":
            return root
        return unpack_wheel(root, self.cache / "engines" / self._place.slot / root.stem)

    @abstractmethod
    def _source_of_family(self, family: str, root: Path, device: EngineDevice) -> EngineSource:
        """The kernels of a family; imports torch."""


class VllmTuner(EngineTuner):
    """Tunes vLLM's files of block-FP8 linear layers and of fused experts."""

    engine = "vllm"
    root_variable = VLLM_ROOT_ENV

    def _source_of_family(self, family: str, root: Path, device: EngineDevice) -> EngineSource:
        from worker.tuners.engines.linear import LinearSource
        from worker.tuners.engines.moe import MoeSource

        sources: dict[str, type[EngineSource]] = {"a8w8_blockscale": LinearSource, "fmoe": MoeSource}
        return sources[family](str(root), device)


class SglangTuner(EngineTuner):
    """Tunes SGLang's files of fused experts."""

    engine = "sglang"
    root_variable = SGLANG_ROOT_ENV

    def _source_of_family(self, family: str, root: Path, device: EngineDevice) -> EngineSource:
        import triton

        from worker.tuners.engines.sglang_moe import SglangMoeSource

        return SglangMoeSource(str(root), replace(device, triton=triton.__version__))
