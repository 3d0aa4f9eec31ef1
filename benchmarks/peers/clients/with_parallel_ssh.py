"""WORK JOB.json: the same by parallel-ssh's native client; deploy is one tar stream into a remote tar."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from gevent import joinall, spawn
from pssh.clients import ParallelSSHClient
from pssh.config import HostConfig


def main(work: str, job: dict[str, Any]) -> None:
    """Print the seconds of this, imports left out, and of a second round of status over the open connections."""
    began = time.perf_counter()
    nodes = job["nodes"]
    tar = Path(job["tar"]).read_bytes()
    client = ParallelSSHClient(
        [n["address"] for n in nodes], user=job["user"], pkey=job["key"], pool_size=len(nodes), allow_agent=False,
        identity_auth=False, host_config=[HostConfig(port=n["port"]) for n in nodes],
    )  # fmt: skip

    def send(output: Any) -> None:
        output.stdin.write(tar)
        output.client.eagain(output.channel.send_eof)

    def act() -> None:
        if work == "deploy":
            outputs = client.run_command("%s", host_args=[(n["take"],) for n in nodes])
            joinall([spawn(send, output) for output in outputs], raise_error=True)
        else:
            outputs = client.run_command(job["command"])
        client.join(outputs)
        if bad := [o.host for o in outputs if o.exit_code]:
            raise SystemExit(f"error on {', '.join(bad)}")

    act()
    first = time.perf_counter()
    if work == "status":
        act()
    print(first - began, time.perf_counter() - first)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
