"""A pod as a node: 100,000 lines through one stream, commands and 20 MB through a kept shell.

The API server is real (KUBE_BIN), the kubelet a stand-in: tests/support/kube.py. All share this machine's cores.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

from benchmarks.figure import Figure, LeftOutError
from benchmarks.stream import stream_figures
from orchestrator.inventory.model import Node
from orchestrator.leases.kubernetes import KubernetesSource
from orchestrator.leases.lease import LeaseState
from orchestrator.transport.base import RemoteFile, Transport
from tests.support.kube import Cluster, why_not
from tests.waiting import wait_until

RATE = 100_000
COMMANDS, COMMAND_MS = 200, 20.0
MEGABYTES, PUT_S = 20, 4.0


def run(folder: Path) -> list[Figure]:
    if why_not():
        raise LeftOutError(why_not())
    with Cluster(folder / "kube", nodes=1) as cluster:
        os.environ["KUBECONFIG"] = str(cluster.kubeconfig())
        source = KubernetesSource("20260131-154500-3f9a", Node(name="pool", lease="kubernetes", image="any", gpus=0))
        began = time.perf_counter()
        source.ask(1)
        wait_until(lambda: source.list()[0].state is LeaseState.READY, "the pod runs")
        ready_s = time.perf_counter() - began
        transport = source.transport(source.list()[0], "pool-1")
        transport.connect()
        try:
            return [Figure("a pod is ready", ready_s, 3.0, "s", "from the request"), *_measure(transport)]
        finally:
            transport.close()
            source.close()


def _measure(transport: Transport) -> list[Figure]:
    streamed = stream_figures(transport, "a pod", RATE, "exec")
    times = []
    for _ in range(COMMANDS):
        began = time.perf_counter()
        transport.run(["true"])
        times.append(time.perf_counter() - began)
    began = time.perf_counter()
    transport.put("blob", {"data": RemoteFile(os.urandom(MEGABYTES * 1_000_000))})
    put_s = time.perf_counter() - began
    return [
        *streamed,
        Figure(
            "a command in a pod", 1000 * statistics.median(times), COMMAND_MS, "ms",
            f"median of {COMMANDS} in a kept shell; the bound: an exec of its own",
        ),
        Figure(f"{MEGABYTES} MB into a pod", put_s, PUT_S, "s", "one tar stream"),
    ]  # fmt: skip
