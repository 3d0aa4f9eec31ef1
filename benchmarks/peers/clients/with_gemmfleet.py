"""WORK JOB.json: deploy to, or query, all nodes as a run does: inventory, plan, transport, one thread a node."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from orchestrator.dispatch.deploy import NodePlan, missing_files, node_files, node_folders
from orchestrator.inventory import load_inventory
from orchestrator.nodes.link import transport_of
from orchestrator.nodes.plan import plan_nodes
from orchestrator.transport import Transport, ssh

SSH = ssh.SshTransport
"""Imported here, as the first connection would do it: imports are not counted."""


def main(work: str, job: dict[str, Any]) -> None:
    """Print the seconds of this, imports left out, and of a second round of status over the open connections."""
    began = time.perf_counter()
    plans = plan_nodes(load_inventory(Path(job["inventory"])), job["run"], Path(job["scratch"]), {})
    nodes = [(plan, transport_of(plan)) for plan in plans]

    def deploy(node: tuple[NodePlan, Transport]) -> None:
        plan, transport = node
        transport.connect()
        files = node_files(plan, job["run"], "replay", {}, 600.0)
        transport.put(plan.folder, missing_files(transport, plan.folder, files), node_folders(plan.slots))

    def status(node: tuple[NodePlan, Transport]) -> None:
        node[1].connect()
        query(node)

    def query(node: tuple[NodePlan, Transport]) -> None:
        done = node[1].run(["sh", "-c", job["command"]])
        if done.code:
            raise SystemExit(f"{node[0].node}: {done.text}")

    def every(one: Callable[[tuple[NodePlan, Transport]], None]) -> None:
        with ThreadPoolExecutor(len(nodes)) as pool:
            list(pool.map(one, nodes))

    every(deploy if work == "deploy" else status)
    first = time.perf_counter()
    if work == "status":
        every(query)
    second = time.perf_counter()
    every(lambda node: node[1].close())
    print(first - began, second - first)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
