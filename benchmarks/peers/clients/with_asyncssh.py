"""WORK JOB.json: the same by asyncssh, all nodes in one gather; deploy is one tar stream into a remote tar."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import asyncssh


async def main(work: str, job: dict[str, Any]) -> None:
    """Print the seconds of this, imports left out, and of a second round of status over the open connections."""
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
    print(first - began, second - first)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text())))
