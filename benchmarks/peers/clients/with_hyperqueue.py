"""TASKS WORKERS FOLDER: print the seconds from submitting so many `true` to their end, server and worker being up."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from hyperqueue import Job, LocalCluster
from hyperqueue.cluster import WorkerConfig


def main(tasks: int, workers: int, folder: Path) -> None:
    """One worker with as many cores as ours has slots; outputs are not kept.

    The client looks once a second, so the end is the time of a file that one more task makes after all others.
    """
    done = folder / "done"
    with LocalCluster(str(folder / "server"), WorkerConfig(cores=workers)) as cluster:
        client = cluster.client()
        for count in (10, tasks):  # the first few start the threads
            job = Job(folder)
            all_of_them = [job.program(["true"], stdout=None, stderr=None) for _ in range(count)]
            job.program(["touch", str(done)], stdout=None, stderr=None, deps=all_of_them)
            began = time.time()
            client.wait_for_jobs([client.submit(job)])
            seconds = done.stat().st_mtime - began
        print(seconds)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
