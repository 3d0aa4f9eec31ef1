"""`make demo`: two nodes on this machine, a small job on them through the command line, and all taken down again.

The nodes are containers, each with its own sshd, dockerd and address (tests/integration/heavy), the workers
containers on them, the tuner is `torch` on the CPU. The run folder stays. See docs/start/ssh.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

from orchestrator.errors import InputError
from orchestrator.paths import RunConfig, RunPaths, list_runs
from tests.integration.heavy import TORCH_IMAGE, HeavyFleet
from tests.integration.heavy.outer import CACHE, HeavyError, missing

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SPACE = 4_000_000_000
"""Bytes for the images while they are built, and for what two nodes load of them."""
GRACE_S = 5
"""A demo that is stopped does not wait for the shapes in flight as long as a real run would."""


class Commands:
    """Commands as a user types them. Ctrl-C is for the one that runs; between two of them it ends the demo."""

    def __init__(self) -> None:
        self.stopped = False
        self._running = False
        self._child: subprocess.Popen[bytes] | None = None
        for number in STOPS:
            signal.signal(number, self._stop)

    def run(self, *args: str) -> int:
        """Run a command in a session of its own, where only we pass signals on; its exit code."""
        say(f"\n$ gemmfleet {shlex.join(args)}")
        self._running = True
        try:
            argv = [sys.executable, "-m", "orchestrator", *args]
            self._child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
            if self.stopped:
                self._child.send_signal(signal.SIGINT)
            code = self._child.wait()
        finally:
            self._running, self._child = False, None
        return code if code >= 0 else 128 - code

    def ignore(self) -> None:
        """From now on nothing stops us, nor the commands that we start."""
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        if not self._running:
            self.ignore()
            raise KeyboardInterrupt
        if self._child is not None:
            self._child.send_signal(signal.SIGINT)


def play(fleet: HeavyFleet, shapes: Path, runs: Path, commands: Commands) -> int:
    """All steps while the nodes are up, each with what a user would type; the exit code of the first that fails."""
    inventory, where = fleet.folder / "inventory.yaml", [] if runs == Path("runs") else ["--runs", str(runs)]
    say("\n== 1/5  two nodes: containers with an sshd, a dockerd and an address of their own")
    fleet.start(2, users=("root", "tuner"), torch=True, say=say)
    say("\n".join(f"{node.name}  {node.user}@{node.address}" for node in fleet.nodes))
    say(f"their worker image {TORCH_IMAGE} holds torch for CPUs")
    inventory.write_text(fleet.inventory(TORCH_IMAGE, "torch"))
    say(f"\n== 2/5  the inventory that names them, {inventory}\n{inventory.read_text().rstrip()}")
    say("\n== 3/5  can they be used?")
    code = commands.run("nodes", "check", "-i", str(inventory))
    if code or commands.stopped:
        return code or 130
    say("\n== 4/5  the job: the shapes are split over both nodes, and their workers' output comes back live")
    code = commands.run("tune", str(shapes), "-i", str(inventory), "--grace", str(GRACE_S), *where)
    ours = [run for run in list_runs(runs) if _inventory_of(run) == str(inventory)]
    if not ours or commands.stopped:
        say("the nodes end with the demo, so its run cannot be resumed; the results so far are in its folder")
        return code or 130
    say("\n== 5/5  how it went")
    told = commands.run("status", ours[0].run, *where) or commands.run("explain", ours[0].run, "g0001", *where)
    say(f"\nthe result, {ours[0].tuned}:\n{ours[0].tuned.read_text().rstrip()}")
    say("(times of a CPU that two nodes share: for trying out, not measurements)")
    return code or told


def _inventory_of(run: RunPaths) -> str:
    with contextlib.suppress(InputError):  # others may begin beside ours
        return RunConfig.read(run.config).inventory
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--shapes", type=Path, default=Path("examples/demo.csv"), help="what to tune")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the run folder goes")
    args = parser.parse_args()
    if why := why_not():
        print(f"error: {why}", file=sys.stderr)
        return 3
    say(
        "two nodes on this machine, a small job on them, and all taken down again. Ctrl-C stops at any point.\n"
        f"The nodes share {os.cpu_count()} CPU cores: the times are for trying out, not measurements."
    )
    commands = Commands()
    code = 3
    with tempfile.TemporaryDirectory(prefix="gemmfleet-demo-") as folder:
        fleet = HeavyFleet(Path(folder))
        try:
            code = play(fleet, args.shapes, args.runs, commands)
        except (HeavyError, subprocess.TimeoutExpired) as e:
            print(f"error: {e}", file=sys.stderr)
        except KeyboardInterrupt:
            code = 130
        finally:
            commands.ignore()
            say("\ntaking the nodes down ...")
            fleet.stop()
    say("the nodes are gone" + (": stopped" if commands.stopped else ""))
    return 130 if commands.stopped else code


def why_not() -> str:
    """Reason for which there can be no demo here, and the way out; empty where there can be one."""
    if os.geteuid() != 0:
        return "the demo needs root, because its nodes are containers that run Docker themselves: run it as root"
    if lacking := missing():
        return f"the demo needs {', '.join(lacking)}; on Debian or Ubuntu, this installs them: make demo SYSTEM=1"
    CACHE.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(CACHE).free) < SPACE:
        return (
            f"the demo needs {SPACE / 1e9:.0f} GB in {CACHE}, and {free / 1e9:.1f} GB are free; "
            "GEMMFLEET_TEST_CACHE=DIR names another place"
        )
    return ""


def say(text: str) -> None:
    """Print; a terminal that is gone must not keep the nodes up."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
