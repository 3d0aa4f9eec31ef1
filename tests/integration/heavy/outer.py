"""The Docker daemon that runs the nodes: one of our own where we are root, else the one that the user has.

Our own keeps its data in the cache folder, touches neither iptables nor forwarding nor the default bridge, and is
shared by all test runs of the machine: each holds a shared lock, and the last one stops it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from tests.waiting import PATIENCE_S

CACHE = Path(os.environ.get("GEMMFLEET_TEST_CACHE", "~/.cache/gemmfleet-tests")).expanduser()
SOCKET = Path("/run/gemmfleet-tests/docker.sock")
NEEDED = ("ssh", "ssh-keygen", "ip", "debootstrap", "docker", "dockerd")


class HeavyError(RuntimeError):
    """The nodes cannot be brought up here; the text says why."""


def missing() -> list[str]:
    """Programs that heavy nodes need and that are not installed here."""
    return [name for name in NEEDED if shutil.which(name) is None]


def why_not() -> str:
    """Reason for which heavy nodes cannot run here; empty where they can."""
    if os.geteuid() != 0:
        return "heavy nodes need root"
    if lacking := missing():
        return f"{', '.join(lacking)} not installed (SYSTEM=1 installs them)"
    return ""


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """One process of the machine at a time."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


class Outer:
    """The daemon that runs the nodes."""

    def __init__(self) -> None:
        self._held: IO[str] | None = None

    def docker(self, *args: str, check: bool = True, stdin: bytes | None = None, timeout: float = PATIENCE_S) -> str:
        """Run `docker ARGS` against this daemon; its output. Raises HeavyError."""
        done = self.run(args, stdin=stdin, timeout=timeout)
        if check and done.returncode != 0:
            raise HeavyError(f"docker {args[0]} ended with code {done.returncode}: {done.stderr.decode().strip()}")
        return done.stdout.decode("utf-8", "replace").strip()

    def run(
        self, args: Sequence[str], stdin: bytes | None = None, timeout: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[bytes]:
        """Run `docker ARGS` against this daemon to its end, whatever its code."""
        argv = ["docker", "-H", f"unix://{SOCKET}", *args]
        no_input = subprocess.DEVNULL if stdin is None else None
        return subprocess.run(argv, input=stdin, stdin=no_input, capture_output=True, timeout=timeout)

    def acquire(self) -> None:
        """Use the daemon; start it where it does not run."""
        with locked("outer-start"):
            self._held = (CACHE / "outer-users.lock").open("w")
            fcntl.flock(self._held, fcntl.LOCK_SH)
            if self.run(["info"]).returncode != 0:
                self._start()

    def release(self) -> None:
        """Stop using it; the last one stops the daemon."""
        if self._held is None:
            return
        with locked("outer-start"):
            try:
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            else:
                self._stop()
            self._held.close()
            self._held = None

    def _start(self) -> None:
        mount_cgroups()
        run, log = SOCKET.parent, CACHE / "dockerd.log"
        # it outlives us, and so must not use a folder for temporary files that goes away with us
        (run / "tmp").mkdir(mode=0o700, parents=True, exist_ok=True)
        argv = [
            "dockerd", "-H", f"unix://{SOCKET}", "-p", str(run / "docker.pid"), "--data-root", str(CACHE / "docker"),
            "--exec-root", str(run / "exec"), "--bridge=none", "--iptables=false", "--ip-forward=false",
            "--ip-masq=false", "--ip6tables=false",
        ]  # fmt: skip
        with log.open("wb") as out:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                env={**os.environ, "TMPDIR": str(run / "tmp")},
            )  # fmt: skip
        process.returncode = 0  # it outlives us where others use it; nobody waits for it
        until = time.monotonic() + PATIENCE_S
        while self.run(["info"]).returncode != 0:
            if not _alive(process.pid) or time.monotonic() > until:
                raise HeavyError(f"dockerd does not start, see {log}: {log.read_text()[-2000:]}")
            time.sleep(0.1)

    def _stop(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            pid = int((SOCKET.parent / "docker.pid").read_text())
            os.kill(pid, signal.SIGTERM)
            until = time.monotonic() + 30
            while _alive(pid) and time.monotonic() < until:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
                time.sleep(0.05)


def mount_cgroups() -> None:
    """Mount cgroups by hand where nothing has done it (a bare machine without systemd)."""
    root = Path("/sys/fs/cgroup")
    if any(line.split()[1].startswith(str(root)) for line in Path("/proc/mounts").read_text().splitlines()):
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "cgroup", str(root)], check=True)
    for line in Path("/proc/cgroups").read_text().splitlines():
        name, _, _, enabled = line.split()
        if not line.startswith("#") and enabled == "1":
            (root / name).mkdir(exist_ok=True)
            done = subprocess.run(
                ["mount", "-t", "cgroup", "-o", name, "cgroup", str(root / name)], capture_output=True
            )
            if done.returncode != 0:
                (root / name).rmdir()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False
