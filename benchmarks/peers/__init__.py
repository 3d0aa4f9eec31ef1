"""gemmfleet beside others: Ansible, pyinfra, parallel-ssh, asyncssh, HyperQueue, and an even split."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.figure import Figure


def run(folder: Path) -> list[Figure]:
    """Print the tables, with 16 nodes; ours against the bounds. `python -m benchmarks.peers` has more nodes."""
    # not above: the clients of this package are measured with their start
    from benchmarks.peers.__main__ import measure

    return measure(folder / "environment", folder, (16,))
