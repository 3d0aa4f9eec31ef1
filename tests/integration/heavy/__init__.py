"""Heavy nodes: containers that are hosts, each with its own sshd, its own dockerd, its own address and a worker image.

For tests, and for anybody who wants to try the product without a cluster::

    fleet = HeavyFleet(folder)
    fleet.start(3, users=("root", "tuner"))     # root on nodes 1 and 3, a user of the group docker on node 2
    fleet.nodes[0].partition()
    fleet.stop()

By hand: `python -m tests.integration.heavy up 2`, see docs/contributing/index.md. The hosts have no Python; the
worker image has.
"""

from __future__ import annotations

from tests.integration.heavy.fleet import HeavyFleet
from tests.integration.heavy.images import TORCH_IMAGE, WORKER_IMAGE
from tests.integration.heavy.node import HeavyNode
from tests.integration.heavy.outer import why_not

__all__ = ["TORCH_IMAGE", "WORKER_IMAGE", "HeavyFleet", "HeavyNode", "why_not"]
