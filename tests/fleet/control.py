"""A controller of the fleet, in a process of its own that can be interrupted or killed: the end of `tune`, `resume`,
`retry` and `cancel` with links of the fleet and short waits."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.cli import cancel, driving
from orchestrator.cli.printer import finish_page
from orchestrator.controller.context import DriveSettings
from orchestrator.controller.timeouts import StopLimits, Timeouts
from orchestrator.errors import OrchestratorError
from orchestrator.paths import RunPaths
from orchestrator.policy import PolicySettings
from tests.fleet.link import NodeLink

TIMEOUTS = Timeouts(
    tick=0.01, view=0.05, never_up=2.0, starting=10.0, first_word=10.0, silence=1.5, backoff=0.02, longest_backoff=0.1,
    jitter=0.01, steady=0.2, vanished=2.0, busy=0.05, close=0.5, stop=StopLimits(2.0, 1.0, 5.0),
    cancel=StopLimits(1.0, 0.5, 2.5),
)  # fmt: skip
"""`vanished` is longer than `silence`, like in a real run: a stall never delays a beat that long."""
POLICY = PolicySettings(first_cool_down_s=0.05, cool_down_s=0.3, proof_s=5.0, ahead_s=0.1)  # shapes take hundredths


def main(request: Mapping[str, Any]) -> int:
    """Carry a request out; the exit code, as the command line has it."""
    paths = RunPaths(Path(request["run"]))
    place = Path(request["place"])
    timeouts = replace(TIMEOUTS, **request["timeouts"])
    settings = DriveSettings(lambda plan: NodeLink(plan, place), timeouts, POLICY)
    try:
        if request["what"] == "cancel":
            cancel.cancel_run(paths, settings)
            return 0
        page = driving.drive_here(paths, json_=False, retry=tuple(request["retry"]), settings=settings)
        return finish_page(page)
    except OrchestratorError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
