"""Engine `nice`: workers as processes with a lower priority."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.engine.process import SPEC as PROCESS
from orchestrator.engine.process import ProcessEngine
from orchestrator.engines import EngineSpec
from orchestrator.transport.base import Transport


class NiceEngine(ProcessEngine):
    """Runs launch.sh under `nice`."""

    def __init__(self, transport: Transport, folder: str, level: int) -> None:
        super().__init__(transport, folder)
        self.shell = ("nice", "-n", str(level), "sh")


def parse(options: Mapping[str, Any]) -> int:
    """Level of `nice`. Raises ValueError."""
    level = options.get("level", 10)
    if set(options) - {"level"} or not re.fullmatch("1?[0-9]", str(level)):
        raise ValueError("the engine nice has one option, level: a whole number from 0 to 19")
    return int(level)


def create(plan: Any, transport: Transport, progress: Callable[[str], None]) -> NiceEngine:
    return NiceEngine(transport, plan.folder, parse(plan.source.engine_options))


SPEC = EngineSpec(
    name="nice",
    create=create,
    scripts=PROCESS.scripts,
    needs=PROCESS.needs,
    preflight=PROCESS.preflight,
    parse_options=parse,
)
