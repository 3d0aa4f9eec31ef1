"""The parts of a run while a controller drives it (`RunContext`), and the controller's settings (`DriveSettings`).

What the user asked for is in `RunConfig` (run.yaml). drive.py makes the context once; the loop and its helpers
(node_reports.py, outbox.py, deployment.py) take what they need from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.controller.timeouts import Timeouts
from orchestrator.inventory.model import Inventory
from orchestrator.ledger.writer import Ledger
from orchestrator.machines.node_plan import NodePlan
from orchestrator.paths import RunConfig, RunPaths
from orchestrator.policy import Policy, PolicySettings
from orchestrator.transport.base import Transport
from orchestrator.view.status import RunStatus


class Watcher(Protocol):
    """The display of a run. It is updated a few times per second."""

    def update(self, status: RunStatus) -> None: ...
    def note(self, text: str, *, bad: bool = False) -> None: ...


@dataclass(frozen=True, slots=True)
class DriveSettings:
    """Defaults of a controller that tests replace. Users set two of the timeouts, `lost` and `grace`, by options."""

    reach: Callable[[NodePlan], Transport] | None = None
    """Makes the transport of a planned node. None: use the one in its inventory."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    policy: PolicySettings = field(default_factory=PolicySettings)


@dataclass(frozen=True, slots=True)
class RunContext:
    """The parts of a run while a controller drives it. They are made once, and handed to whoever needs several."""

    paths: RunPaths
    config: RunConfig
    inventory: Inventory
    """The inventory as it was when this controller began."""
    ledger: Ledger
    policy: Policy
    watcher: Watcher
    epoch: int
    """The number of this controller among those of the run. Nodes obey only the highest."""
    settings: DriveSettings
    timeouts: Timeouts
    """Use these and not those of `settings`: they have the user's `lost` and `grace`."""
    mask: Callable[[str], str]
    """Puts references (`${env:NAME}`) in place of their values, because the watcher's output may be kept."""

    def note(self, text: str, *, bad: bool = False) -> None:
        self.watcher.note(self.mask(text), bad=bad)
