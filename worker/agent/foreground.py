"""A child process that ends when the controller does: what it prints goes where we print, on one stream."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

GRACE_S = 10.0


def run(argv: Sequence[str], env: Mapping[str, str], cwd: Path | None = None, *, until_eof: bool = False) -> int:
    """Run to the end; its status (negative: by a signal). Raises OSError where it cannot be started.

    `until_eof`: the end of our standard input ends the child's whole group, first by SIGINT.
    """
    sys.stdout.flush()
    proc = subprocess.Popen(
        argv, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True
    )

    def end() -> None:
        for number in (signal.SIGINT, signal.SIGKILL):
            try:
                os.killpg(proc.pid, number)
                proc.wait(GRACE_S)
                return
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue

    def watch() -> None:
        while os.read(0, 4096):
            pass
        end()

    if until_eof:
        threading.Thread(target=watch, daemon=True).start()
    try:
        return proc.wait()
    except KeyboardInterrupt:
        end()
        raise
