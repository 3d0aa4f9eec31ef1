"""Deploys a run to a node folder and takes the node over from earlier controllers of the run.

The node's driver (node_driver.py) calls `deploy`, `younger_epoch` and `take_over`, in this order, at the start of each
session. The transport is connected by then, and the workers start after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.machines.node_folder import attempts_in, missing_files, take_back_all
from orchestrator.transport.base import RemoteFile, Transport

MAX_EPOCH_DIGITS = 18
"""Digits of a node's epoch that are read. A controller's epoch is the number of its starts."""


@dataclass(frozen=True, slots=True)
class DeployedNode:
    """The files and folders that a driver deploys to a node, and how it starts the workers there."""

    folder: str
    files: Mapping[str, RemoteFile]
    """Path below the folder -> file."""
    folders: Sequence[str]
    """Folders that must exist before a worker starts."""
    slots: tuple[str, ...]
    """Names of the slots. A slot is the GPU, or the part of one, that one worker measures on."""
    env: Mapping[str, str]
    """Variables of the workers that are in no file."""
    epoch: int
    """Number of this controller among those of the run. A node obeys the highest that it has seen."""
    offsets: Mapping[tuple[str, str], int]
    """The next byte to read of each (stream, slot)."""
    launch: bool
    """False takes over the running workers and starts none."""
    results: str | None = None
    """Folder on the node for results that stay there after the run."""
    home: Path | None = None
    """Local folder for reproductions of faults, if the tuner writes them."""
    is_connected: bool = False
    """The transport is connected and was just used."""


def deploy(transport: Transport, deployed: DeployedNode) -> None:
    """Write the files that the node folder lacks. Raises NodeError."""
    missing = missing_files(transport, deployed.folder, deployed.files)
    transport.put(deployed.folder, missing, deployed.folders)
    if deployed.results is not None:
        # Made here, so that it belongs to the user. Docker would create it as root.
        transport.put(deployed.results, {})


def younger_epoch(transport: Transport, deployed: DeployedNode) -> int | None:
    """The epoch of a younger controller that the node obeys, None if it obeys no other. Raises NodeError."""
    text = transport.run(["cat", f"{deployed.folder}/epoch"], timeout=20.0).out.strip()[:MAX_EPOCH_DIGITS]
    if text.isdigit() and int(text) > deployed.epoch:
        return int(text)
    return None


def take_over(transport: Transport, deployed: DeployedNode) -> frozenset[str]:
    """Make the node obey this controller, and take back what no worker has claimed. Return the attempts that are
    claimed or ended there. Raises NodeError."""
    # An older controller may still send until the node's epoch rises. The second call takes back what it sent
    # meanwhile.
    take_back_all(transport, deployed.folder)
    transport.put(deployed.folder, {"epoch": RemoteFile(f"{deployed.epoch}\n".encode())})
    take_back_all(transport, deployed.folder)
    return frozenset(attempts_in(transport, deployed.folder, "claimed", "attempts"))
