"""Heavy nodes by hand: `python -m tests.integration.heavy [N] [--users root,tuner] [--torch]` until Ctrl-C.

Prints a line a node with the way to log in, and what to type to tune on them.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
from pathlib import Path

from tests.integration.heavy import TORCH_IMAGE, WORKER_IMAGE, HeavyFleet, why_not
from tests.integration.heavy.outer import HeavyError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.integration.heavy", description=__doc__)
    parser.add_argument("nodes", type=int, nargs="?", default=2, help="how many (2)")
    parser.add_argument("--users", default="root,tuner", help="given out in turn (root,tuner)")
    parser.add_argument("--torch", action="store_true", help="workers have torch (CPU), for the tuner of that name")
    args = parser.parse_args()
    if why_not():
        print(f"error: {why_not()}", file=sys.stderr)
        return 3
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with tempfile.TemporaryDirectory(prefix="gemmfleet-nodes-") as folder:
        fleet = HeavyFleet(Path(folder))
        print("bringing nodes up ...", flush=True)
        try:
            fleet.start(args.nodes, users=args.users.split(","), torch=args.torch, say=say)
            image, tuner = (TORCH_IMAGE, "torch") if args.torch else (WORKER_IMAGE, "replay")
            config, inventory = fleet.folder / "ssh_config", fleet.folder / "inventory.yaml"
            inventory.write_text(fleet.inventory(image, tuner))
            for node in fleet.nodes:
                print(f"{node.name}  {node.user}@{node.address}  ssh -F {config} {node.name}")
            print(f"worker image: {image}\ninventory: {inventory}\n  gemmfleet nodes check -i {inventory}")
            print(f"  gemmfleet tune examples/demo.csv -i {inventory}\nCtrl-C takes them down", flush=True)
            stop.wait()
        except HeavyError as e:
            print(f"error: {e}", file=sys.stderr)
            return 3
        finally:
            fleet.stop()
    return 0


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
