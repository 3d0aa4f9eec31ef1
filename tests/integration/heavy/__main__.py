"""Heavy nodes by hand: `python -m tests.integration.heavy [N] [--users root,tuner]` brings them up until Ctrl-C.

Prints a line a node with the way to log in.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
from pathlib import Path

from tests.integration.heavy import WORKER_IMAGE, HeavyFleet, why_not


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.integration.heavy", description=__doc__)
    parser.add_argument("nodes", type=int, nargs="?", default=2, help="how many (2)")
    parser.add_argument("--users", default="root,tuner", help="given out in turn (root,tuner)")
    args = parser.parse_args()
    if why_not():
        print(f"error: {why_not()}", file=sys.stderr)
        return 3
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with tempfile.TemporaryDirectory(prefix="gemmfleet-nodes-") as folder:
        fleet = HeavyFleet(Path(folder))
        print("bringing nodes up (the first time their images are built, about 2 minutes) ...", flush=True)
        fleet.start(args.nodes, users=args.users.split(","))
        try:
            config = fleet.folder / "ssh_config"
            config.write_text(fleet.ssh_config())
            for node in fleet.nodes:
                print(f"{node.name}  {node.user}@{node.address}  ssh -F {config} {node.name}")
            print(f"worker image: {WORKER_IMAGE}\nCtrl-C takes them down", flush=True)
            stop.wait()
        finally:
            fleet.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
