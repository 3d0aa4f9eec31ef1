"""WHO status|deploy JOB.json: the work, by a library. Prints the seconds of it, imports left out, and those of a second
round of status over the connections of the first. hyperqueue TASKS CORES FOLDER: prints the seconds of the tasks.

Runs with the interpreter of the library's environment, so it imports nothing of this package.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def gemmfleet(work: str, job: dict[str, Any]) -> tuple[float, float]:
    """A run's way: inventory, plans, transports, one thread a node."""
    import fabric  # noqa: F401  these two are imported when they are needed
    import jinja2  # noqa: F401

    from orchestrator.inventory.load import load_inventory
    from orchestrator.machines.node_files import node_files, node_folders
    from orchestrator.machines.node_folder import missing_files
    from orchestrator.machines.node_link import transport_of
    from orchestrator.machines.node_plan import NodePlan, plan_nodes
    from orchestrator.transport.base import Transport

    began = time.perf_counter()
    plans = plan_nodes(load_inventory(Path(job["inventory"])), job["run"], Path(job["scratch"]), {})
    nodes = [(plan, transport_of(plan)) for plan in plans]

    def deploy(plan: NodePlan, transport: Transport) -> None:
        transport.connect()
        files = node_files(plan, job["run"], "replay", {}, 600.0)
        transport.put(plan.folder, missing_files(transport, plan.folder, files), node_folders(plan.slots))

    def status(plan: NodePlan, transport: Transport) -> None:
        transport.connect()
        query(plan, transport)

    def query(plan: NodePlan, transport: Transport) -> None:
        done = transport.run(["sh", "-c", job["command"]])
        if done.code:
            raise SystemExit(f"error: {plan.node}: {done.text}")

    def every(one: Callable[[NodePlan, Transport], None]) -> float:
        with ThreadPoolExecutor(len(nodes)) as pool:
            list(pool.map(one, *zip(*nodes, strict=True)))
        return time.perf_counter()

    first = every(deploy if work == "deploy" else status)
    second = every(query) if work == "status" else first
    every(lambda plan, transport: transport.close())
    return first - began, second - first


async def _asyncssh(work: str, job: dict[str, Any]) -> tuple[float, float]:
    """All nodes in one gather; deploy is one tar stream into a remote tar."""
    import asyncssh

    began = time.perf_counter()
    tar = Path(job["tar"]).read_bytes()

    async def act(connection: Any, node: dict[str, Any]) -> None:
        if work == "deploy":
            await connection.run(node["take"], input=tar, encoding=None, check=True)
        else:
            await connection.run(job["command"], check=True)

    async def connect(node: dict[str, Any]) -> Any:
        connection = await asyncssh.connect(
            node["address"], node["port"], username=job["user"], client_keys=[job["key"]],
            known_hosts=job["known_hosts"], config=None, agent_path=None, connect_timeout=60.0,
        )  # fmt: skip
        await act(connection, node)
        return connection

    connections = await asyncio.gather(*map(connect, job["nodes"]))
    first = time.perf_counter()
    if work == "status":
        await asyncio.gather(*map(act, connections, job["nodes"]))
    second = time.perf_counter()
    for connection in connections:
        connection.close()
        await connection.wait_closed()
    return first - began, second - first


def parallel_ssh(work: str, job: dict[str, Any]) -> tuple[float, float]:
    """Its native client; deploy is one tar stream into a remote tar."""
    from gevent import joinall, spawn
    from pssh.clients import ParallelSSHClient
    from pssh.config import HostConfig

    began = time.perf_counter()
    nodes, tar = job["nodes"], Path(job["tar"]).read_bytes()
    client = ParallelSSHClient(
        [n["address"] for n in nodes], user=job["user"], pkey=job["key"], pool_size=len(nodes), allow_agent=False,
        identity_auth=False, host_config=[HostConfig(port=n["port"]) for n in nodes],
    )  # fmt: skip

    def send(output: Any) -> None:
        output.stdin.write(tar)
        output.client.eagain(output.channel.send_eof)

    def act() -> float:
        if work == "deploy":
            outputs = client.run_command("%s", host_args=[(n["take"],) for n in nodes])
            joinall([spawn(send, output) for output in outputs], raise_error=True)
        else:
            outputs = client.run_command(job["command"])
        client.join(outputs)
        if bad := [o.host for o in outputs if o.exit_code]:
            raise SystemExit(f"error on {', '.join(bad)}")
        return time.perf_counter()

    first = act()
    return first - began, (act() if work == "status" else first) - first


def hyperqueue(tasks: int, cores: int, folder: Path) -> float:
    """Submit this many `true` commands while server and worker are up. Outputs are not kept.

    The library only looks once a second. So one more task runs after all others and makes a file; its time is the end.
    """
    from hyperqueue import Job, LocalCluster
    from hyperqueue.cluster import WorkerConfig

    done, seconds = folder / "done", 0.0
    with LocalCluster(str(folder / "server"), WorkerConfig(cores=cores)) as cluster:
        client = cluster.client()
        for count in (10, tasks):  # the first few start the threads
            job = Job(folder)
            all_of_them = [job.program(["true"], stdout=None, stderr=None) for _ in range(count)]
            job.program(["touch", str(done)], stdout=None, stderr=None, deps=all_of_them)
            began = time.time()
            client.wait_for_jobs([client.submit(job)])
            seconds = done.stat().st_mtime - began
    return seconds


def main(who: str, *words: str) -> None:
    if who == "hyperqueue":
        print(hyperqueue(int(words[0]), int(words[1]), Path(words[2])))
        return
    work, job = words[0], json.loads(Path(words[1]).read_text())
    libraries = {"gemmfleet": gemmfleet, "parallel-ssh": parallel_ssh}
    print(*(asyncio.run(_asyncssh(work, job)) if who == "asyncssh" else libraries[who](work, job)))


if __name__ == "__main__":
    main(*sys.argv[1:])
